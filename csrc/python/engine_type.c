/* engine_type.c: class Engine of _core: one exchange engine, as thin a skin as the rest of the
 * module.
 *
 * An engine lives as long as its object, or until close(). Its callbacks come from its own threads
 * and need the GIL; so the GIL is given up whenever one of them may have to be waited for.
 */
#include "python/args.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "python/engine_type.h"
#include "reduce/engine.h"

#define TRANSPORT_CAPSULE "agentcomm.transport"
#define TRANSPORT_CAPSULE_USED "agentcomm.transport.used"

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
        Py_BEGIN_ALLOW_THREADS
        status = agc_engine_create(&config, &taken, NULL, 0, &self->engine);
        Py_END_ALLOW_THREADS
        if (status != AGC_OK) {
            Py_CLEAR(self);
            raise_status(status);
        }
    }
    free(rank_names);
    return (PyObject *)self;
}

static void engine_free_ended(struct agc_engine *engine)
{
    Py_BEGIN_ALLOW_THREADS
    agc_engine_destroy(engine);
    Py_END_ALLOW_THREADS
}

/* Ends an engine whose threads are not the caller. Calls of other threads that wait in it return.
 */
static void engine_end(EngineObject *self, struct agc_engine *engine)
{
    Py_BEGIN_ALLOW_THREADS
    agc_engine_stop(engine);
    Py_END_ALLOW_THREADS
    if (self->ncalls == 0)
        engine_free_ended(engine);
    else
        self->ending = engine;
}

struct ending {
    EngineObject *self; /* owned */
    struct agc_engine *engine;
};

static void *engine_end_main(void *arg)
{
    struct ending *ending = (struct ending *)arg;
    PyGILState_STATE gil = PyGILState_Ensure();
    engine_end(ending->self, ending->engine);
    Py_DECREF(ending->self);
    PyGILState_Release(gil);
    free(ending);
    return NULL;
}

/* Exactly once; joins the engine's threads, whose callbacks need the GIL. On one of these threads
 * (in a callback, or where the garbage collector runs in one) another thread has to do it. */
static void engine_shut(EngineObject *self)
{
    struct agc_engine *engine = self->engine;
    self->engine = NULL;
    /* A forked child has a copy of the engine but none of its threads: there is nothing to join. */
    if (!engine || self->pid != getpid())
        return;
    if (!agc_engine_is_own_thread(engine)) {
        engine_end(self, engine);
        return;
    }
    struct ending *ending = (struct ending *)malloc(sizeof *ending);
    pthread_t thread;
    if (!ending)
        return; /* out of memory: better lost than freed under its own thread */
    *ending = (struct ending){(EngineObject *)Py_NewRef((PyObject *)self), engine};
    if (pthread_create(&thread, NULL, engine_end_main, ending) == 0)
        pthread_detach(thread);
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
    if (self->engine || self->ending)
        return 0; /* its callbacks are still needed */
    Py_CLEAR(self->on_done);
    Py_CLEAR(self->on_late);
    return 0;
}

static void engine_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    struct agc_engine *engine = ((EngineObject *)object)->engine;
    PyObject_GC_UnTrack(object);
    /* The package closes engines before it drops them. One that is dropped open on its own thread
     * is lost, object and all, rather than freed under its callback. */
    if (engine && ((EngineObject *)object)->pid == getpid() && agc_engine_is_own_thread(engine))
        return;
    engine_shut((EngineObject *)object);
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

/* The same for calls that wait until nothing is under way. */
static struct agc_engine *engine_enter_waiting(PyObject *object)
{
    struct agc_engine *engine = ((EngineObject *)object)->engine;
    if (engine && agc_engine_is_own_thread(engine)) {
        raise_named("StateError", AGC_ERR_STATE,
                    "called inside a callback of an exchange, this would wait for itself; call it"
                    " after the future's wait()");
        return NULL;
    }
    return engine_enter(object);
}

static PyObject *engine_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    engine_shut((EngineObject *)object);
    Py_RETURN_NONE;
}

