"""The kernels in Python: what they mean, and what runs where the extension is not built.

Same names, arguments, results and errors as `kernel`; `tests/contract/test_native_kernels.py` holds one to the other.
"""

import hashlib
import math
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise

import xxhash

from kvatlas._native import cbor_heads as cbor
from kvatlas._native._pure_routers import chain_fnv1a_cbor, chain_xxh3_pairs, chain_xxh64, fnv1a_64, xxh3_blocks
from kvatlas._native._pure_tokens import little_endian, pack_tokens, words_of
from kvatlas._native.arguments import MAX_U32, count_blocks, require_extras, require_u64
from kvatlas._native.runs import Run, append_batch

__all__ = [
    "BACKEND",
    "accept_run",
    "chain_fnv1a_cbor",
    "chain_sha256_cbor",
    "chain_sha256_pages",
    "chain_xxh3",
    "chain_xxh3_128_cbor",
    "chain_xxh3_pairs",
    "chain_xxh64",
    "fnv1a_64",
    "pack_tokens",
    "scan_zmtp",
    "xxh3_64",
    "xxh3_128",
    "xxh3_blocks",
]

BACKEND = "pure"

_TRIPLE = cbor.head(cbor.ARRAY, 3)
_block_head = struct.Struct("<cQI").pack


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
    return _chain_cbor(_sha256, token_ids, block_size, parent, extras)


def chain_xxh3_128_cbor(
    token_ids: Sequence[int], block_size: int, parent: bytes, extras: Sequence[bytes | None] | None = None, /
) -> list[bytes]:
    """Return the XXH3-128 digests (16 bytes, most significant first) of the complete blocks.

    Messages, arguments and errors are those of `chain_sha256_cbor`.

    Cost: O(n); for a 16-token block 2.3 us, natively 0.1 us.
    Source: vLLM's xxhash_cbor.
    """
    return _chain_cbor(xxhash.xxh3_128_digest, token_ids, block_size, parent, extras)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _chain_cbor(
    digest: Callable[[bytes], bytes],
    token_ids: Sequence[int],
    block_size: int,
    parent: bytes,
    extras: Sequence[bytes | None] | None,
) -> list[bytes]:
    codes = list(map(cbor.uint_code, words_of(token_ids)))
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
        parent = digest(b"".join(message))
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
    words = words_of(token_ids)
    overlap = 1 if bigram else 0
    num_pages = count_blocks(max(len(words) - overlap, 0), page_size)
    digests = []
    for page in range(num_pages):
        ids = words[page * page_size : (page + 1) * page_size + overlap]
        wide = max(ids) > MAX_U32
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
    words = words_of(token_ids)
    num_blocks = count_blocks(len(words), block_size)
    require_extras(extras, num_blocks)
    data = little_endian(words)
    width = block_size * words.itemsize
    keys = array("Q", [])
    for block in range(num_blocks):
        message = _block_head(b"B", parent, block_size) + data[block * width : (block + 1) * width]
        extra = extras[block] if extras is not None else None
        parent = xxhash.xxh3_64_intdigest(message if extra is None else message + extra, seed)
        keys.append(parent)
    return keys


def xxh3_64(data: bytes, seed: int, /) -> int:
    """Return the XXH3-64 hash of bytes under a seed in 0..2**64-1.

    Raises:
        HashingError: seed out of range.
    """
    require_u64("the seed", seed)
    return xxhash.xxh3_64_intdigest(data, seed)


def xxh3_128(data: bytes, seed: int, /) -> bytes:
    """Return the XXH3-128 digest of bytes under a seed in 0..2**64-1: 16 bytes, most significant first.

    Raises:
        HashingError: seed out of range.
    """
    require_u64("the seed", seed)
    return xxhash.xxh3_128_digest(data, seed)


def accept_run(
    payloads: list[bytes],
    seq: int,
    last_ts: float,
    digests: "array[int]",
    must_rise: bool,  # noqa: FBT001 - positional only, as all kernels
    /,
) -> tuple[int, float]:
    """Count the leading batches of a run whose time stamps rise, and note their digests.

    Args:
        payloads: batches that follow one another.
        seq: number of the first; that of the last is below 2**64.
        last_ts: time stamp of the batch before; that of bytes that are no batch is -inf.
        digests: u64[n], n > 0; that of batch i goes to place i % n: its XXH3-64 under seed 0, or 1 for 0.
        must_rise: stop at a batch that is older than the one before.

    Returns:
        How many there are, and the time stamp of the last of them (`last_ts` when there is none).
    """
    for at, payload in enumerate(payloads):
        ts = -math.inf
        if len(payload) >= 10 and 0x92 <= payload[0] <= 0x9F and payload[1] == 0xCB:
            ts = struct.unpack_from(">d", payload, 2)[0]
        if must_rise and ts < last_ts:
            return at, last_ts
        digests[(seq + at) % len(digests)] = xxhash.xxh3_64_intdigest(payload, 0) or 1
        last_ts = ts
    return len(payloads), last_ts


def scan_zmtp(
    received: memoryview,
    count: int,
    pending: int | None,
    most_bytes: int,
    /,
) -> tuple[list[Run], int, list[bytes], int, int, int | None]:
    """Read batches from the bytes of a ZMTP 3 connection after its handshake.

    A message that is a batch has at least two frames: a number of eight bytes and, last, the payload.

    Args:
        received: u8[>= count].
        count: how many bytes came, at least 1; what a call before did not consume comes first.
        pending: what a call before returned as such; None at the start.
        most_bytes: a frame's bound; 2**63 - 1 is one in any case.

    Returns:
        Runs of batches that follow by number (the first number, the payloads); how many messages were no batch; the
        bodies of commands; how many bytes are done with; how many the next frame takes, as far as is known, or 0 when
        these are no frames or the next one is above the bound; and of a message that has begun the last frame: its
        value if it can be a number, else -1, or None if none has begun.

    Raises:
        ValueError: no bytes, or more than the buffer has.

    Cost: natively 0.2 us a batch, most of it the copy of the payload.
    """
    if not 0 < count <= len(received):
        raise ValueError("from 1 byte to as many as the buffer has")
    runs: list[Run] = []
    commands: list[bytes] = []
    bad = at = 0
    while True:
        wanted, data = _next_frame(received[at:count], most_bytes)
        if data is None:
            return runs, bad, commands, at, wanted, pending
        flags = received[at]
        at += wanted
        if flags & _COMMAND:
            commands.append(bytes(data))
        elif flags & _MORE:
            pending = int.from_bytes(data, "big") if len(data) == 8 else -1
        elif pending is None or pending < 0:
            pending = None
            bad += 1
        else:
            append_batch(runs, pending, bytes(data))
            pending = None


_MORE, _LONG, _COMMAND = 1, 2, 4


def _next_frame(left: memoryview, most_bytes: int) -> tuple[int, memoryview | None]:
    """Bytes of the next frame with its head, 0 if it is none, and what is in it if it is whole."""
    flags = left[0] if left else 0
    head = 9 if flags & _LONG else 2
    if flags > _MORE | _LONG | _COMMAND or (flags & _COMMAND and flags & _MORE):
        return 0, None
    if len(left) < head:
        return head, None
    size = int.from_bytes(left[1:head], "big")
    if size > min(most_bytes, sys.maxsize):
        return 0, None
    return head + size, left[head : head + size] if len(left) >= head + size else None
