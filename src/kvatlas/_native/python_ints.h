/* Lists of Python integers, read without counting references: no other code runs meanwhile.

   Token ids fit one digit of CPython's integers, and reading that digit costs half of a call. The stable ABI hides it. */
#ifndef KVA_PYTHON_INTS_H
#define KVA_PYTHON_INTS_H

#include <Python.h>

#include <stdint.h>

#ifdef Py_LIMITED_API
#define KVA_LIST_ITEM PyList_GetItem
#define KVA_TUPLE_ITEM PyTuple_GetItem
#else
#define KVA_LIST_ITEM PyList_GET_ITEM
#define KVA_TUPLE_ITEM PyTuple_GET_ITEM
#endif

/* The value of a plain int in 0..2^63-1; 0 when it is another type or out of range. */
static inline int kva_plain_int(PyObject *item, uint64_t *value)
{
    if (!PyLong_CheckExact(item))
        return 0;
#ifndef Py_LIMITED_API
#if PY_VERSION_HEX >= 0x030C0000
    if (PyUnstable_Long_IsCompact((PyLongObject *)item)) {
        Py_ssize_t compact = PyUnstable_Long_CompactValue((PyLongObject *)item);
        *value = (uint64_t)compact;
        return compact >= 0;
    }
#else
    if (Py_SIZE(item) == 1) {
        *value = ((PyLongObject *)item)->ob_digit[0];
        return 1;
    }
#endif
#endif
    int overflow = 0;
    long long number = PyLong_AsLongLongAndOverflow(item, &overflow);
    *value = (uint64_t)number;
    return number >= 0 && !overflow;
}

/* All items of a list or tuple as words; 0 when one is not a plain int in range. `words` has room for `count`. */
static inline int kva_sequence_words(PyObject *sequence, Py_ssize_t count, uint64_t *words)
{
    if (PyList_Check(sequence)) {
        for (Py_ssize_t i = 0; i < count; i++)
            if (!kva_plain_int(KVA_LIST_ITEM(sequence, i), words + i))
                return 0;
    } else {
        for (Py_ssize_t i = 0; i < count; i++)
            if (!kva_plain_int(KVA_TUPLE_ITEM(sequence, i), words + i))
                return 0;
    }
    return 1;
}

#endif
