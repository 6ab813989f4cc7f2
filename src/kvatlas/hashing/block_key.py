"""kvatlas's own name for a block's content: a 64-bit chained hash that no engine setting can change.

Engines name blocks by digests that depend on algorithm, seed and dialect. The fleet index instead computes this key
from what an event says about the content, and from what a request says about itself; equal content meets at equal keys.

The hashed bytes are XXH3-64's input, little-endian, and can be read back without doubt, so no two contents share them:

    b"B"  parent key u64  token count u32  token ids u64 each  then for each extra that is present
    tag byte  payload length u32  payload          (lora "l", multimodal "m": offset i64 + id, salt "s", embeds "e")

A root key is the hash of b"R" and the namespace (the model): a parent only, never a block. The seed is random for each
process unless given, so that nobody can prepare prompts that collide.
"""

import secrets
import struct
from collections.abc import Iterator, Sequence

import xxhash

from kvatlas.errors import HashingError
from kvatlas.hashing.block_extras import NO_BLOCK_EXTRAS, BlockExtras
from kvatlas.hashing.extra_keys import NO_EXTRAS, RequestExtras, block_extra_keys
from kvatlas.hashing.token_ids import packed_token_ids

__all__ = ["BlockKeyHasher"]

_BYTES_PER_TOKEN = 8
_SEED_LIMIT = 1 << 64
_OFFSET_LIMIT = 1 << 63
_block_head = struct.Struct("<cQI").pack
_field_head = struct.Struct("<cI").pack
_offset = struct.Struct("<q").pack


def _field(tag: bytes, payload: bytes) -> bytes:
    return _field_head(tag, len(payload)) + payload


def _text(value: str) -> bytes:
    """UTF-8, lone surrogates included: a client's JSON may hold them and must neither fail nor collide."""
    return value.encode("utf-8", "surrogatepass")


def _encode_extras(extras: BlockExtras) -> bytes:
    fields = []
    if extras.lora_name is not None:
        fields.append(_field(b"l", _text(extras.lora_name)))
    for identifier, offset in extras.multimodal:
        if not -_OFFSET_LIMIT <= offset < _OFFSET_LIMIT:
            raise HashingError(f"a multimodal offset must fit a signed 64-bit integer, got {offset}")
        fields.append(_field(b"m", _offset(offset) + _text(identifier)))
    if extras.cache_salt:
        fields.append(_field(b"s", _text(extras.cache_salt)))
    if extras.prompt_embeds_digest is not None:
        fields.append(_field(b"e", extras.prompt_embeds_digest))
    return b"".join(fields)


class BlockKeyHasher:
    """Computes block keys under one seed; keys of two seeds never meet.

    Args:
        seed: 0..2**64-1, or None for a random one. Processes that share an index or a snapshot need the same seed.

    Raises:
        HashingError: seed out of range.
    """

    __slots__ = ("seed",)

    def __init__(self, seed: int | None = None) -> None:
        if seed is None:
            seed = secrets.randbits(64)
        if not 0 <= seed < _SEED_LIMIT:
            raise HashingError(f"the block key seed must be in 0..2**64-1, got {seed}")
        self.seed = seed

    def root_key(self, namespace: str = "") -> int:
        """Return the parent key of first blocks in a namespace (a model name): models never share blocks."""
        return xxhash.xxh3_64_intdigest(b"R" + _text(namespace), self.seed)

    def block_key(self, parent_key: int, token_ids: Sequence[int], extras: BlockExtras = NO_BLOCK_EXTRAS) -> int:
        """Return the 64-bit key of one block.

        Args:
            parent_key: key of the previous block, or a root key.
            token_ids: all token ids of the block, each in 0..2**63-1.
            extras: what the block depends on besides.

        Raises:
            HashingError: bad token ids or parent key.

        Cost: O(block), measured 1.7 us for 16 tokens in a list.
        """
        encoded = b"" if extras is NO_BLOCK_EXTRAS else _encode_extras(extras)
        return self._key(parent_key, len(token_ids), packed_token_ids(token_ids), encoded)

    def _key(self, parent_key: int, num_tokens: int, packed: bytes, encoded_extras: bytes) -> int:
        try:
            head = _block_head(b"B", parent_key, num_tokens)
        except struct.error as error:
            raise HashingError(
                f"a parent key must be in 0..2**64-1 and a block under 2**32 tokens, got {parent_key} and {num_tokens}"
            ) from error
        return xxhash.xxh3_64_intdigest(head + packed + encoded_extras, self.seed)

    def chain(
        self, token_ids: Sequence[int], block_size: int, *, extras: RequestExtras = NO_EXTRAS, namespace: str = ""
    ) -> list[int]:
        """Return the keys of all complete blocks of a prompt, in order.

        Raises:
            HashingError: bad token ids or block size.

        Cost: O(n), measured 1 us for each 16-token block.
        """
        return list(self.iter_chain(token_ids, block_size, extras=extras, namespace=namespace))

    def iter_chain(
        self, token_ids: Sequence[int], block_size: int, *, extras: RequestExtras = NO_EXTRAS, namespace: str = ""
    ) -> Iterator[int]:
        """Yield the keys that `chain` returns, each hashed only when asked for: a lookup stops at the first miss.

        Raises:
            HashingError: bad token ids or block size, with the first key.
        """
        if block_size < 1:
            raise HashingError(f"block size must be at least 1 token, got {block_size}")
        packed = packed_token_ids(token_ids)
        width = block_size * _BYTES_PER_TOKEN
        key = self.root_key(namespace)
        plain = extras.is_empty
        encoded = b""
        cursor = 0
        for index in range(len(packed) // width):
            if not plain:
                start = index * block_size
                tagged, cursor = block_extra_keys(extras, start, start + block_size, cursor)
                encoded = _encode_extras(BlockExtras.from_tagged(tagged))
            key = self._key(key, block_size, packed[index * width : (index + 1) * width], encoded)
            yield key
