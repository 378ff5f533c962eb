/* core_module.c: the Python module _core: a thin skin over the core. Each function parses its
 * arguments, makes one call without the GIL, and turns the status into an exception. Policy lives
 * in the package, arithmetic in the core.
 */
#include "python/args.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/kernels.h"
#include "reduce/engine.h"

#define TRANSPORT_CAPSULE "agentcomm.transport"
#define TRANSPORT_CAPSULE_USED "agentcomm.transport.used"

/* ---- codecs and frames ---- */

static PyObject *core_codec_table(PyObject *module, PyObject *unused)
{
    struct agc_codec_info info;
    PyObject *list = PyList_New(0);
    (void)module;
    (void)unused;
    for (uint32_t i = 0; list && agc_codec_info_at(i, &info); i++) {
        PyObject *row =
            Py_BuildValue("{s:I,s:s,s:I,s:O,s:O,s:O,s:O}", "id", info.id, "name", info.name,
                          "block_nelems", info.default_block_nelems, "lossless",
                          info.flags & AGC_CODEC_LOSSLESS ? Py_True : Py_False, "feedback",
                          info.flags & AGC_CODEC_FEEDBACK ? Py_True : Py_False, "stochastic",
                          info.flags & AGC_CODEC_STOCHASTIC ? Py_True : Py_False, "zero_stays_zero",
                          info.flags & AGC_CODEC_ZERO_IN_BLOCK_MOVES ? Py_False : Py_True);
        if (!row || PyList_Append(list, row) != 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *core_frame_nbytes(PyObject *module, PyObject *args)
{
    PyObject *spec_tuple;
    struct agc_spec spec;
    unsigned int dtype;
    unsigned long long nelems;
    int checksum;
    uint64_t nbytes;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!IKp:frame_nbytes", &PyTuple_Type, &spec_tuple, &dtype, &nelems,
                          &checksum) ||
        !spec_from_tuple(spec_tuple, &spec))
        return NULL;
    enum agc_status status = agc_frame_nbytes(&spec, dtype, nelems, checksum, &nbytes);
    if (status != AGC_OK)
        return raise_status(status);
    return PyLong_FromUnsignedLongLong(nbytes);
}

static PyObject *core_encode(PyObject *module, PyObject *args)
{
    PyObject *spec_tuple, *src_capsule, *residual_capsule, *dst_capsule;
    struct agc_spec spec;
    struct tensor_arg src, dst, residual = {NULL, AGC_DTYPE_F32, 0};
    unsigned int seed;
    int checksum;
    uint64_t nbytes = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!OOIpO:encode", &PyTuple_Type, &spec_tuple, &src_capsule,
                          &residual_capsule, &seed, &checksum, &dst_capsule) ||
        !spec_from_tuple(spec_tuple, &spec) || !tensor_from_capsule(src_capsule, &src) ||
        !tensor_from_capsule(dst_capsule, &dst) ||
        (residual_capsule != Py_None && !tensor_from_capsule(residual_capsule, &residual)))
        return NULL;
    if (src.dtype == 0)
        return raise_status(AGC_ERR_DTYPE);
    if (dst.dtype != 0 || residual.dtype != AGC_DTYPE_F32) {
        PyErr_SetString(PyExc_TypeError, "out must be uint8 and residual float32");
        return NULL;
    }
    if (residual_capsule != Py_None && residual.nelems != src.nelems) {
        PyErr_Format(PyExc_ValueError, "residual has %llu elements, the tensor %llu",
                     (unsigned long long)residual.nelems, (unsigned long long)src.nelems);
        return NULL;
    }
    float *scratch = (float *)malloc(sizeof(float) * AGC_SCRATCH_NELEMS);
    if (!scratch)
        return PyErr_NoMemory();
    enum agc_status status;
    Py_BEGIN_ALLOW_THREADS status =
        agc_encode(&spec, src.data, src.dtype, src.nelems, (float *)residual.data, seed, checksum,
                   scratch, (uint8_t *)dst.data, dst.nelems, &nbytes);
    Py_END_ALLOW_THREADS free(scratch);
    if (status != AGC_OK)
        return raise_status(status);
    return PyLong_FromUnsignedLongLong(nbytes);
}

