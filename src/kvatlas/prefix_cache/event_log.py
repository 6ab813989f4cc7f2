"""What happened to the cache, in the words of an engine's events."""

from collections.abc import Sequence

from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvatlas.hashing import PublishedKeys, block_extra_keys, external_hash, published_extra_keys
from kvatlas.prefix_cache.kv_cache_config import KVCacheConfig
from kvatlas.prefix_cache.request import Request

__all__ = ["EventLog"]

MEDIUM = "GPU"


class EventLog:
    """Events since they were last taken. With events off nothing is recorded."""

    __slots__ = ("_as_int", "_enabled", "_events", "_kinds")

    def __init__(self, config: KVCacheConfig) -> None:
        self._enabled = config.enable_events
        self._as_int = config.int_block_hashes
        self._kinds = tuple((group.spec.kind, group.spec.published_window) for group in config.groups)
        self._events: list[Event] = []

    def stored(
        self,
        request: Request,
        blocks: Sequence[tuple[int, bytes]],
        parent: bytes | None,
        tokens: range,
        block_size: int,
        group_id: int,
    ) -> None:
        """Record one BlockStored, also when it lists no block.

        Args:
            request: whose tokens and extras the event carries.
            blocks: (first token, digest) of each block to list.
            parent: digest before the range, None at the start of the sequence.
            tokens: the range the event covers, blocks that are not listed included.
            block_size: tokens the event gives as the size of a block.
            group_id: the KV cache group.

        Source: vLLM 0.32.0 BlockPool, where it builds BlockStored.
        """
        if not self._enabled:
            return
        as_int = self._as_int
        kind, window = self._kinds[group_id]
        self._events.append(
            BlockStored(
                block_hashes=[external_hash(digest, as_int=as_int) for _, digest in blocks],
                parent_block_hash=None if parent is None else external_hash(parent, as_int=as_int),
                token_ids=request.all_token_ids[tokens.start : tokens.stop],
                block_size=block_size,
                lora_id=request.lora_id,
                medium=MEDIUM,
                lora_name=request.lora_name,
                extra_keys=_published(request, blocks, block_size),
                group_idx=group_id,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
                session_id=request.session_id,
            )
        )

    def removed(self, digest: bytes, group_id: int) -> None:
        """Record that one block no longer holds a content."""
        if self._enabled:
            handle = external_hash(digest, as_int=self._as_int)
            self._events.append(BlockRemoved(block_hashes=[handle], medium=MEDIUM, group_idx=group_id))

    def cleared(self) -> None:
        """Record that all content was forgotten."""
        if self._enabled:
            self._events.append(AllBlocksCleared())

    def take(self) -> list[Event]:
        """The events since the last call, in order of happening."""
        events, self._events = self._events, []
        return events


def _published(
    request: Request, blocks: Sequence[tuple[int, bytes]], block_size: int
) -> list[PublishedKeys | None] | None:
    """Extra keys of the listed blocks as events carry them; None when no block is listed.

    They are worked out for the block the event speaks of. Where that is longer than a hashed block they are not the
    keys that were hashed; neither are the engine's.
    """
    if not blocks:
        return None
    if request.extras.is_empty:
        return [None] * len(blocks)
    return [published_extra_keys(block_extra_keys(request.extras, start, start + block_size)[0]) for start, _ in blocks]
