# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""The C kernels for Python: buffers and lists in, bytes and arrays out. What each one computes is told in `_pure`.

Nothing is decided here. Arguments are checked by the functions the Python twin uses.
"""

from array import array

from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize, PyBytes_Size
from libc.stdint cimport uint8_t, uint64_t

from kvatlas._native.arguments import count_blocks, hash_words, require_overlap, require_u64

include "tokens.pxi"


cdef extern from "xxh3.h":
    ctypedef struct kva_xxh3_key:
        pass

    void kva_xxh3_prepare(kva_xxh3_key *key, uint64_t seed)
    uint64_t kva_xxh3_64(const kva_xxh3_key *key, const uint8_t *data, size_t length)
    void kva_xxh3_128(const kva_xxh3_key *key, const uint8_t *data, size_t length, uint8_t *digest)


cdef extern from "chain.h":
    ctypedef void (*kva_sha256)(const uint8_t *padded, size_t blocks, uint8_t *digest)

    kva_sha256 kva_sha256_best(const char **name)
    kva_status kva_chain_sha256_cbor(kva_sha256 sha256, const kva_tokens *tokens, size_t block_size,
                                     const uint8_t *parent, size_t parent_length, const kva_extra *extras,
                                     uint8_t *out)
    kva_status kva_chain_sha256_pages(kva_sha256 sha256, const kva_tokens *tokens, size_t page_size,
                                      bint bigram, const uint8_t *parent, size_t parent_length, uint8_t *out)
    kva_status kva_block_keys(const kva_xxh3_key *key, const kva_tokens *tokens, size_t block_size, uint64_t parent,
                              const kva_extra *extras, uint64_t *out)
    kva_status kva_chain_xxh3_128_cbor(const kva_tokens *tokens, size_t block_size, const uint8_t *parent,
                                       size_t parent_length, const kva_extra *extras, uint8_t *out)
    kva_status kva_chain_xxh64(const kva_tokens *tokens, size_t block_size, uint64_t parent, const kva_extra *extras,
                               uint64_t *out)
    kva_status kva_xxh3_blocks(const kva_xxh3_key *key, const kva_tokens *tokens, size_t block_size, size_t overlap,
                               const kva_extra *extras, uint64_t *out)
    void kva_chain_xxh3_pairs(const kva_xxh3_key *key, const uint64_t *hashes, size_t count, const uint64_t *parent,
                              uint64_t *out)
    kva_status kva_chain_fnv1a_cbor(const kva_tokens *tokens, size_t block_size, uint64_t parent,
                                    const kva_extra *extras, uint64_t *out)


cdef extern from "batch_time.h":
    double kva_batch_time(const uint8_t *payload, size_t length)


cdef extern from "zmtp.h":
    ctypedef enum kva_zmtp_kind:
        KVA_ZMTP_WANTS_MORE
        KVA_ZMTP_BATCH
        KVA_ZMTP_NO_BATCH
        KVA_ZMTP_COMMAND
        KVA_ZMTP_BROKEN

    ctypedef enum kva_zmtp_state:
        KVA_ZMTP_BETWEEN
        KVA_ZMTP_NO_NUMBER
        KVA_ZMTP_NUMBER

    ctypedef struct kva_zmtp:
        kva_zmtp_state state
        uint64_t number
        const uint8_t *data
        size_t length

    kva_zmtp_kind kva_zmtp_next(kva_zmtp *zmtp, const uint8_t *bytes, size_t count, size_t most_bytes, size_t *at)


cdef extern from "fnv1a.h":
    const uint64_t KVA_FNV1A_BASIS
    uint64_t kva_fnv1a_64(const uint8_t *data, size_t length, uint64_t hash)


cdef const char *_sha256_name
cdef kva_sha256 _sha256 = kva_sha256_best(&_sha256_name)

BACKEND = "native (%s)" % (<bytes>_sha256_name).decode()


cdef list _split(bytes digests, Py_ssize_t size):
    """Joined digests, one each."""
    cdef const char *at = PyBytes_AsString(digests)
    cdef Py_ssize_t i
    return [PyBytes_FromStringAndSize(at + size * i, size) for i in range(PyBytes_Size(digests) // size)]


def pack_tokens(token_ids, /):
    tokens = _Tokens(token_ids)
    if tokens.words is not None:
        return memoryview(tokens.words).cast("Q")
    return memoryview(<object>tokens.view.obj)


def chain_sha256_cbor(token_ids, block_size, bytes parent not None, extras=None, /):
    tokens = _Tokens(token_ids)
    num_blocks = count_blocks(tokens.c.count, block_size)
    encoded = _Extras(extras, num_blocks)
    cdef bytes digests = PyBytes_FromStringAndSize(NULL, 32 * num_blocks)
    _require_ok(
        kva_chain_sha256_cbor(
            _sha256, &tokens.c, block_size, <const uint8_t *>PyBytes_AsString(parent), PyBytes_Size(parent),
            encoded.c, <uint8_t *>PyBytes_AsString(digests),
        ),
        token_ids,
    )
    return _split(digests, 32)


def chain_xxh3_128_cbor(token_ids, block_size, bytes parent not None, extras=None, /):
    tokens = _Tokens(token_ids)
    num_blocks = count_blocks(tokens.c.count, block_size)
    encoded = _Extras(extras, num_blocks)
    cdef bytes digests = PyBytes_FromStringAndSize(NULL, 16 * num_blocks)
    _require_ok(
        kva_chain_xxh3_128_cbor(
            &tokens.c, block_size, <const uint8_t *>PyBytes_AsString(parent), PyBytes_Size(parent), encoded.c,
            <uint8_t *>PyBytes_AsString(digests),
        ),
        token_ids,
    )
    return _split(digests, 16)


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
    return _split(digests, 32)


def chain_xxh3(token_ids, block_size, parent, seed, extras=None, /):
    require_u64("a parent key", parent)
    require_u64("the seed", seed)
    cdef kva_xxh3_key key
    kva_xxh3_prepare(&key, seed)
    cdef bytes keys
    if extras is None and (type(token_ids) is list or type(token_ids) is tuple):
        if 1 <= block_size <= CHUNK:
            keys = PyBytes_FromStringAndSize(NULL, 8 * count_blocks(len(token_ids), block_size))
            if _keys_of_sequence(&key, token_ids, block_size, parent, keys):
                return array("Q", keys)
    tokens = _Tokens(token_ids)
    num_blocks = count_blocks(tokens.c.count, block_size)
    encoded = _Extras(extras, num_blocks)
    keys = PyBytes_FromStringAndSize(NULL, 8 * num_blocks)
    _require_ok(
        kva_block_keys(&key, &tokens.c, block_size, parent, encoded.c, <uint64_t *>PyBytes_AsString(keys)), token_ids
    )
    return array("Q", keys)


cdef enum:
    CHUNK = 128


cdef bint _keys_of_sequence(const kva_xxh3_key *key, object ids, size_t block_size, uint64_t parent, bytes keys):
    """Block keys of a list or tuple of plain integers, read a little ahead of the hash; False when it holds others.

    A long prompt's words would otherwise be written to memory and read again, which costs as much as hashing them.
    """
    cdef uint64_t words[CHUNK]
    cdef uint64_t *out = <uint64_t *>PyBytes_AsString(keys)
    cdef size_t count = len(ids), first = 0, blocks
    cdef kva_tokens chunk
    chunk.data = words
    chunk.kind = KVA_U64
    while first < count:
        chunk.count = min(CHUNK // block_size * block_size, count - first)
        if not kva_sequence_words(ids, <Py_ssize_t>first, <Py_ssize_t>chunk.count, words):
            return False
        blocks = chunk.count // block_size
        kva_block_keys(key, &chunk, block_size, parent, NULL, out)
        if blocks > 0:
            parent = out[blocks - 1]
            out += blocks
        first += chunk.count
    return True


def chain_fnv1a_cbor(token_ids, block_size, parent, extras=None, /):
    tokens = _tokens_u32(token_ids)
    num_blocks = count_blocks(tokens.c.count, block_size)
    require_u64("a parent key", parent)
    encoded = _Extras(extras, num_blocks)
    cdef bytes keys = PyBytes_FromStringAndSize(NULL, 8 * num_blocks)
    _require_ok(
        kva_chain_fnv1a_cbor(&tokens.c, block_size, parent, encoded.c, <uint64_t *>PyBytes_AsString(keys)),
        token_ids, MAX_U32,
    )
    return array("Q", keys)


def chain_xxh64(token_ids, block_size, parent, extras=None, /):
    require_u64("a parent key", parent)
    tokens = _tokens_u32(token_ids)
    num_blocks = count_blocks(tokens.c.count, block_size)
    encoded = _Extras(extras, num_blocks)
    cdef bytes keys = PyBytes_FromStringAndSize(NULL, 8 * num_blocks)
    _require_ok(
        kva_chain_xxh64(&tokens.c, block_size, parent, encoded.c, <uint64_t *>PyBytes_AsString(keys)),
        token_ids, MAX_U32,
    )
    return array("Q", keys)


def xxh3_blocks(token_ids, block_size, seed, extras=None, /, *, overlap=0):
    require_u64("the seed", seed)
    require_overlap(overlap)
    tokens = _tokens_u32(token_ids)
    num_blocks = count_blocks(max(<Py_ssize_t>tokens.c.count - <Py_ssize_t>overlap, 0), block_size)
    encoded = _Extras(extras, num_blocks)
    cdef bytes hashes = PyBytes_FromStringAndSize(NULL, 8 * num_blocks)
    cdef kva_xxh3_key key
    kva_xxh3_prepare(&key, seed)
    _require_ok(
        kva_xxh3_blocks(&key, &tokens.c, block_size, overlap, encoded.c, <uint64_t *>PyBytes_AsString(hashes)),
        token_ids, MAX_U32,
    )
    return array("Q", hashes)


def chain_xxh3_pairs(hashes, parent, seed, /):
    require_u64("the seed", seed)
    cdef uint64_t first = 0
    if parent is not None:
        require_u64("a parent key", parent)
        first = parent
    cdef bytes words = hash_words(hashes).tobytes()
    cdef bytes chain = PyBytes_FromStringAndSize(NULL, PyBytes_Size(words))
    cdef kva_xxh3_key key
    kva_xxh3_prepare(&key, seed)
    kva_chain_xxh3_pairs(
        &key, <const uint64_t *>PyBytes_AsString(words), <size_t>PyBytes_Size(words) // 8,
        NULL if parent is None else &first, <uint64_t *>PyBytes_AsString(chain),
    )
    return array("Q", chain)


def fnv1a_64(bytes data not None, /):
    return kva_fnv1a_64(<const uint8_t *>PyBytes_AsString(data), <size_t>PyBytes_Size(data), KVA_FNV1A_BASIS)


def xxh3_64(bytes data not None, seed, /):
    require_u64("the seed", seed)
    cdef kva_xxh3_key key
    kva_xxh3_prepare(&key, seed)
    return kva_xxh3_64(&key, <const uint8_t *>PyBytes_AsString(data), <size_t>PyBytes_Size(data))


def xxh3_128(bytes data not None, seed, /):
    require_u64("the seed", seed)
    cdef kva_xxh3_key key
    cdef uint8_t digest[16]
    kva_xxh3_prepare(&key, seed)
    kva_xxh3_128(&key, <const uint8_t *>PyBytes_AsString(data), <size_t>PyBytes_Size(data), digest)
    return PyBytes_FromStringAndSize(<const char *>digest, 16)


def accept_run(list payloads not None, uint64_t seq, double last_ts, uint64_t[::1] digests not None, bint must_rise, /):
    cdef kva_xxh3_key key
    cdef Py_ssize_t at, count = len(payloads)
    cdef uint64_t digest, room = digests.shape[0]
    cdef double ts
    cdef bytes payload
    if room == 0:
        return 0, last_ts
    kva_xxh3_prepare(&key, 0)
    for at in range(count):
        payload = payloads[at]
        ts = kva_batch_time(<const uint8_t *>PyBytes_AsString(payload), <size_t>PyBytes_Size(payload))
        if must_rise and ts < last_ts:
            return at, last_ts
        digest = kva_xxh3_64(&key, <const uint8_t *>PyBytes_AsString(payload), <size_t>PyBytes_Size(payload))
        digests[(seq + <uint64_t>at) % room] = digest if digest else 1
        last_ts = ts
    return count, last_ts


def scan_zmtp(const uint8_t[::1] received not None, Py_ssize_t count, pending, size_t most_bytes, /):
    cdef kva_zmtp zmtp
    cdef kva_zmtp_kind kind = KVA_ZMTP_COMMAND
    cdef list runs = [], payloads = [], commands = []
    cdef uint64_t next_seq = 0
    cdef Py_ssize_t bad = 0
    cdef size_t at = 0
    if not 0 < count <= received.shape[0]:
        raise ValueError("from 1 byte to as many as the buffer has")
    zmtp.number = 0 if pending is None or pending < 0 else pending
    zmtp.state = KVA_ZMTP_BETWEEN if pending is None else KVA_ZMTP_NO_NUMBER if pending < 0 else KVA_ZMTP_NUMBER
    while kind != KVA_ZMTP_WANTS_MORE and kind != KVA_ZMTP_BROKEN:
        kind = kva_zmtp_next(&zmtp, &received[0], <size_t>count, most_bytes, &at)
        if kind == KVA_ZMTP_BATCH:
            if next_seq == 0 or zmtp.number != next_seq:
                payloads = []
                runs.append((zmtp.number, payloads))
            next_seq = zmtp.number + 1
            payloads.append(PyBytes_FromStringAndSize(<const char *>zmtp.data, zmtp.length))
        elif kind == KVA_ZMTP_NO_BATCH:
            bad += 1
        elif kind == KVA_ZMTP_COMMAND:
            commands.append(PyBytes_FromStringAndSize(<const char *>zmtp.data, zmtp.length))
    if zmtp.state == KVA_ZMTP_BETWEEN:
        pending = None
    else:
        pending = zmtp.number if zmtp.state == KVA_ZMTP_NUMBER else -1
    return runs, bad, commands, at, 0 if kind == KVA_ZMTP_BROKEN else zmtp.length, pending