static PyObject *core_frame_info(PyObject *module, PyObject *capsule)
{
    struct tensor_arg src;
    struct agc_frame f;
    (void)module;
    if (!tensor_from_capsule(capsule, &src))
        return NULL;
    enum agc_status status = agc_frame_parse((const uint8_t *)src.data, src.nelems, &f);
    if (status != AGC_OK)
        return raise_status(status);
    return Py_BuildValue("{s:(IIIII),s:I,s:K,s:K,s:I,s:I}", "spec", f.spec.codec,
                         f.spec.block_nelems, f.spec.rounding, f.spec.frac_e9, f.spec.values,
                         "dtype", f.dtype, "nelems", (unsigned long long)f.nelems, "payload_nbytes",
                         (unsigned long long)f.payload_nbytes, "flags", f.flags, "seed", f.seed);
}

static PyObject *core_decode(PyObject *module, PyObject *args)
{
    PyObject *src_capsule, *out_capsule;
    struct tensor_arg src, out;
    int add;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOp:decode", &src_capsule, &out_capsule, &add) ||
        !tensor_from_capsule(src_capsule, &src) || !tensor_from_capsule(out_capsule, &out))
        return NULL;
    if (src.dtype != 0) {
        PyErr_SetString(PyExc_TypeError, "a frame is a tensor of uint8");
        return NULL;
    }
    float *scratch = (float *)malloc(sizeof(float) * AGC_SCRATCH_NELEMS);
    if (!scratch)
        return PyErr_NoMemory();
    enum agc_status status;
    Py_BEGIN_ALLOW_THREADS status = agc_decode((const uint8_t *)src.data, src.nelems, out.data,
                                               out.dtype, out.nelems, add, scratch);
    Py_END_ALLOW_THREADS free(scratch);
    if (status != AGC_OK)
        return raise_status(status);
    Py_RETURN_NONE;
}

/* ---- CPU and plan ---- */

static PyObject *core_cpu_info(PyObject *module, PyObject *unused)
{
    uint32_t f = agc_cpu_features();
    (void)module;
    (void)unused;
    return Py_BuildValue("{s:s,s:I}", "tier", agc_cpu_tier_name(f), "features", f);
}

static PyObject *core_set_cpu_mask(PyObject *module, PyObject *arg)
{
    unsigned long mask = PyLong_AsUnsignedLong(arg);
    (void)module;
    if (PyErr_Occurred())
        return NULL;
    agc_cpu_set_mask((uint32_t)mask);
    Py_RETURN_NONE;
}

static PyObject *core_plan_lane(PyObject *module, PyObject *args)
{
    PyObject *spec_tuple;
    struct agc_spec spec;
    unsigned int dtype, nranks, rank, chunk_log2;
    unsigned long long nelems;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!IKIII:plan_lane", &PyTuple_Type, &spec_tuple, &dtype, &nelems,
                          &nranks, &rank, &chunk_log2) ||
        !spec_from_tuple(spec_tuple, &spec))
        return NULL;
    enum agc_status status = agc_spec_resolve(&spec, &spec);
    if (status == AGC_OK && (nranks == 0 || rank >= nranks || chunk_log2 > AGC_CHUNK_LOG2_MAX))
        status = AGC_ERR_SPEC;
    if (status == AGC_OK && agc_dtype_nbytes(dtype) == 0)
        status = AGC_ERR_DTYPE;
    if (status != AGC_OK)
        return raise_status(status);
    struct agc_lane_plan p = agc_plan_lane(&spec, dtype, nelems, nranks);
    return Py_BuildValue("{s:I,s:K,s:O,s:K}", "tile_nelems", p.tile_nelems, "ntiles",
                         (unsigned long long)p.ntiles, "direct", p.direct ? Py_True : Py_False,
                         "wire_nbytes",
                         (unsigned long long)agc_plan_wire_nbytes(&p, rank, chunk_log2));
}

/* ---- engine ---- */

typedef struct {
    PyObject_HEAD struct agc_engine *engine; /* NULL: closed */
    struct agc_engine *ending; /* closed while calls were under way: the last of them destroys it */
    uint32_t ncalls;           /* under way */
    pid_t pid;                 /* of the process whose threads it has */
    PyObject *on_done;
    PyObject *on_late;
} EngineObject;

/* Calls back into Python from the engine's threads. token is owned by the submission and given up
 * here. */
static void engine_on_done(void *ctx, void *token, const struct agc_failure *failure)
{
    EngineObject *self = (EngineObject *)ctx;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *result =
        failure ? PyObject_CallFunction(self->on_done, "O(sssi)", (PyObject *)token,
                                        agc_status_exception(failure->status),
                                        agc_status_name(failure->status), failure->text,
                                        failure->rank == AGC_RANK_NONE ? -1 : (int)failure->rank)
                : PyObject_CallFunction(self->on_done, "OO", (PyObject *)token, Py_None);
    if (!result)
        PyErr_WriteUnraisable(self->on_done);
    Py_XDECREF(result);
    Py_DECREF((PyObject *)token);
    PyGILState_Release(gil);
}

