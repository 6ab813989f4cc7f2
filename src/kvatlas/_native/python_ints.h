/* Lists and tuples of Python integers, read without counting references: no other code runs meanwhile.

   Token ids fit one digit of CPython's integers, and reading that digit costs half of a call. The stable ABI hides it. */
#ifndef KVA_PYTHON_INTS_H
#define KVA_PYTHON_INTS_H

#include <Python.h>

#include <stdint.h>

/* The value of a plain int in 0..2^63-1; 0 when it is another type or out of range. */
static inline int kva_plain_int(PyObject *item, uint64_t *value)
{
    if (!PyLong_CheckExact(item))
        return 0;
    int overflow = 0;
    long long number = PyLong_AsLongLongAndOverflow(item, &overflow);
    *value = (uint64_t)number;
    return number >= 0 && !overflow;
}

#ifndef Py_LIMITED_API

/* The value of an int of one digit; `odd` takes a bit when it has more or is negative. No branch here: what was read is
   looked at once for many. */
static inline uint64_t kva_digit(PyObject *item, uint64_t *odd)
{
    PyLongObject *number = (PyLongObject *)item;
#if PY_VERSION_HEX >= 0x030C0000
    Py_ssize_t value = PyUnstable_Long_CompactValue(number);
    *odd |= (uint64_t)!PyUnstable_Long_IsCompact(number) | (uint64_t)value >> 63;
    return (uint64_t)value;
#else
    uint64_t digits = (uint64_t)Py_SIZE(item); /* 0 for the number 0; negative numbers have a negative size */
    *odd |= digits & ~(uint64_t)1;
    return number->ob_digit[0] & (0 - digits);
#endif
}

/* Items `first` to `first + count` as words; 0 when one is not a plain int in range. */
static inline int kva_sequence_words(PyObject *sequence, Py_ssize_t first, Py_ssize_t count, uint64_t *words)
{
    PyObject **items = PySequence_Fast_ITEMS(sequence) + first;
    uint64_t odd = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!PyLong_CheckExact(items[i]))
            return 0;
        words[i] = kva_digit(items[i], &odd);
    }
    for (Py_ssize_t i = 0; odd && i < count; i++)
        if (!kva_plain_int(items[i], words + i))
            return 0;
    return 1;
}

#else

static inline int kva_sequence_words(PyObject *sequence, Py_ssize_t first, Py_ssize_t count, uint64_t *words)
{
    int is_list = PyList_Check(sequence);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = is_list ? PyList_GetItem(sequence, first + i) : PyTuple_GetItem(sequence, first + i);
        if (!kva_plain_int(item, words + i))
            return 0;
    }
    return 1;
}

#endif

#endif
