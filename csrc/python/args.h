/* args.h: what the functions of core_module.c share: tensors from capsules, specs from tuples,
 * statuses to exceptions. */
#ifndef AGC_ARGS_H
#define AGC_ARGS_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000 /* one binary for every Python from 3.11 on */
#endif
#include <Python.h>

#include "agentcomm.h"
#include "python/dlpack.h"

/* A contiguous tensor in main memory, borrowed from a DLPack capsule for as long as the capsule
 * lives. */
struct tensor_arg {
    void *data;
    uint32_t dtype; /* enum agc_dtype; 0: bytes (uint8) */
    uint64_t nelems;
};

/* Raises class `name` of agentcomm.errors. Returns NULL, for a tail call. */
static inline PyObject *raise_named(const char *name, enum agc_status status, const char *text)
{
    PyObject *errors = PyImport_ImportModule("agentcomm.errors");
    PyObject *type = errors ? PyObject_GetAttrString(errors, name) : NULL;
    PyObject *error = type ? PyObject_CallFunction(type, "s", text) : NULL;
    PyObject *value = error ? PyUnicode_FromString(agc_status_name(status)) : NULL;
    if (value && PyObject_SetAttrString(error, "status", value) == 0)
        PyErr_SetObject(type, error);
    Py_XDECREF(value);
    Py_XDECREF(error);
    Py_XDECREF(type);
    Py_XDECREF(errors);
    return NULL;
}

static inline PyObject *raise_status(enum agc_status status)
{
    if (status == AGC_ERR_NOMEM)
        return PyErr_NoMemory();
    return raise_named(agc_status_exception(status), status, agc_status_text(status));
}

static inline uint32_t dtype_of_dlpack(uint8_t code, uint8_t bits)
{
    if (code == DLPACK_FLOAT && bits == 32)
        return AGC_DTYPE_F32;
    if (code == DLPACK_FLOAT && bits == 16)
        return AGC_DTYPE_F16;
    if (code == DLPACK_FLOAT && bits == 64)
        return AGC_DTYPE_F64;
    if (code == DLPACK_BFLOAT && bits == 16)
        return AGC_DTYPE_BF16;
    return 0;
}

/* Fills in a tensor argument; false with an exception set if it is none that the core can use. */
static inline int tensor_from_capsule(PyObject *capsule, struct tensor_arg *arg)
{
    struct dlpack_managed *managed =
        (struct dlpack_managed *)PyCapsule_GetPointer(capsule, "dltensor");
    if (!managed)
        return 0;
    const struct dlpack_tensor *t = &managed->tensor;
    if (t->device.type != DLPACK_DEVICE_CPU) {
        PyErr_SetString(PyExc_ValueError,
                        "the tensor is not in main memory; move it to the CPU first (.cpu())");
        return 0;
    }
    int64_t nelems = 1;
    for (int32_t i = 0; i < t->ndim; i++)
        nelems = t->shape[i] == 0 ? 0 : nelems; /* the strides of nothing do not matter */
    for (int32_t i = t->ndim - 1; nelems && i >= 0; i--) {
        if (t->strides && t->shape[i] > 1 && t->strides[i] != nelems) {
            PyErr_SetString(PyExc_ValueError,
                            "the tensor is not contiguous; pass .contiguous() or a view that is");
            return 0;
        }
        nelems *= t->shape[i];
    }
    arg->data = (uint8_t *)t->data + t->byte_offset;
    arg->nelems = (uint64_t)nelems;
    arg->dtype = dtype_of_dlpack(t->dtype.code, t->dtype.bits);
    if (arg->dtype == 0 && !(t->dtype.code == DLPACK_UINT && t->dtype.bits == 8)) {
        PyErr_SetString(PyExc_TypeError, "the tensor's dtype is not supported; float32, float16, "
                                         "bfloat16, float64 are, uint8 for frames");
        return 0;
    }
    return 1;
}

/* (codec id, block_nelems, rounding, frac_e9, values id) */
static inline int spec_from_tuple(PyObject *tuple, struct agc_spec *spec)
{
    return PyArg_ParseTuple(tuple, "IIIII;a spec is a tuple of five numbers", &spec->codec,
                            &spec->block_nelems, &spec->rounding, &spec->frac_e9, &spec->values);
}

#endif /* AGC_ARGS_H */