static void engine_on_late(void *ctx, uint32_t rank, uint32_t round, uint32_t bucket,
                           double seconds)
{
    EngineObject *self = (EngineObject *)ctx;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *result = PyObject_CallFunction(self->on_late, "IIId", rank, round, bucket, seconds);
    if (!result)
        PyErr_WriteUnraisable(self->on_late);
    Py_XDECREF(result);
    PyGILState_Release(gil);
}

/* A list of numbers as an array; NULL with an exception set. The caller frees it. */
static void *numbers_from_list(PyObject *list, size_t item_nbytes, Py_ssize_t *n_ret)
{
    Py_ssize_t n = PyList_Size(list);
    if (n < 0)
        return NULL;
    void *array = malloc((size_t)n * item_nbytes + 1);
    if (!array)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++) {
        unsigned long long x = PyLong_AsUnsignedLongLong(PyList_GetItem(list, i));
        if (PyErr_Occurred()) {
            free(array);
            return NULL;
        }
        if (item_nbytes == sizeof(uint64_t))
            ((uint64_t *)array)[i] = x;
        else
            ((uint32_t *)array)[i] = (uint32_t)x;
    }
    *n_ret = n;
    return array;
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"transport",       "stream",    "seed",   "chunk_log2",
                            "elem_nbytes_max", "timeout_s", "late_s", "rank_names",
                            "on_done",         "on_late",   NULL};
    PyObject *capsule, *names_list, *on_done, *on_late;
    unsigned long long stream;
    unsigned int seed, chunk_log2, elem_nbytes_max;
    double timeout_s, late_s;
    Py_ssize_t nranks = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OKIIIddO!OO:Engine", names, &capsule, &stream,
                                     &seed, &chunk_log2, &elem_nbytes_max, &timeout_s, &late_s,
                                     &PyList_Type, &names_list, &on_done, &on_late))
        return NULL;
    struct agc_transport *transport =
        (struct agc_transport *)PyCapsule_GetPointer(capsule, TRANSPORT_CAPSULE);
    if (!transport)
        return NULL;
    uint32_t *rank_names = (uint32_t *)numbers_from_list(names_list, sizeof(uint32_t), &nranks);
    EngineObject *self = NULL;
    if (rank_names && nranks != (Py_ssize_t)transport->nranks)
        PyErr_SetString(PyExc_ValueError, "rank_names must have one number per rank");
    else if (rank_names)
        self = (EngineObject *)PyType_GenericAlloc(type, 0);
    if (self) {
        self->pid = getpid();
        self->on_done = Py_NewRef(on_done);
        self->on_late = Py_NewRef(on_late);
        struct agc_engine_config config = {
            .stream = stream,
            .seed = seed,
            .chunk_log2 = chunk_log2,
            .elem_nbytes_max = elem_nbytes_max,
            .timeout_ns = (uint64_t)(timeout_s * 1e9),
            .late_ns = (uint64_t)(late_s * 1e9),
            .rank_names = rank_names,
            .callbacks = {self, engine_on_done, engine_on_late},
        };
        /* The engine takes the transport over, on failure too. */
        struct agc_transport taken = *transport;
        PyCapsule_SetName(capsule, TRANSPORT_CAPSULE_USED);
        free(transport);
        enum agc_status status;
        Py_BEGIN_ALLOW_THREADS status = agc_engine_create(&config, &taken, NULL, 0, &self->engine);
        Py_END_ALLOW_THREADS if (status != AGC_OK)
        {
            Py_CLEAR(self);
            raise_status(status);
        }
    }
    free(rank_names);
    return (PyObject *)self;
}

static void engine_free_ended(struct agc_engine *engine)
{
    Py_BEGIN_ALLOW_THREADS agc_engine_destroy(engine);
    Py_END_ALLOW_THREADS
}

/* Exactly once; joins the engine's threads, whose callbacks need the GIL. Calls of other threads
 * that wait in the engine return. */
static void engine_shut(EngineObject *self)
{
    struct agc_engine *engine = self->engine;
    self->engine = NULL;
    /* A forked child has a copy of the engine but none of its threads: there is nothing to join. */
    if (!engine || self->pid != getpid())
        return;
    Py_BEGIN_ALLOW_THREADS agc_engine_stop(engine);
    Py_END_ALLOW_THREADS if (self->ncalls == 0) engine_free_ended(engine);
    else self->ending = engine;
}

