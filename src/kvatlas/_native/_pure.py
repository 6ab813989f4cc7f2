"""The kernels in Python: what they mean, and what runs where the extension is not built.

Same names, arguments, results and errors as `kernel`; `tests/contract/test_native_kernels.py` holds one to the other.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from itertools import pairwise

import xxhash

from kvatlas._native import cbor_heads as cbor
from kvatlas._native.arguments import bad_token_ids, count_blocks, require_extras, require_u64

__all__ = [
    "BACKEND",
    "chain_fnv1a_cbor",
    "chain_sha256_cbor",
    "chain_sha256_pages",
    "chain_xxh3",
    "fnv1a_64",
    "pack_tokens",
    "xxh3_64",
]

BACKEND = "pure"

_FNV1A_BASIS = 0xCBF29CE484222325
_FNV1A_PRIME = 0x100000001B3
_U64 = (1 << 64) - 1
_U32 = (1 << 32) - 1
_TRIPLE = cbor.head(cbor.ARRAY, 3)
_TOP_BYTE = 7 if sys.byteorder == "little" else 0
_TOP_BIT_CLEAR = bytes(range(128))
_block_head = struct.Struct("<cQI").pack


def pack_tokens(token_ids: Sequence[int], /) -> memoryview:
    """Return token ids as a view of machine words that every kernel reads without further conversion.

    Args:
        token_ids: any sequence of integers in 0..2**63-1.

    Raises:
        HashingError: a value is not an integer, or out of range.

    Cost: O(n). Natively 2 ns for each id of a list, and no copy for an array (array, numpy) of 4- or 8-byte integers:
    the view is then of the caller's own memory.
    """
    return memoryview(_words(token_ids))


def _words(token_ids: Sequence[int]) -> "array[int]":
    words = array("Q")
    try:
        if isinstance(token_ids, memoryview) and token_ids.format == "Q":
            words.frombytes(token_ids.tobytes())
        elif isinstance(token_ids, bytes | bytearray):  # array() would read these as machine words
            words.extend(list(token_ids))
        else:
            words = array("Q", token_ids)  # refuses what is negative or over 64 bits
    except (TypeError, ValueError, OverflowError) as error:
        raise bad_token_ids(token_ids, error) from error
    if words.tobytes()[_TOP_BYTE::8].translate(None, _TOP_BIT_CLEAR):
        raise bad_token_ids(token_ids, "a value is too large")
    return words


def _little_endian(words: "array[int]") -> bytes:
    if sys.byteorder == "big":
        words = array("Q", words)
        words.byteswap()
    return words.tobytes()


def chain_sha256_cbor(
    token_ids: Sequence[int], block_size: int, parent: bytes, extras: Sequence[bytes | None] | None = None, /
) -> list[bytes]:
    """Return the SHA-256 digests of the complete blocks.

    A block's message is canonical CBOR of [parent digest, [token ids], extra keys].

    Args:
        token_ids: any sequence of integers in 0..2**63-1, or what `pack_tokens` returned.
        block_size: tokens in a block.
        parent: digest of the block before the first.
        extras: the extra keys of each block as canonical CBOR; None for a block, or for all, stands for null.

    Raises:
        HashingError: bad token ids or block size, too few extras.

    Cost: O(n); for a 16-token block 2.6 us, natively 0.1 us.
    """
    codes = list(map(cbor.uint_code, _words(token_ids)))
    num_blocks = count_blocks(len(codes), block_size)
    require_extras(extras, num_blocks)
    array_head = cbor.head(cbor.ARRAY, block_size)
    digests = []
    for block in range(num_blocks):
        extra = extras[block] if extras is not None else None
        message = [
            _TRIPLE,
            cbor.remembered_head(cbor.BYTES, len(parent)),
            parent,
            array_head,
            *codes[block * block_size : (block + 1) * block_size],
            cbor.NULL if extra is None else extra,
        ]
        parent = hashlib.sha256(b"".join(message)).digest()
        digests.append(parent)
    return digests


def chain_sha256_pages(
    token_ids: Sequence[int], page_size: int, parent: bytes = b"", /, *, bigram: bool = False
) -> list[bytes]:
    """Return the SHA-256 digests of the complete pages.

    A page's message is the parent digest and its ids as u32 little-endian; when one of them needs more, 0xff and all as
    u64. With `bigram` a page is `page_size` pairs of neighbours, so it reads one token of the next page.

    Args:
        token_ids: any sequence of integers in 0..2**63-1, or what `pack_tokens` returned.
        page_size: tokens (pairs) in a page.
        parent: digest of the page before the first, or a namespace seed; empty for none.
        bigram: hash pairs.

    Raises:
        HashingError: bad token ids or page size.

    Cost: O(n); for a 16-token page 1.1 us, natively 0.09 us.
    Source: SGLang's page hash (RadixCache, HiCache storage keys).
    """
    words = _words(token_ids)
    overlap = 1 if bigram else 0
    num_pages = count_blocks(max(len(words) - overlap, 0), page_size)
    digests = []
    for page in range(num_pages):
        ids = words[page * page_size : (page + 1) * page_size + overlap]
        wide = max(ids) > _U32
        pieces = [word for pair in pairwise(ids) for word in pair] if bigram else ids
        message = parent + (b"\xff" if wide else b"") + struct.pack(f"<{len(pieces)}{'Q' if wide else 'I'}", *pieces)
        parent = hashlib.sha256(message).digest()
        digests.append(parent)
    return digests


def chain_xxh3(
    token_ids: Sequence[int], block_size: int, parent: int, seed: int, extras: Sequence[bytes | None] | None = None, /
) -> "array[int]":
    """Return the XXH3-64 keys of the complete blocks as unsigned 64-bit words.

    A block's message is b"B", parent u64, token count u32, token ids u64 each, all little-endian, and its extra.

    Args:
        token_ids: any sequence of integers in 0..2**63-1, or what `pack_tokens` returned.
        block_size: tokens in a block.
        parent: key of the block before the first, 0..2**64-1.
        seed: of the hash, 0..2**64-1.
        extras: bytes that follow each block; None for a block, or for all, stands for none.

    Raises:
        HashingError: bad token ids, block size, parent or seed, too few extras.

    Cost: O(n); for a 16-token block 1 us, natively 15 ns, from a list 28.
    """
    require_u64("a parent key", parent)
    require_u64("the seed", seed)
    words = _words(token_ids)
    num_blocks = count_blocks(len(words), block_size)
    require_extras(extras, num_blocks)
    data = _little_endian(words)
    width = block_size * words.itemsize
    keys = array("Q", [])
    for block in range(num_blocks):
        message = _block_head(b"B", parent, block_size) + data[block * width : (block + 1) * width]
        extra = extras[block] if extras is not None else None
        parent = xxhash.xxh3_64_intdigest(message if extra is None else message + extra, seed)
        keys.append(parent)
    return keys


def chain_fnv1a_cbor(
    token_ids: Sequence[int], block_size: int, parent: int, extras: Sequence[bytes | None] | None = None, /
) -> "array[int]":
    """Return the FNV-1a-64 keys of the complete blocks as unsigned 64-bit words.

    A block's message is canonical CBOR of [parent, [token ids], extra].

    Args:
        token_ids: any sequence of integers in 0..2**63-1, or what `pack_tokens` returned.
        block_size: tokens in a block.
        parent: key of the block before the first, 0..2**64-1.
        extras: the extra of each block as canonical CBOR; None for a block, or for all, stands for null.

    Raises:
        HashingError: bad token ids, block size or parent, too few extras.

    Cost: O(n); for a 16-token block 10 us, natively 0.1 us.
    Source: llm-d's default block keys (cbor-fnv).
    """
    codes = list(map(cbor.uint_code, _words(token_ids)))
    num_blocks = count_blocks(len(codes), block_size)
    require_u64("a parent key", parent)
    require_extras(extras, num_blocks)
    array_head = cbor.head(cbor.ARRAY, block_size)
    keys = array("Q", [])
    for block in range(num_blocks):
        extra = extras[block] if extras is not None else None
        ids = codes[block * block_size : (block + 1) * block_size]
        message = [_TRIPLE, cbor.head(cbor.UINT, parent), array_head, *ids, cbor.NULL if extra is None else extra]
        parent = fnv1a_64(b"".join(message))
        keys.append(parent)
    return keys


def fnv1a_64(data: bytes, /) -> int:
    """Return the FNV-1a-64 hash of bytes. Cost: 70 ns a byte, natively 1 ns."""
    value = _FNV1A_BASIS
    for byte in data:
        value = (value ^ byte) * _FNV1A_PRIME & _U64
    return value


def xxh3_64(data: bytes, seed: int, /) -> int:
    """Return the XXH3-64 hash of bytes under a seed in 0..2**64-1.

    Raises:
        HashingError: seed out of range.
    """
    require_u64("the seed", seed)
    return xxhash.xxh3_64_intdigest(data, seed)
