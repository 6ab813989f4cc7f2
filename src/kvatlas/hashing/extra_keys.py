"""What makes two blocks with equal tokens different: LoRA, multimodal items, cache salt, prompt embeddings.

`RequestExtras` describes a request; `block_extra_keys` gives the tagged tuples vLLM hashes for one of its blocks;
`published_extra_keys` gives the untagged form its events carry.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from kvatlas.errors import HashingError

__all__ = [
    "NO_EXTRAS",
    "Lora",
    "MultimodalItem",
    "PromptEmbeds",
    "PublishedKeys",
    "RequestExtras",
    "TaggedKeys",
    "block_extra_keys",
    "block_identifiers",
    "multimodal_cursor",
    "published_extra_keys",
]

TaggedKeys: TypeAlias = tuple[tuple[str | int | bytes | None, ...], ...]
PublishedKeys: TypeAlias = tuple[str | bytes | tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA adapter: the name clients use and the path it was loaded from. vLLM hashes both, events carry the name."""

    name: str
    path: str | None = None


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """One image, video or audio clip: its content id and the placeholder range it covers in the prompt (tokens)."""

    identifier: str
    offset_tokens: int
    length_tokens: int

    def __post_init__(self) -> None:
        if self.offset_tokens < 0 or self.length_tokens <= 0:
            raise HashingError(
                f"multimodal item {self.identifier!r} must have an offset >= 0 and a length > 0, "
                f"got offset {self.offset_tokens} and length {self.length_tokens} tokens"
            )

    @property
    def end_tokens(self) -> int:
        """First position after the item."""
        return self.offset_tokens + self.length_tokens


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Prompt embeddings given instead of token ids: raw bytes in the native dtype, and the bytes of one position."""

    data: bytes
    bytes_per_token: int

    def __post_init__(self) -> None:
        if self.bytes_per_token <= 0 or len(self.data) % self.bytes_per_token:
            raise HashingError(
                f"prompt embeds must be whole positions: {len(self.data)} bytes is no multiple of "
                f"{self.bytes_per_token} bytes per token"
            )

    def digest(self, start_tokens: int, end_tokens: int) -> bytes:
        """SHA-256 of the positions [start, end); of nothing past the prompt, as decode blocks have."""
        width = self.bytes_per_token
        return hashlib.sha256(self.data[start_tokens * width : end_tokens * width]).digest()


@dataclass(frozen=True, slots=True)
class RequestExtras:
    """Everything besides token ids that decides whether a request may use a cached block.

    `multimodal` is kept sorted by offset; items must not overlap. An empty `cache_salt` counts as none, as in engines.
    """

    lora: Lora | None = None
    multimodal: tuple[MultimodalItem, ...] = ()
    cache_salt: str | None = None
    prompt_embeds: PromptEmbeds | None = None

    def __post_init__(self) -> None:
        items = tuple(sorted(self.multimodal, key=lambda item: item.offset_tokens))
        object.__setattr__(self, "multimodal", items)
        object.__setattr__(self, "cache_salt", self.cache_salt or None)

    @property
    def is_empty(self) -> bool:
        """True when token ids alone decide."""
        return self.lora is None and not self.multimodal and self.cache_salt is None and self.prompt_embeds is None


NO_EXTRAS = RequestExtras()


def block_extra_keys(
    extras: RequestExtras, start_tokens: int, end_tokens: int, cursor: int = 0
) -> tuple[TaggedKeys | None, int]:
    """Return the tagged extra keys of the block [start, end) and the multimodal cursor for the next block.

    The order is LoRA, multimodal, salt (block at token 0 only), embeds. None means no keys at all.

    Args:
        extras: the request's extras.
        start_tokens: first position of the block.
        end_tokens: first position after the block.
        cursor: index of the multimodal item to look at first, as returned for the previous block; negative counts from
            the last item.

    Cost: O(1 + items touched).
    Source: vLLM 0.32.0 kv_cache_utils.generate_block_hash_extra_keys.
    """
    if extras.is_empty:
        return None, cursor
    keys: list[tuple[str | int | bytes | None, ...]] = []
    if extras.lora is not None:
        keys.append(("lora", extras.lora.name, extras.lora.path))
    items, cursor = _items_in_block(extras.multimodal, start_tokens, end_tokens, cursor)
    keys.extend(("mm", item.identifier, item.offset_tokens - start_tokens) for item in items)
    if start_tokens == 0 and extras.cache_salt:
        keys.append(("cache_salt", extras.cache_salt))
    if extras.prompt_embeds is not None:
        keys.append(("prompt_embeds", extras.prompt_embeds.digest(start_tokens, end_tokens)))
    return (tuple(keys) or None), cursor


def _items_in_block(
    items: tuple[MultimodalItem, ...], start: int, end: int, cursor: int
) -> tuple[list[MultimodalItem], int]:
    """The items that overlap [start, end), walking from `cursor`; it passes only items that end in the block."""
    if not items or items[-1].end_tokens <= start:
        return [], cursor
    if cursor < 0:
        cursor += len(items)
    found = []
    while cursor < len(items):
        item = items[cursor]
        if end <= item.offset_tokens:
            break
        if start < item.end_tokens:
            found.append(item)
            if end < item.end_tokens:
                break
        cursor += 1
    return found, cursor


def block_identifiers(items: tuple[MultimodalItem, ...], block_size: int, num_blocks: int) -> Iterator[tuple[str, ...]]:
    """Yield, for each block, the ids of the items whose placeholders overlap it; items are sorted by offset."""
    cursor = 0
    for start in range(0, num_blocks * block_size, block_size):
        found, cursor = _items_in_block(items, start, start + block_size, cursor)
        yield tuple(item.identifier for item in found)


def multimodal_cursor(extras: RequestExtras, start_tokens: int) -> int:
    """Return the cursor to resume hashing with at `start_tokens`: the first multimodal item that ends after it."""
    items = extras.multimodal
    if start_tokens == 0 or not items or items[-1].end_tokens <= start_tokens:
        return 0
    return bisect_right(items, start_tokens, key=lambda item: item.end_tokens)


def published_extra_keys(tagged: TaggedKeys | None) -> PublishedKeys | None:
    """Return the form events carry: a multimodal key becomes (identifier, offset), every other key its second element.

    The LoRA path is lost and a salt looks like a LoRA name: readers tell them apart with the event's `lora_name`.

    Source: vLLM 0.32.0, BlockStored.extra_keys.
    """
    if tagged is None:
        return None
    return tuple(tuple(key[1:]) if key[0] == "mm" else key[1] for key in tagged)  # type: ignore[misc]