static int engine_traverse(PyObject *object, visitproc visit, void *arg)
{
    EngineObject *self = (EngineObject *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->on_done);
    Py_VISIT(self->on_late);
    return 0;
}

static int engine_clear(PyObject *object)
{
    EngineObject *self = (EngineObject *)object;
    engine_shut(self); /* before the callbacks go */
    Py_CLEAR(self->on_done);
    Py_CLEAR(self->on_late);
    return 0;
}

static void engine_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    engine_clear(object);
    freefunc free_object = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_object(object);
    Py_DECREF(type);
}

/* The engine for one call, which ends with engine_leave; NULL with StateError set if it is closed.
 */
static struct agc_engine *engine_enter(PyObject *object)
{
    EngineObject *self = (EngineObject *)object;
    if (!self->engine)
        raise_named("StateError", AGC_ERR_CLOSED, "the handle is closed; attach again");
    else
        self->ncalls++;
    return self->engine;
}

static void engine_leave(PyObject *object)
{
    EngineObject *self = (EngineObject *)object;
    struct agc_engine *ending = self->ending;
    if (--self->ncalls > 0 || !ending)
        return;
    self->ending = NULL;
    engine_free_ended(ending);
}

static PyObject *engine_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    engine_shut((EngineObject *)object);
    Py_RETURN_NONE;
}

/* lanes: [(spec, feedback), ...] */
static struct agc_lane_desc *lanes_from_list(PyObject *list, Py_ssize_t *n_ret)
{
    Py_ssize_t n = PyList_Size(list);
    struct agc_lane_desc *lanes = (struct agc_lane_desc *)malloc(sizeof *lanes * (size_t)(n + 1));
    if (!lanes)
        return (struct agc_lane_desc *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *spec_tuple;
        int feedback;
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "O!p;a lane is (spec, feedback)",
                              &PyTuple_Type, &spec_tuple, &feedback) ||
            !spec_from_tuple(spec_tuple, &lanes[i].spec)) {
            free(lanes);
            return NULL;
        }
        lanes[i].feedback = feedback;
    }
    *n_ret = n;
    return lanes;
}

static PyObject *engine_define_bucket(PyObject *object, PyObject *args)
{
    unsigned int index, dtype;
    PyObject *params_list, *lane_of_list, *lanes_list;
    int sum;
    Py_ssize_t nparams = 0, nlane_of = 0, nlanes = 0;
    if (!PyArg_ParseTuple(args, "IIO!O!O!p:define_bucket", &index, &dtype, &PyList_Type,
                          &params_list, &PyList_Type, &lane_of_list, &PyList_Type, &lanes_list,
                          &sum))
        return NULL;
    struct agc_engine *engine = engine_enter(object);
    if (!engine)
        return NULL;
    uint32_t *params = (uint32_t *)numbers_from_list(params_list, sizeof(uint32_t), &nparams);
    uint32_t *lane_of =
        params ? (uint32_t *)numbers_from_list(lane_of_list, sizeof(uint32_t), &nlane_of) : NULL;
    struct agc_lane_desc *lanes = lane_of ? lanes_from_list(lanes_list, &nlanes) : NULL;
    struct agc_piece_desc *pieces =
        lanes ? (struct agc_piece_desc *)malloc(sizeof *pieces * (size_t)(nparams + 1)) : NULL;
    PyObject *result = NULL;
    if (lanes && !pieces) {
        PyErr_NoMemory();
    } else if (pieces && nparams != nlane_of) {
        PyErr_SetString(PyExc_ValueError, "params and lane_of differ in length");
    } else if (pieces) {
        for (Py_ssize_t i = 0; i < nparams; i++)
            pieces[i] = (struct agc_piece_desc){params[i], lane_of[i]};
        enum agc_status status;
        Py_BEGIN_ALLOW_THREADS status = agc_engine_define_bucket(
            engine, index, dtype, pieces, (uint32_t)nparams, lanes, (uint32_t)nlanes, sum);
        Py_END_ALLOW_THREADS result = status == AGC_OK ? Py_NewRef(Py_None) : raise_status(status);
    }
    free(params);
    free(lane_of);
    free(lanes);
    free(pieces);
    engine_leave(object);
    return result;
}