/* lanes: [(spec, feedback, feedback_bf16, per_param, momentum), ...] */
static struct agc_lane_desc *lanes_from_list(PyObject *list, Py_ssize_t *n_ret)
{
    Py_ssize_t n = PyList_Size(list);
    struct agc_lane_desc *lanes = (struct agc_lane_desc *)malloc(sizeof *lanes * (size_t)(n + 1));
    if (!lanes)
        return (struct agc_lane_desc *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *spec_tuple;
        int feedback, feedback_bf16, per_param;
        float momentum;
        if (!PyArg_ParseTuple(
                PyList_GetItem(list, i),
                "O!pppf;a lane is (spec, feedback, feedback_bf16, per_param, momentum)",
                &PyTuple_Type, &spec_tuple, &feedback, &feedback_bf16, &per_param, &momentum) ||
            !spec_from_tuple(spec_tuple, &lanes[i].spec)) {
            free(lanes);
            return NULL;
        }
        lanes[i].feedback = feedback;
        lanes[i].feedback_bf16 = feedback_bf16;
        lanes[i].per_param = per_param;
        lanes[i].momentum = momentum;
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
    struct agc_engine *engine = engine_enter_waiting(object);
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
        Py_BEGIN_ALLOW_THREADS
        status = agc_engine_define_bucket(engine, index, dtype, pieces, (uint32_t)nparams, lanes,
                                          (uint32_t)nlanes, sum);
        Py_END_ALLOW_THREADS
        result = status == AGC_OK ? Py_NewRef(Py_None) : raise_status(status);
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
    struct agc_engine *engine = engine_enter_waiting(object);
    (void)unused;
    if (!engine)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    agc_engine_reset_buckets(engine);
    Py_END_ALLOW_THREADS
    engine_leave(object);
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
    const struct agc_submission submission = {.bucket = index,
                                              .round = round,
                                              .nforwards = nforwards,
                                              .absent = absent,
                                              .data = data.data,
                                              .dtype = data.dtype,
                                              .nelems = data.nelems,
                                              .token = kept};
    enum agc_status status;
    Py_BEGIN_ALLOW_THREADS
    status = agc_engine_submit(engine, &submission);
    Py_END_ALLOW_THREADS
    engine_leave(object);
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
    struct agc_engine *engine = engine_enter_waiting(object);
    double norm;
    (void)unused;
    if (!engine)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    norm = agc_engine_residual_norm(engine);
    Py_END_ALLOW_THREADS
    engine_leave(object);
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
    struct agc_engine *engine = engine_enter_waiting(object);
    if (!engine)
        return NULL;
    enum agc_status status;
    Py_BEGIN_ALLOW_THREADS
    status = agc_engine_residual_get(engine, param, owner, (float *)out.data);
    Py_END_ALLOW_THREADS
    engine_leave(object);
    if (status != AGC_OK)
        return raise_status(status);
    Py_RETURN_NONE;
}

static PyObject *engine_clear_residuals(PyObject *object, PyObject *unused)
{
    struct agc_engine *engine = engine_enter_waiting(object);
    (void)unused;
    if (!engine)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    agc_engine_residual_clear(engine);
    Py_END_ALLOW_THREADS
    engine_leave(object);
    Py_RETURN_NONE;
}

static PyObject *engine_add_param(PyObject *object, PyObject *arg)
{
    unsigned long long nelems = PyLong_AsUnsignedLongLong(arg);
    struct agc_engine *engine = PyErr_Occurred() ? NULL : engine_enter_waiting(object);
    uint32_t index = 0;
    if (!engine)
        return NULL;
    enum agc_status status;
    Py_BEGIN_ALLOW_THREADS
    status = agc_engine_add_param(engine, nelems, &index);
    Py_END_ALLOW_THREADS
    engine_leave(object);
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

PyType_Spec agc_engine_type_spec = {
    .name = "agentcomm._core.Engine",
    .basicsize = sizeof(EngineObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = engine_slots,
};
