"""llm-d's block keys: 64-bit chained hashes over canonical CBOR (FNV-1a) or plain words (XXH64).

These are the names llm-d's router and indexer use among themselves; engines do not publish them.
"""

from collections.abc import Sequence

import xxhash

from kvatlas import _native
from kvatlas.errors import HashingError
from kvatlas.hashing import cbor
from kvatlas.hashing.extra_keys import NO_EXTRAS, RequestExtras, block_identifiers
from kvatlas.hashing.words import text_bytes, u32_words, word_values

__all__ = ["LLMD_ALGOS", "LlmdHasher", "fnv1a_64"]

LLMD_ALGOS = ("cbor-fnv", "xxh64")
"""`hashAlgorithm` of llm-d's router; `cbor-fnv` is its default."""

_U64 = (1 << 64) - 1
_NO_KEY = 0


def fnv1a_64(data: bytes) -> int:
    """Return the 64-bit FNV-1a hash. Cost: 1 ns a byte, in Python 100; one byte at a time in any language."""
    return _native.fnv1a_64(data)


class LlmdHasher:
    """Computes block keys as llm-d does with the given `hashAlgorithm` and `hashSeed`.

    Args:
        algo: one of `LLMD_ALGOS`.
        seed: any text, llm-d's default is the empty one.

    Raises:
        HashingError: unknown algorithm, or a seed that is no text.

    Source: llm-d-kv-cache 7be76e1, llm-d-router ebab687.
    """

    __slots__ = ("_hash", "algo", "init_key")

    def __init__(self, algo: str = "cbor-fnv", seed: str = "") -> None:
        if algo not in LLMD_ALGOS:
            raise HashingError(f"unknown hash algorithm {algo!r}: choose one of {', '.join(LLMD_ALGOS)}")
        seed_bytes = text_bytes("seed", seed)
        self.algo = algo
        self._hash = _hash_cbor if algo == "cbor-fnv" else _hash_words
        self.init_key: int = fnv1a_64(seed_bytes) if algo == "cbor-fnv" else xxhash.xxh64_intdigest(seed_bytes)
        """Parent of every model's root."""

    def root_key(self, model: str) -> int:
        """Return the parent of a model's first blocks: never stored. A LoRA adapter's name stands for the model's.

        Raises:
            HashingError: the model is no text, or empty.
        """
        if not model:
            raise HashingError("llm-d's keys start from the model's name: give model (or the LoRA adapter's name)")
        text_bytes("model", model)  # refuses what is no text
        if self.algo == "cbor-fnv":
            return fnv1a_64(cbor.encode((self.init_key, None, model)))
        return _hash_words(self.init_key, memoryview(b""), (model,))

    def block_key(self, parent_key: int, token_ids: Sequence[int], identifiers: Sequence[str] = ()) -> int:
        """Return the key of one block. llm-d reserves 0 for "no key", so 0 is no parent.

        Args:
            parent_key: key of the previous block, or a root key.
            token_ids: all token ids of the block, each in 0..2**32-1.
            identifiers: content ids of the images in the block; on a prompt's first block the salt comes last.

        Raises:
            HashingError: bad token ids, identifiers or parent key.
        """
        if not _NO_KEY < parent_key <= _U64:
            raise HashingError(f'a parent key must be in 1..2**64-1 (0 is llm-d\'s "no key"), got {parent_key}')
        return self._hash(parent_key, u32_words(token_ids, "llm-d"), identifiers)

    def chain(
        self,
        token_ids: Sequence[int],
        block_size: int,
        *,
        model: str,
        extras: RequestExtras = NO_EXTRAS,
    ) -> list[int]:
        """Return the keys of all complete blocks of a prompt, in order.

        Args:
            token_ids: the prompt, each id in 0..2**32-1.
            block_size: tokens in a block, >= 1; llm-d's default is 16.
            model: the model's name; `extras.lora` replaces it.
            extras: LoRA (its path does not count), multimodal items (their offsets inside a block do not), salt.

        Raises:
            HashingError: bad token ids, block size, model or extras.

        Cost: O(n), for a 16-token block 0.2 us with FNV (18 us in Python), 0.05 us with XXH64 (0.5 us in Python).
        """
        if block_size < 1:
            raise HashingError(f"block size must be at least 1 token, got {block_size}")
        if extras.prompt_embeds is not None:
            raise HashingError("llm-d's keys know no prompt embeds: leave prompt_embeds out")
        key = self.root_key(extras.lora.name if extras.lora else model)
        cbor_fnv = self.algo == "cbor-fnv"
        encoded = None
        if extras.multimodal or extras.cache_salt:
            identifiers = _identifiers(extras, block_size, len(token_ids) // block_size)
            encoded = [(_extras_cbor if cbor_fnv else _extras_words)(one) for one in identifiers]
        chain = _native.chain_fnv1a_cbor if cbor_fnv else _native.chain_xxh64
        return chain(token_ids, block_size, key, encoded).tolist()


def _identifiers(extras: RequestExtras, block_size: int, num_blocks: int) -> list[tuple[str, ...]]:
    """The content ids in each block; the salt is the last of the first block's."""
    identifiers = list(block_identifiers(extras.multimodal, block_size, num_blocks))
    if extras.cache_salt and identifiers:
        identifiers[0] += (extras.cache_salt,)
    return identifiers


def _extras_cbor(identifiers: Sequence[str]) -> bytes:
    """The extras of a block in CBOR: null, or maps whose one key is the name of a field in Go."""
    return cbor.encode(tuple({"Hash": identifier} for identifier in identifiers) or None)


def _hash_cbor(parent: int, words: memoryview, identifiers: Sequence[str]) -> int:
    """FNV-1a of the CBOR array [parent, tokens, extras]."""
    tokens = cbor.encode(tuple(word_values(words)))
    return fnv1a_64(b"\x83" + cbor.encode(parent) + tokens + _extras_cbor(identifiers))


def _hash_words(parent: int, words: memoryview, identifiers: Sequence[str]) -> int:
    return xxhash.xxh64_intdigest(b"".join((parent.to_bytes(8, "little"), words, _extras_words(identifiers))))


def _extras_words(identifiers: Sequence[str]) -> bytes:
    """The extras of a block behind its tokens' words: each behind its length, little-endian."""
    texts = [text_bytes("an extra", identifier) for identifier in identifiers]
    return b"".join(part for text in texts for part in (len(text).to_bytes(8, "little"), text))