static PyObject *engine_reset_buckets(PyObject *object, PyObject *unused)
{
    struct agc_engine *engine = engine_enter(object);
    (void)unused;
    if (!engine)
        return NULL;
    Py_BEGIN_ALLOW_THREADS agc_engine_reset_buckets(engine);
    Py_END_ALLOW_THREADS engine_leave(object);
    Py_RETURN_NONE;
}

static PyObject *engine_submit(PyObject *object, PyObject *args)
{
    unsigned int index, round, nforwards;
    int absent;
    PyObject *capsule, *token;
    struct tensor_arg data;
    if (!PyArg_ParseTuple(args, "IIIpOO:submit", &index, &round, &nforwards, &absent, &capsule,
                          &token) ||
        !tensor_from_capsule(capsule, &data))
        return NULL;
    /* The capsule keeps the memory alive until the bucket is done. */
    PyObject *kept = PyTuple_Pack(2, token, capsule);
    struct agc_engine *engine = kept ? engine_enter(object) : NULL;
    if (!engine) {
        Py_XDECREF(kept);
        return NULL;
    }
    enum agc_status status;
    Py_BEGIN_ALLOW_THREADS status =
        agc_engine_submit(engine, index, round, nforwards, absent, data.data, kept);
    Py_END_ALLOW_THREADS engine_leave(object);
    if (status != AGC_OK) {
        Py_DECREF(kept);
        return raise_status(status);
    }
    Py_RETURN_NONE;
}

static PyObject *stats_to_dict(const struct agc_engine_stats *s)
{
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:d,s:d,s:d,s:I}", "rounds",
                         (unsigned long long)s->nrounds, "buckets", (unsigned long long)s->nbuckets,
                         "dense_nbytes", (unsigned long long)s->dense_nbytes, "wire_nbytes",
                         (unsigned long long)s->wire_nbytes, "encode_s",
                         (double)s->encode_ns * 1e-9, "wait_s", (double)s->wait_ns * 1e-9,
                         "decode_s", (double)s->decode_ns * 1e-9, "chunk_log2", s->chunk_log2);
}

static PyObject *engine_stats(PyObject *object, PyObject *unused)
{
    struct agc_engine_stats stats;
    struct agc_engine *engine = engine_enter(object);
    (void)unused;
    if (!engine)
        return NULL;
    agc_engine_stats(engine, &stats);
    engine_leave(object);
    return stats_to_dict(&stats);
}

static PyObject *engine_bucket_stats(PyObject *object, PyObject *arg)
{
    struct agc_engine_stats stats;
    unsigned long index = PyLong_AsUnsignedLong(arg);
    struct agc_engine *engine = PyErr_Occurred() ? NULL : engine_enter(object);
    if (!engine)
        return NULL;
    bool defined = agc_engine_bucket_stats(engine, (uint32_t)index, &stats);
    engine_leave(object);
    if (!defined)
        Py_RETURN_NONE;
    return stats_to_dict(&stats);
}

static PyObject *engine_residual_norm(PyObject *object, PyObject *unused)
{
    struct agc_engine *engine = engine_enter(object);
    double norm;
    (void)unused;
    if (!engine)
        return NULL;
    Py_BEGIN_ALLOW_THREADS norm = agc_engine_residual_norm(engine);
    Py_END_ALLOW_THREADS engine_leave(object);
    return PyFloat_FromDouble(norm);
}

static PyObject *engine_residual(PyObject *object, PyObject *args)
{
    unsigned int param;
    int owner;
    PyObject *capsule;
    struct tensor_arg out;
    if (!PyArg_ParseTuple(args, "IpO:residual", &param, &owner, &capsule) ||
        !tensor_from_capsule(capsule, &out))
        return NULL;
    struct agc_engine *engine = engine_enter(object);
    if (!engine)
        return NULL;
    enum agc_status status;
    Py_BEGIN_ALLOW_THREADS status =
        agc_engine_residual_get(engine, param, owner, (float *)out.data);
    Py_END_ALLOW_THREADS engine_leave(object);
    if (status != AGC_OK)
        return raise_status(status);
    Py_RETURN_NONE;
}

static PyObject *engine_clear_residuals(PyObject *object, PyObject *unused)
{
    struct agc_engine *engine = engine_enter(object);
    (void)unused;
    if (!engine)
        return NULL;
    Py_BEGIN_ALLOW_THREADS agc_engine_residual_clear(engine);
    Py_END_ALLOW_THREADS engine_leave(object);
    Py_RETURN_NONE;
}

