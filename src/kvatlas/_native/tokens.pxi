"""Token ids and extras as the C side reads them: included by every extension that takes them from Python.

Whatever is not a plain buffer or a list of plain integers goes through the Python twin's `pack_tokens`, so that native
and pure accept and refuse the same things.
"""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize, PyBytes_Size
from libc.stdint cimport uint8_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

from kvatlas._native import _pure
from kvatlas._native.arguments import MAX_TOKEN_ID, MAX_U32, bad_token_ids, require_extras


cdef extern from "tokens.h":
    ctypedef enum kva_token_kind:
        KVA_I32
        KVA_U32
        KVA_I64
        KVA_U64

    ctypedef struct kva_tokens:
        const void *data
        size_t count
        kva_token_kind kind

    bint kva_tokens_valid(const kva_tokens *tokens)
    bint kva_tokens_fit(const kva_tokens *tokens, int bits)


cdef extern from "chain.h":
    ctypedef enum kva_status:
        KVA_OK
        KVA_BAD_TOKEN
        KVA_NO_MEMORY

    ctypedef struct kva_extra:
        const uint8_t *data
        size_t length


cdef extern from "python_ints.h":
    bint kva_sequence_words(object sequence, Py_ssize_t first, Py_ssize_t count, uint64_t *words)


cdef bint _kind_of(const Py_buffer *view, kva_token_kind *kind) noexcept:
    """Whether a buffer is one row of aligned machine integers, and of which kind."""
    if view.ndim != 1 or view.format == NULL or view.format[0] == 0 or view.format[1] != 0:
        return False
    if <uintptr_t>view.buf % <size_t>view.itemsize != 0 and view.len > 0:
        return False
    cdef char code = view.format[0]
    if code == b"i" or code == b"l" or code == b"q":
        kind[0] = KVA_I32 if view.itemsize == 4 else KVA_I64
    elif code == b"I" or code == b"L" or code == b"Q":
        kind[0] = KVA_U32 if view.itemsize == 4 else KVA_U64
    else:
        return False
    return view.itemsize == 4 or view.itemsize == 8


cdef bytes _sequence_words(object ids):
    """A list or tuple of plain integers as 64-bit words in bytes; None when it holds anything else."""
    cdef Py_ssize_t count = len(ids)
    cdef bytes words = PyBytes_FromStringAndSize(NULL, 8 * count)
    return words if kva_sequence_words(ids, 0, count, <uint64_t *>PyBytes_AsString(words)) else None


cdef class _Tokens:
    """Token ids as the C side reads them; keeps their memory alive and unchanged in size."""

    cdef kva_tokens c
    cdef Py_buffer view
    cdef bint viewed
    cdef bytes words

    def __cinit__(self, token_ids):
        self.viewed = False
        if type(token_ids) is list or type(token_ids) is tuple:
            self.words = _sequence_words(token_ids)
            if self.words is not None:
                self.c.data = PyBytes_AsString(self.words)
                self.c.count = len(token_ids)
                self.c.kind = KVA_U64
                return
        elif self.borrow(token_ids):
            if not kva_tokens_valid(&self.c):
                raise bad_token_ids(token_ids, "a value is negative or too large")
            return
        if not self.borrow(_pure.pack_tokens(token_ids)):
            raise bad_token_ids(token_ids, "they cannot be read as machine words")

    cdef bint borrow(self, object owner):
        if not PyObject_CheckBuffer(owner):
            return False
        try:
            PyObject_GetBuffer(owner, &self.view, PyBUF_ND | PyBUF_FORMAT)
        except (BufferError, TypeError, ValueError):  # not contiguous
            return False
        if not _kind_of(&self.view, &self.c.kind):
            PyBuffer_Release(&self.view)
            return False
        self.viewed = True
        self.c.data = self.view.buf
        self.c.count = <size_t>(self.view.len // self.view.itemsize)
        return True

    def __dealloc__(self):
        if self.viewed:
            PyBuffer_Release(&self.view)


cdef class _Extras:
    """Encoded extra keys of each block as the C side reads them; NULL for None."""

    cdef kva_extra *c
    cdef tuple owners

    def __cinit__(self, extras, Py_ssize_t num_blocks):
        require_extras(extras, num_blocks)
        if extras is None or num_blocks == 0:
            return
        self.owners = tuple(extras)
        self.c = <kva_extra *>malloc(<size_t>num_blocks * sizeof(kva_extra))
        if self.c == NULL:
            raise MemoryError
        cdef Py_ssize_t i
        for i in range(num_blocks):
            extra = self.owners[i]
            if extra is None:
                self.c[i].data = NULL
                self.c[i].length = 0
            else:
                self.c[i].data = <const uint8_t *>PyBytes_AsString(extra)
                self.c[i].length = <size_t>PyBytes_Size(extra)

    def __dealloc__(self):
        free(self.c)


cdef _Tokens _tokens_u32(token_ids):
    """Token ids of which each fits 32 bits."""
    tokens = _Tokens(token_ids)
    if not kva_tokens_fit(&tokens.c, 32):
        raise bad_token_ids(token_ids, "a value is too large", MAX_U32)
    return tokens


cdef int _require_ok(kva_status status, object token_ids, object most=MAX_TOKEN_ID) except -1:
    if status == KVA_NO_MEMORY:
        raise MemoryError
    if status == KVA_BAD_TOKEN:  # another thread or the owner changed them after they were checked
        raise bad_token_ids(token_ids, "a value is negative or too large", most)
    return 0
