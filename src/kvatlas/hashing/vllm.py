"""vLLM's block hashes, byte for byte.

A block's digest is F((parent digest, token ids, extra keys)). F is one of four: pickle or canonical CBOR for the bytes,
SHA-256 or XXH3-128 for the digest. Equal prompts give equal digests on two engines only if algorithm and seed are
equal; the two `xxhash` ones have a random seed unless PYTHONHASHSEED is set.
"""

import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import xxhash

from kvatlas import _native
from kvatlas.errors import HashingError
from kvatlas.hashing import cbor
from kvatlas.hashing.extra_keys import NO_EXTRAS, RequestExtras, TaggedKeys, block_extra_keys, multimodal_cursor
from kvatlas.hashing.token_ids import normalise_token_ids

__all__ = ["VLLM_ALGOS", "VllmHasher", "external_hash", "hash64", "key_with_group"]

VLLM_ALGOS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")

_DEFAULT_SEED = "vllm-none-hash"
_PICKLE_PROTOCOL = 5
_CBOR_CHAINS = {"sha256_cbor": _native.chain_sha256_cbor, "xxhash_cbor": _native.chain_xxh3_128_cbor}


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _fresh(value: object) -> object:
    """An equal object that pickle has not met: text copied, tags interned.

    Pickle writes a string *object* it has met before as a back reference, so equal text from two fields hashes
    differently from one string used twice. In a served engine each field was decoded on its own and only the tags are
    shared; copies make the digest depend on values alone, and equal to that engine's.
    """
    if isinstance(value, tuple):
        tag, *fields = value
        return (sys.intern(tag), *map(_fresh, fields))
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")
    return value


def _pickle_hash_block(parent: bytes, token_ids: tuple[int, ...], extra_keys: TaggedKeys | None) -> bytes:
    keys = None if extra_keys is None else tuple(map(_fresh, extra_keys))
    return pickle.dumps((parent, token_ids, keys), protocol=_PICKLE_PROTOCOL)


