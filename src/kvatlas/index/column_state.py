"""Values about one worker's column: how its copies count, its counters, and what a snapshot keeps of it.

A snapshot does not keep runs that wait for an unknown parent: they count as dropped, and their blocks match nothing.
"""

import enum
from dataclasses import dataclass

import msgspec

__all__ = ["ColumnState", "ColumnStats", "CopyMode", "DoubtState", "GroupState"]


class CopyMode(enum.StrEnum):
    """What a repeated store of a resident block means for one engine."""

    COUNT = "count"
    """One more physical copy (vLLM's default, `kv_cache_report_mode=incremental`)."""
    SET = "set"
    """Nothing new (engines that re-announce what they reuse)."""


@dataclass(frozen=True, slots=True)
class ColumnStats:
    """What one worker's events amounted to, since the worker was added. Counters only grow; `*_now` are levels."""

    stored_blocks: int = 0
    removed_blocks: int = 0
    cleared: int = 0
    unknown_removals: int = 0
    """Removals of handles never seen: harmless, and a sign of batches missed before."""
    orphaned_blocks: int = 0
    dropped_orphan_blocks: int = 0
    unpaired_blocks: int = 0
    """Hashes whose content the event does not prove (masked spans, bigrams, extra keys of no known form)."""
    refused_blocks: int = 0
    """Blocks not recorded for want of memory: the worker holds more than is claimed."""
    forgotten_blocks: int = 0
    """Blocks given up to make room under the memory cap."""
    resident_now: int = 0
    unkeyed_now: int = 0
    """Resident blocks whose content is not known: they match nothing, so a hit may be longer than claimed."""
    orphans_now: int = 0
    doubted_now: int = 0
    """Blocks claimed before a loss of events and not confirmed since."""
    reported_now: int = 0
    """Claims that rest on the engine's reports alone: no event named the block."""


class GroupState(msgspec.Struct, frozen=True):
    """One KV cache group, as stores taught it; see `GroupProfile`."""

    group_id: int
    kind: str
    window_tokens: int | None = None
    block_size: int | None = None


class DoubtState(msgspec.Struct, frozen=True):
    """How long doubts last; see `DoubtBook`."""

    began_at: int | None = None
    turnover_blocks: int = 0
    capacity_blocks: int | None = None
    epoch: int = 0


class ColumnState(msgspec.Struct, frozen=True):
    """What a snapshot keeps of a column, beside its blocks.

    Attributes:
        unit_tokens: what one block key covers.
        unplaced, complete_at, survived_loss: whether all that the worker holds was told.
    """

    stated_block_size: int | None = None
    unit_tokens: int | None = None
    groups: tuple[GroupState, ...] = ()
    other_media: tuple[str, ...] = ()
    doubts: DoubtState = DoubtState()
    cleared: int = 0
    orphaned_blocks: int = 0
    dropped_orphan_blocks: int = 0
    unprovable: int = 0
    unplaced: int = 0
    complete_at: int = 0
    survived_loss: bool = False
