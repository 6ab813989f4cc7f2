"""The extra keys of one block as typed dimensions, so that equal text in two dimensions stays two things.

An engine's event lists extra keys untagged: `("x",)` may be a LoRA name or a salt. Here each has its own field.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.errors import HashingError
from kvatlas.hashing.extra_keys import TaggedKeys

__all__ = ["NO_BLOCK_EXTRAS", "BlockExtras"]

_MULTIMODAL_PAIR = 2
_OFFSET_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True)
class BlockExtras:
    """What one block depends on besides its tokens and its parent.

    Attributes:
        lora_name: adapter name; the path is unknown to event readers and left out.
        multimodal: (content id, offset in tokens relative to the block start; negative for continuation blocks).
        cache_salt: set on the block at token 0 only; later blocks inherit it through the chain.
        prompt_embeds_digest: SHA-256 of the block's embeddings.
    """

    lora_name: str | None = None
    multimodal: tuple[tuple[str, int], ...] = ()
    cache_salt: str | None = None
    prompt_embeds_digest: bytes | None = None

    @classmethod
    def from_tagged(cls, tagged: TaggedKeys | None) -> "BlockExtras":
        """Read the tagged tuples an engine hashes.

        Raises:
            HashingError: an unknown tag.
        """
        if not tagged:
            return NO_BLOCK_EXTRAS
        lora_name: str | None = None
        items: list[tuple[str, int]] = []
        salt: str | None = None
        digest: bytes | None = None
        for key in tagged:
            match key:
                case ("lora", str() as name, *_):
                    lora_name = name
                case ("mm", str() as identifier, int() as offset):
                    items.append((identifier, offset))
                case ("cache_salt", str() as text):
                    salt = text
                case ("prompt_embeds", bytes() as embeds):
                    digest = embeds
                case _:
                    raise HashingError(f"extra key must be a lora, mm, cache_salt or prompt_embeds tuple, got {key!r}")
        return cls(lora_name, tuple(items), salt or None, digest)

    @classmethod
    def from_published(
        cls, published: Sequence[object] | None, lora_name: str | None, cache_salt: str | None = None
    ) -> "BlockExtras":
        """Read one block's untagged extra keys as events carry them.

        With a LoRA name given, a first element equal to it is the LoRA; pairs are multimodal items, bytes an embeds
        digest, a remaining string the salt.

        Args:
            published: the entry of `BlockStored.extra_keys` for this block.
            lora_name: the event's `lora_name`; it counts even when the entry is missing.
            cache_salt: the event's own salt field (SGLang); give it for the block at token 0 only.

        Raises:
            HashingError: an element of another type, or two strings that cannot both be the salt.
        """
        if not published:
            if lora_name is None and not cache_salt:
                return NO_BLOCK_EXTRAS
            return cls(lora_name=lora_name, cache_salt=cache_salt or None)
        items: list[tuple[str, int]] = []
        digest: bytes | None = None
        salt = cache_salt or None
        rest = published[1:] if lora_name is not None and published[0] == lora_name else published
        for key in rest:
            if isinstance(key, str) and (salt is None or key == salt):
                salt = key or None
            elif isinstance(key, bytes) and digest is None:
                digest = key
            elif isinstance(key, list | tuple) and len(key) == _MULTIMODAL_PAIR:
                items.append(_multimodal_pair(key))
            else:
                raise HashingError(
                    f"extra keys of a block must be at most one salt, one embeds digest and [id, offset] pairs; "
                    f"{key!r} does not fit in {published!r} with lora_name {lora_name!r}"
                )
        return cls(lora_name, tuple(items), salt, digest)


def _multimodal_pair(key: Sequence[object]) -> tuple[str, int]:
    identifier, offset = key
    if isinstance(identifier, str) and isinstance(offset, int) and not isinstance(offset, bool):
        if abs(offset) >= _OFFSET_LIMIT:
            raise HashingError(f"a multimodal offset must fit a signed 64-bit integer, got {offset}")
        return identifier, offset
    raise HashingError(f"a multimodal extra key must be [content id, offset], got {key!r}")


NO_BLOCK_EXTRAS = BlockExtras()