class VllmHasher:
    """Hashes blocks as a vLLM 0.32 engine with the given algorithm and PYTHONHASHSEED does.

    Args:
        algo: one of `VLLM_ALGOS`; vLLM's default is `sha256`.
        seed: the engine's PYTHONHASHSEED taken literally ("" and "random" too), or None when the variable is unset.
            Unset means a fixed default for the sha256 algorithms and a random one for the xxhash algorithms.

    Raises:
        HashingError: unknown algorithm.

    Source: vLLM 0.32.0 kv_cache_utils.init_none_hash and hash_block_tokens, utils/hashing.
    """

    __slots__ = ("_digest", "_serialise", "algo", "none_hash")

    def __init__(self, algo: str = "sha256", seed: str | None = None) -> None:
        if algo not in VLLM_ALGOS:
            raise HashingError(f"unknown hash algorithm {algo!r}: choose one of {', '.join(VLLM_ALGOS)}")
        uses_xxhash = algo.startswith("xxhash")
        uses_cbor = algo.endswith("_cbor")
        self.algo = algo
        self._digest: Callable[[bytes], bytes] = xxhash.xxh3_128_digest if uses_xxhash else _sha256
        self._serialise: Callable[[bytes, tuple[int, ...], TaggedKeys | None], bytes] = (
            cbor.encode_hash_block if uses_cbor else _pickle_hash_block
        )
        if seed is None:
            seed = os.urandom(32).hex() if uses_xxhash else _DEFAULT_SEED
        seed_bytes = cbor.encode(seed) if uses_cbor else pickle.dumps(seed, protocol=_PICKLE_PROTOCOL)
        self.none_hash: bytes = self._digest(seed_bytes)
        """Parent of every first block; 32 bytes (sha256) or 16 (xxhash)."""

    def hash_block(self, parent: bytes | None, token_ids: Sequence[int], extra_keys: TaggedKeys | None = None) -> bytes:
        """Return the digest of one block: 32 bytes (sha256) or 16 (xxhash).

        Args:
            parent: digest of the previous block; None or empty for the first.
            token_ids: all token ids of the block.
            extra_keys: tagged tuples as `block_extra_keys` returns them.

        Raises:
            HashingError: bad token ids or extra keys.

        Cost: O(block); measured 3-5 us for 16 tokens.
        """
        return self._hash_plain(parent or self.none_hash, normalise_token_ids(token_ids), extra_keys or None)

    def _hash_plain(self, parent: bytes, token_ids: tuple[int, ...], extra_keys: TaggedKeys | None) -> bytes:
        return self._digest(self._serialise(parent, token_ids, extra_keys))

    def hash_tokens(
        self, token_ids: Sequence[int], block_size: int, *, extras: RequestExtras = NO_EXTRAS
    ) -> list[bytes]:
        """Return the digests of all complete blocks of a prompt, in chain order.

        Raises:
            HashingError: bad token ids, extras or block size.

        Cost: O(n). For each 16-token block 2-4 us; with sha256_cbor, xxhash_cbor and the native kernels 0.2 and 0.1 us,
            and no copy when `token_ids` is an array (array, numpy) of 4- or 8-byte integers.
        """
        return self.extend_chain([], token_ids, block_size, extras=extras)

    def extend_chain(
        self, known: Sequence[bytes], token_ids: Sequence[int], block_size: int, *, extras: RequestExtras = NO_EXTRAS
    ) -> list[bytes]:
        """Return the digests of the complete blocks of `token_ids` that come after the `known` ones.

        Args:
            known: digests of the first `len(known)` blocks.
            token_ids: the whole sequence, from token 0.
            block_size: tokens in a block, >= 1.
            extras: the request's extras.

        Raises:
            HashingError: bad token ids, extras or block size.
        """
        if block_size < 1:
            raise HashingError(f"block size must be at least 1 token, got {block_size}")
        start = len(known) * block_size
        num_new = (len(token_ids) - start) // block_size
        if num_new <= 0:
            return []
        # Only the new tail is converted: a decode step must not pay for its whole prompt.
        end = start + num_new * block_size
        tail = token_ids if start == 0 and end == len(token_ids) else token_ids[start:end]
        parent = known[-1] if known else self.none_hash
        if self.algo in _CBOR_CHAINS:
            return _cbor_chain(_CBOR_CHAINS[self.algo], parent, tail, block_size, extras, start)
        return self._chain(parent, normalise_token_ids(tail), block_size, extras, start)

    def _chain(
        self, parent: bytes, tail: tuple[int, ...], block_size: int, extras: RequestExtras, start: int
    ) -> list[bytes]:
        blocks = (tail[offset : offset + block_size] for offset in range(0, len(tail), block_size))
        digests = []
        if extras.is_empty:
            digest, serialise = self._digest, self._serialise
            for block in blocks:
                parent = digest(serialise(parent, block, None))
                digests.append(parent)
            return digests
        for block, keys in zip(blocks, _extra_keys_from(extras, start, block_size), strict=False):
            parent = self._hash_plain(parent, block, keys)
            digests.append(parent)
        return digests


def _extra_keys_from(extras: RequestExtras, start: int, block_size: int) -> Iterator[TaggedKeys | None]:
    """Yield the extra keys of the blocks from token `start` on, without end."""
    cursor = multimodal_cursor(extras, start)
    while True:
        keys, cursor = block_extra_keys(extras, start, start + block_size, cursor)
        yield keys
        start += block_size


def _cbor_chain(
    chain: Callable[[Sequence[int], int, bytes, list[bytes | None] | None], list[bytes]],
    parent: bytes,
    tail: Sequence[int],
    block_size: int,
    extras: RequestExtras,
    start: int,
) -> list[bytes]:
    """The digests of complete blocks whose first token is number `start`, in one call of the kernel `chain`."""
    encoded = None
    if not extras.is_empty:
        tail = _native.pack_tokens(tail)  # bad token ids are told before bad extras
        keys = islice(_extra_keys_from(extras, start, block_size), len(tail) // block_size)
        encoded = [None if one is None else cbor.encode(one) for one in keys]
    return chain(tail, block_size, parent, encoded)


def hash64(digest: bytes) -> int:
    """Return the published integer form of a digest: its last 8 bytes, unsigned big-endian.

    Source: vLLM 0.32.0 kv_cache_utils.maybe_convert_block_hash.
    """
    return int.from_bytes(digest[-8:], "big")


def external_hash(digest: bytes, *, as_int: bool = True) -> int | bytes:
    """Return a digest as events carry it: `hash64`, or the raw bytes when the engine publishes bytes.

    `as_int` mirrors the engine's VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES (default 1).
    """
    return hash64(digest) if as_int else digest


def key_with_group(digest: bytes, group_id: int) -> bytes:
    """Return the cache-map key of a block: digest, then the KV cache group id as 4 bytes big-endian."""
    return digest + group_id.to_bytes(4, "big")
