/* core_module.c: the Python module _core: a thin skin over the core. Each function parses its
 * arguments, makes one call without the GIL, and turns the status into an exception. Policy lives
 * in the package, arithmetic in the core.
 */
#include "python/args.h"

#include <stdlib.h>
#include <string.h>

#include "codecs/parallel.h"
#include "core/kernels.h"
#include "python/engine_type.h"
#include "reduce/plan.h"

/* ---- codecs and frames ---- */

static PyObject *core_codec_table(PyObject *module, PyObject *unused)
{
    struct agc_codec_info info;
    PyObject *list = PyList_New(0);
    (void)module;
    (void)unused;
    for (uint32_t i = 0; list && agc_codec_info_at(i, &info); i++) {
        PyObject *row =
            Py_BuildValue("{s:I,s:s,s:I,s:O,s:O,s:O,s:O,s:O,s:O}", "id", info.id, "name", info.name,
                          "block_nelems", info.default_block_nelems, "lossless",
                          info.flags & AGC_CODEC_LOSSLESS ? Py_True : Py_False, "feedback",
                          info.flags & AGC_CODEC_FEEDBACK ? Py_True : Py_False, "stochastic",
                          info.flags & AGC_CODEC_STOCHASTIC ? Py_True : Py_False, "zero_stays_zero",
                          info.flags & AGC_CODEC_ZERO_IN_BLOCK_MOVES ? Py_False : Py_True, "sparse",
                          info.flags & AGC_CODEC_SPARSE ? Py_True : Py_False, "values",
                          info.flags & AGC_CODEC_VALUES ? Py_True : Py_False);
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

/* No more threads than have two tiles each: a thread costs as much as a tile takes. */
static unsigned int threads_for(unsigned int wanted, uint64_t nelems)
{
    uint64_t most = nelems / (2 * AGC_TILE_NELEMS_MAX);
    most = most < AGC_NTHREADS_MAX ? most : AGC_NTHREADS_MAX;
    most = most > 1 ? most : 1;
    return wanted < most ? (wanted ? wanted : 1) : (unsigned int)most;
}

static PyObject *core_encode(PyObject *module, PyObject *args)
{
    PyObject *spec_tuple, *src_capsule, *residual_capsule, *dst_capsule;
    struct agc_spec spec;
    struct tensor_arg src, dst, residual = {NULL, AGC_DTYPE_F32, 0};
    unsigned int seed, nthreads;
    int checksum;
    uint64_t nbytes = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!OOIpOI:encode", &PyTuple_Type, &spec_tuple, &src_capsule,
                          &residual_capsule, &seed, &checksum, &dst_capsule, &nthreads) ||
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
    nthreads = threads_for(nthreads, src.nelems);
    float *scratch = (float *)malloc(sizeof(float) * AGC_SCRATCH_NELEMS * nthreads);
    if (!scratch)
        return PyErr_NoMemory();
    enum agc_status status;
    Py_BEGIN_ALLOW_THREADS
    status =
        agc_encode_parallel(&spec, src.data, src.dtype, src.nelems, (float *)residual.data, seed,
                            checksum, nthreads, scratch, (uint8_t *)dst.data, dst.nelems, &nbytes);
    Py_END_ALLOW_THREADS
    free(scratch);
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
    unsigned int nthreads;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOpI:decode", &src_capsule, &out_capsule, &add, &nthreads) ||
        !tensor_from_capsule(src_capsule, &src) || !tensor_from_capsule(out_capsule, &out))
        return NULL;
    if (src.dtype != 0) {
        PyErr_SetString(PyExc_TypeError, "a frame is a tensor of uint8");
        return NULL;
    }
    nthreads = threads_for(nthreads, out.nelems);
    float *scratch = (float *)malloc(sizeof(float) * AGC_SCRATCH_NELEMS * nthreads);
    if (!scratch)
        return PyErr_NoMemory();
    enum agc_status status;
    Py_BEGIN_ALLOW_THREADS
    status = agc_decode_parallel((const uint8_t *)src.data, src.nelems, out.data, out.dtype,
                                 out.nelems, add, nthreads, scratch);
    Py_END_ALLOW_THREADS
    free(scratch);
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

/* ---- module ---- */

static PyMethodDef core_methods[] = {
    {"codec_table", core_codec_table, METH_NOARGS, "codec_table() -> list of dicts, one per codec"},
    {"frame_nbytes", core_frame_nbytes, METH_VARARGS,
     "frame_nbytes(spec, dtype, nelems, checksum) -> int"},
    {"encode", core_encode, METH_VARARGS,
     "encode(spec, tensor, residual | None, seed, checksum, out, nthreads) -> int"},
    {"frame_info", core_frame_info, METH_O, "frame_info(frame) -> dict"},
    {"decode", core_decode, METH_VARARGS, "decode(frame, out, add, nthreads)"},
    {"cpu_info", core_cpu_info, METH_NOARGS, "cpu_info() -> dict"},
    {"set_cpu_mask", core_set_cpu_mask, METH_O,
     "set_cpu_mask(mask): for tests; not while other threads encode"},
    {"plan_lane", core_plan_lane, METH_VARARGS,
     "plan_lane(spec, dtype, nelems, nranks, rank, chunk_log2) -> dict"},
    {NULL, NULL, 0, NULL},
};

static int core_exec(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &agc_engine_type_spec, NULL);
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