static PyObject *engine_add_param(PyObject *object, PyObject *arg)
{
    unsigned long long nelems = PyLong_AsUnsignedLongLong(arg);
    struct agc_engine *engine = PyErr_Occurred() ? NULL : engine_enter(object);
    uint32_t index = 0;
    if (!engine)
        return NULL;
    enum agc_status status;
    Py_BEGIN_ALLOW_THREADS status = agc_engine_add_param(engine, nelems, &index);
    Py_END_ALLOW_THREADS engine_leave(object);
    return status == AGC_OK ? PyLong_FromUnsignedLong(index) : raise_status(status);
}

static PyMethodDef engine_methods[] = {
    {"add_param", engine_add_param, METH_O, "add_param(nelems) -> index"},
    {"define_bucket", engine_define_bucket, METH_VARARGS,
     "define_bucket(index, dtype, params, lane_of, lanes, sum): see agc_engine_define_bucket"},
    {"reset_buckets", engine_reset_buckets, METH_NOARGS,
     "reset_buckets(): see agc_engine_reset_buckets"},
    {"submit", engine_submit, METH_VARARGS,
     "submit(index, round, nforwards, absent, tensor capsule, token)"},
    {"stats", engine_stats, METH_NOARGS, "stats() -> dict"},
    {"bucket_stats", engine_bucket_stats, METH_O, "bucket_stats(index) -> dict | None"},
    {"residual_norm", engine_residual_norm, METH_NOARGS, "residual_norm() -> float"},
    {"residual", engine_residual, METH_VARARGS, "residual(param, owner, out capsule)"},
    {"clear_residuals", engine_clear_residuals, METH_NOARGS, "clear_residuals()"},
    {"close", engine_close, METH_NOARGS,
     "close(): stops the threads and closes the connections; idempotent"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_new, (void *)engine_new},
    {Py_tp_dealloc, (void *)engine_dealloc},
    {Py_tp_traverse, (void *)engine_traverse},
    {Py_tp_clear, (void *)engine_clear},
    {Py_tp_methods, engine_methods},
    {Py_tp_doc, "One exchange engine: csrc/reduce/engine.h."},
    {0, NULL},
};

static PyType_Spec engine_spec = {
    .name = "agentcomm._core.Engine",
    .basicsize = sizeof(EngineObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = engine_slots,
};

/* ---- module ---- */

static PyMethodDef core_methods[] = {
    {"codec_table", core_codec_table, METH_NOARGS, "codec_table() -> list of dicts, one per codec"},
    {"frame_nbytes", core_frame_nbytes, METH_VARARGS,
     "frame_nbytes(spec, dtype, nelems, checksum) -> int"},
    {"encode", core_encode, METH_VARARGS,
     "encode(spec, tensor, residual | None, seed, checksum, out) -> int"},
    {"frame_info", core_frame_info, METH_O, "frame_info(frame) -> dict"},
    {"decode", core_decode, METH_VARARGS, "decode(frame, out, add)"},
    {"cpu_info", core_cpu_info, METH_NOARGS, "cpu_info() -> dict"},
    {"set_cpu_mask", core_set_cpu_mask, METH_O,
     "set_cpu_mask(mask): for tests; not while other threads encode"},
    {"plan_lane", core_plan_lane, METH_VARARGS,
     "plan_lane(spec, dtype, nelems, nranks, rank, chunk_log2) -> dict"},
    {NULL, NULL, 0, NULL},
};

static int core_exec(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &engine_spec, NULL);
    int failed = !type || PyModule_AddType(module, (PyTypeObject *)type) != 0;
    Py_XDECREF(type);
    if (failed)
        return -1;
    return PyModule_AddIntConstant(module, "CHUNK_LOG2_MIN", AGC_CHUNK_LOG2_MIN) ||
                   PyModule_AddIntConstant(module, "CHUNK_LOG2_MAX", AGC_CHUNK_LOG2_MAX) ||
                   PyModule_AddIntConstant(module, "WIRE_VERSION", AGC_WIRE_VERSION) ||
                   PyModule_AddIntConstant(module, "HEADER_NBYTES", AGC_WIRE_HEADER_NBYTES)
               ? -1
               : 0;
}

static PyModuleDef_Slot core_slots[] = {
    {Py_mod_exec, (void *)core_exec},
    {0, NULL},
};

static struct PyModuleDef core_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "agentcomm._core",
    .m_doc = "The C core of agentcomm: codecs, frames, and the exchange engine.",
    .m_methods = core_methods,
    .m_slots = core_slots,
};

PyMODINIT_FUNC PyInit__core(void);
PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&core_module);
}
