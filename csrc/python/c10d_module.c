/* c10d_module.c: the Python module _c10d: hands a transport over a process group to _core, in a
 * capsule. */
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000 /* one binary for every Python from 3.11 on */
#endif
#include <Python.h>

#include <stdlib.h>

#include "c10d/c10d.h"

#define TRANSPORT_CAPSULE                                                                          \
    "agentcomm.transport" /* as in core_module.c, which renames a capsule that it has emptied */

static void transport_capsule_free(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, TRANSPORT_CAPSULE)) {
        struct agc_transport *t =
            (struct agc_transport *)PyCapsule_GetPointer(capsule, TRANSPORT_CAPSULE);
        Py_BEGIN_ALLOW_THREADS
        t->destroy(t->ctx);
        Py_END_ALLOW_THREADS
        free(t);
    }
}

static PyObject *c10d_open(PyObject *module, PyObject *args)
{
    const char *group_name;
    char text[512] = "";
    (void)module;
    if (!PyArg_ParseTuple(args, "s:open", &group_name))
        return NULL;
    struct agc_transport *t = (struct agc_transport *)malloc(sizeof *t);
    if (!t)
        return PyErr_NoMemory();
    enum agc_status status;
    Py_BEGIN_ALLOW_THREADS
    status = agc_c10d_open(group_name, t, text, sizeof text);
    Py_END_ALLOW_THREADS
    if (status != AGC_OK) {
        free(t);
        PyErr_Format(PyExc_RuntimeError, "cannot use process group %s: %s", group_name, text);
        return NULL;
    }
    PyObject *capsule = PyCapsule_New(t, TRANSPORT_CAPSULE, transport_capsule_free);
    if (!capsule) {
        t->destroy(t->ctx);
        free(t);
    }
    return capsule;
}

static PyMethodDef c10d_methods[] = {
    {"open", c10d_open, METH_VARARGS,
     "open(group_name: str) -> capsule\n\nA transport over the process group registered under that "
     "name."},
    {NULL, NULL, 0, NULL},
};

static int c10d_exec(PyObject *module)
{
    return PyModule_AddStringConstant(module, "TORCH_VERSION", agc_c10d_torch_version());
}

static PyModuleDef_Slot c10d_slots[] = {
    {Py_mod_exec, (void *)c10d_exec},
    {0, NULL},
};

static struct PyModuleDef c10d_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "agentcomm._c10d",
    .m_doc =
        "Transport over torch.distributed process groups. Compiled against one version of torch.",
    .m_methods = c10d_methods,
    .m_slots = c10d_slots,
};

PyMODINIT_FUNC PyInit__c10d(void);
PyMODINIT_FUNC PyInit__c10d(void)
{
    return PyModuleDef_Init(&c10d_module);
}
