# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""The C kernels for Python: buffers and lists in, bytes and arrays out. What each one computes is told in `_pure`.

Nothing is decided here. Arguments are checked by the functions the Python twin uses, and whatever is not a plain buffer
or a list of plain integers goes through the twin's `pack_tokens`, so that both accept and refuse the same things.
"""

from array import array

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize, PyBytes_Size
from libc.stdint cimport int64_t, uint8_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

from kvatlas._native import _pure
from kvatlas._native.arguments import bad_token_ids, count_blocks, require_extras, require_u64


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


cdef extern from "chain.h":
    ctypedef void (*kva_sha256)(const uint8_t *padded, size_t blocks, uint8_t *digest)

    ctypedef enum kva_status:
        KVA_OK
        KVA_BAD_TOKEN
        KVA_NO_MEMORY

    ctypedef struct kva_extra:
        const uint8_t *data
        size_t length

    kva_sha256 kva_sha256_best(const char **name)
    kva_status kva_chain_sha256_cbor(kva_sha256 sha256, const kva_tokens *tokens, size_t block_size,
                                     const uint8_t *parent, size_t parent_length, const kva_extra *extras,
                                     uint8_t *out)
    kva_status kva_chain_sha256_pages(kva_sha256 sha256, const kva_tokens *tokens, size_t page_size,
                                      bint bigram, const uint8_t *parent, size_t parent_length, uint8_t *out)
    kva_status kva_chain_xxh3(const kva_tokens *tokens, size_t block_size, uint64_t parent, uint64_t seed,
                              const kva_extra *extras, uint64_t *out)
    kva_status kva_chain_fnv1a_cbor(const kva_tokens *tokens, size_t block_size, uint64_t parent,
                                    const kva_extra *extras, uint64_t *out)


cdef extern from "fnv1a.h":
    const uint64_t KVA_FNV1A_BASIS
    uint64_t kva_fnv1a_64(const uint8_t *data, size_t length, uint64_t hash)


cdef extern from "xxh3.h":
    ctypedef struct kva_xxh3_key:
        pass

    void kva_xxh3_prepare(kva_xxh3_key *key, uint64_t seed)
    uint64_t kva_xxh3_64(const kva_xxh3_key *key, const uint8_t *data, size_t length)


cdef extern from "python_ints.h":
    bint kva_sequence_words(object sequence, Py_ssize_t count, uint64_t *words)


cdef const char *_sha256_name
cdef kva_sha256 _sha256 = kva_sha256_best(&_sha256_name)

BACKEND = "native (%s)" % (<bytes>_sha256_name).decode()


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
    return words if kva_sequence_words(ids, count, <uint64_t *>PyBytes_AsString(words)) else None


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
    """Encoded extra keys of each block as the C side reads them."""

    cdef kva_extra *c
    cdef tuple owners

    def __cinit__(self, extras, Py_ssize_t num_blocks):
        require_extras(extras, num_blocks)
        if num_blocks == 0:
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


cdef int _require_ok(kva_status status, object token_ids) except -1:
    if status == KVA_NO_MEMORY:
        raise MemoryError
    if status == KVA_BAD_TOKEN:  # another thread or the owner changed them after they were checked
        raise bad_token_ids(token_ids, "a value is negative or too large")
    return 0


cdef list _split(bytes digests):
    """Joined digests, one each."""
    cdef const char *at = PyBytes_AsString(digests)
    cdef Py_ssize_t i
    return [PyBytes_FromStringAndSize(at + 32 * i, 32) for i in range(PyBytes_Size(digests) // 32)]


def pack_tokens(token_ids, /):
    tokens = _Tokens(token_ids)
    if tokens.words is not None:
        return memoryview(tokens.words).cast("Q")
    return memoryview(<object>tokens.view.obj)


def chain_sha256_cbor(token_ids, block_size, bytes parent not None, extras=None, /):
    tokens = _Tokens(token_ids)
    num_blocks = count_blocks(tokens.c.count, block_size)
    cdef _Extras encoded = None if extras is None else _Extras(extras, num_blocks)
    cdef bytes digests = PyBytes_FromStringAndSize(NULL, 32 * num_blocks)
    _require_ok(
        kva_chain_sha256_cbor(
            _sha256, &tokens.c, block_size, <const uint8_t *>PyBytes_AsString(parent), PyBytes_Size(parent),
            NULL if encoded is None else encoded.c, <uint8_t *>PyBytes_AsString(digests),
        ),
        token_ids,
    )
    return _split(digests)


def chain_sha256_pages(token_ids, page_size, bytes parent not None=b"", /, *, bint bigram=False):
    tokens = _Tokens(token_ids)
    units = tokens.c.count - 1 if bigram and tokens.c.count > 0 else tokens.c.count
    num_pages = count_blocks(units, page_size)
    cdef bytes digests = PyBytes_FromStringAndSize(NULL, 32 * num_pages)
    _require_ok(
        kva_chain_sha256_pages(
            _sha256, &tokens.c, page_size, bigram, <const uint8_t *>PyBytes_AsString(parent), PyBytes_Size(parent),
            <uint8_t *>PyBytes_AsString(digests),
        ),
        token_ids,
    )
    return _split(digests)


def chain_xxh3(token_ids, block_size, parent, seed, extras=None, /):
    tokens = _Tokens(token_ids)
    num_blocks = count_blocks(tokens.c.count, block_size)
    require_u64("a parent key", parent)
    require_u64("the seed", seed)
    cdef _Extras encoded = None if extras is None else _Extras(extras, num_blocks)
    cdef bytes keys = PyBytes_FromStringAndSize(NULL, 8 * num_blocks)
    _require_ok(
        kva_chain_xxh3(
            &tokens.c, block_size, parent, seed, NULL if encoded is None else encoded.c,
            <uint64_t *>PyBytes_AsString(keys),
        ),
        token_ids,
    )
    return array("Q", keys)


def chain_fnv1a_cbor(token_ids, block_size, parent, extras=None, /):
    tokens = _Tokens(token_ids)
    num_blocks = count_blocks(tokens.c.count, block_size)
    require_u64("a parent key", parent)
    cdef _Extras encoded = None if extras is None else _Extras(extras, num_blocks)
    cdef bytes keys = PyBytes_FromStringAndSize(NULL, 8 * num_blocks)
    _require_ok(
        kva_chain_fnv1a_cbor(
            &tokens.c, block_size, parent, NULL if encoded is None else encoded.c, <uint64_t *>PyBytes_AsString(keys)
        ),
        token_ids,
    )
    return array("Q", keys)


def fnv1a_64(bytes data not None, /):
    return kva_fnv1a_64(<const uint8_t *>PyBytes_AsString(data), <size_t>PyBytes_Size(data), KVA_FNV1A_BASIS)


def xxh3_64(bytes data not None, seed, /):
    require_u64("the seed", seed)
    cdef kva_xxh3_key key
    kva_xxh3_prepare(&key, seed)
    return kva_xxh3_64(&key, <const uint8_t *>PyBytes_AsString(data), <size_t>PyBytes_Size(data))
