/* shardio._core: what Python asks of the core. Arguments are taken apart and checked here; the work
 * is done in the other files, without the GIL and without a Python object in sight.
 *
 * Nothing here is global and changes, so any number of threads and interpreters may use it at once.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "core.h"

PyDoc_STRVAR(checksum_doc,
             "checksum(data: bytes-like, seed: int, /) -> int\n\nxxh3_64 of the bytes.");

static PyObject *checksum(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer data;
    unsigned long long seed;
    if (!PyArg_ParseTuple(args, "y*K:checksum", &data, &seed))
        return NULL;
    uint64_t found;
    Py_BEGIN_ALLOW_THREADS
    found = core_checksum(data.buf, (size_t)data.len, seed);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLongLong(found);
}

static PyMethodDef methods[] = {
    {"checksum", checksum, METH_VARARGS, checksum_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "shardio._core",
    .m_doc = "The compiled core of shardio; see shardio/engine.py.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&definition);
}
