"""What the event stream says about blocks outside the device.

Two forms. The plain one is a placeholder: one hash, no parent, no tokens, block size 0; it means something only to
those who know the hash already. The self-describing one carries tokens and parent; it exists for groups that see
everything, and extra keys are never in it.

Source: vLLM 0.32.0 OffloadingEventsTracker.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvatlas.events import BlockHandle, BlockRemoved, BlockStored, Event
from kvatlas.hashing import external_hash
from kvatlas.prefix_cache.connectors.matching import TransferGroup
from kvatlas.prefix_cache.connectors.tier import TierChange
from kvatlas.prefix_cache.request import Request

__all__ = ["OffloadEvents"]

_GROUP_BYTES = 4


@dataclass(slots=True)
class _Description:
    """What a self-describing store says; kept while any tier has the block."""

    parent_block_hash: BlockHandle | None
    token_ids: tuple[int, ...]
    lora_id: int | None
    lora_name: str | None
    group: TransferGroup
    residencies: int = 0


class OffloadEvents:
    """Turns changes of tiers into events.

    Args:
        self_describing: send tokens and parents where possible (vLLM's `self_describing_kv_events`).
        int_block_hashes: 64-bit integers (engine default) instead of raw digests.
    """

    def __init__(self, *, self_describing: bool, int_block_hashes: bool) -> None:
        self._self_describing = self_describing
        self._as_int = int_block_hashes
        self._descriptions: dict[bytes, _Description] = {}

    def describe(self, request: Request, group: TransferGroup, index: int, key: bytes, parent: bytes | None) -> None:
        """Remember what a block is made of, while its request is there to tell. Nothing in the plain form.

        Args:
            parent: digest of the block before it, None for the first.
        """
        if not self._self_describing or group.window_tokens is not None or key in self._descriptions:
            return
        start = index * group.block_size
        self._descriptions[key] = _Description(
            parent_block_hash=None if parent is None else external_hash(parent, as_int=self._as_int),
            token_ids=tuple(request.all_token_ids[start : start + group.block_size]),
            lora_id=request.lora_id,
            lora_name=request.lora_name,
            group=group,
        )

    def of_changes(self, changes: Iterable[TierChange]) -> list[Event]:
        """Events of changes, in order: one for each stored block, one for each burst of removals and group."""
        events: list[Event] = []
        gone: set[bytes] = set()
        for change in changes:
            if change.stored:
                events.extend(self._stored(key, change.medium) for key in change.keys)
            else:
                events.extend(self._removed(change))
                gone.update(change.keys)
        for key in gone:  # at the end only: a block may leave one tier and enter another in the same step
            if (known := self._descriptions.get(key)) is not None and known.residencies <= 0:
                del self._descriptions[key]
        return events

    def forget_unstored(self, key: bytes) -> None:
        """Drop the description of a block that was not stored after all."""
        if (known := self._descriptions.get(key)) is not None and known.residencies <= 0:
            del self._descriptions[key]

    def forget_all(self) -> None:
        """Drop all descriptions: the stores were emptied."""
        self._descriptions.clear()

    def _stored(self, key: bytes, medium: str) -> BlockStored:
        handle = external_hash(key[:-_GROUP_BYTES], as_int=self._as_int)
        known = self._descriptions.get(key)
        if known is None:
            group_id = int.from_bytes(key[-_GROUP_BYTES:], "big")
            return BlockStored([handle], None, [], 0, None, medium, None, group_idx=group_id)
        known.residencies += 1
        return BlockStored(
            [handle],
            known.parent_block_hash,
            list(known.token_ids),
            known.group.block_size,
            known.lora_id,
            medium,
            known.lora_name,
            group_idx=known.group.group_id,
            kv_cache_spec_kind=known.group.spec.kind,
            kv_cache_spec_sliding_window=known.group.spec.published_window,
        )

    def _removed(self, change: TierChange) -> list[BlockRemoved]:
        by_group: dict[int, list[BlockHandle]] = {}
        for key in change.keys:
            group_id = int.from_bytes(key[-_GROUP_BYTES:], "big")
            by_group.setdefault(group_id, []).append(external_hash(key[:-_GROUP_BYTES], as_int=self._as_int))
            if (known := self._descriptions.get(key)) is not None:
                known.residencies -= 1
        return [BlockRemoved(hashes, change.medium, group_idx) for group_idx, hashes in by_group.items()]
