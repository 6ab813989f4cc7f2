"""Living within a cap: which knowledge goes first when memory runs short."""

from collections.abc import Collection
from dataclasses import dataclass

from kvatlas._native import IndexCore
from kvatlas.index.column import WorkerColumn

__all__ = ["MemoryKeeper", "MemoryStats"]

_HEADROOM = 512 * 1024
_SHARE_GIVEN_UP = 8
_LEAST_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """What the index holds.

    Attributes:
        used_bytes: memory held for tables and waiting runs.
        max_bytes: the cap; None for none.
        entries: (handle, worker) pairs.
        blocks: (plane, block key) pairs that somebody holds.
        refused_blocks: blocks not recorded for want of memory, ever.
        forgotten_blocks: blocks given up to make room, ever.
    """

    used_bytes: int
    max_bytes: int | None
    entries: int
    blocks: int
    refused_blocks: int
    forgotten_blocks: int


class MemoryKeeper:
    """Gives up the least valuable knowledge when the index comes close to its cap.

    First what matches nothing: runs that wait for an unknown parent. Then blocks of the worker that has most of them,
    those longest without use first. What is given up is claimed no more, so predictions err low, and the worker's
    matches say that they are not exact.
    """

    __slots__ = ("_core", "_refusals", "_relief_bytes", "is_capped", "max_bytes")

    def __init__(self, core: IndexCore, max_bytes: int | None) -> None:
        self._core = core
        self.max_bytes = max_bytes
        self.is_capped = max_bytes is not None
        self._relief_bytes = (
            0 if max_bytes is None else max_bytes - max(max_bytes // 16, min(max_bytes // 4, _HEADROOM))
        )
        self._refusals = 0

    def relieve(self, columns: Collection[WorkerColumn]) -> None:
        """Make room when there is little left. Call it after every batch.

        Cost: O(1) while there is room; O(blocks of the largest worker) when room is made.
        """
        if self.max_bytes is None:
            return
        while self._core.live_bytes > self._relief_bytes:
            if not self._give_up(columns):
                break
        if self._core.refusals != self._refusals:  # room there may be, but not in pieces as large as are needed
            self._refusals = self._core.refusals
            self._give_up(columns)

    def _give_up(self, columns: Collection[WorkerColumn]) -> bool:
        """Give the least valuable part up. Returns whether anything went."""
        waiting = max(columns, key=lambda column: column.orphans.blocks_now, default=None)
        if waiting is not None and waiting.orphans.blocks_now:
            waiting.drop_orphans(waiting.orphans.blocks_now // 2)
            return True
        largest = max(columns, key=lambda column: self._core.entries(column.number), default=None)
        if largest is None:
            return False
        share = max(self._core.entries(largest.number) // _SHARE_GIVEN_UP, _LEAST_BLOCKS)
        return self._core.forget_oldest(largest.number, share) > 0

    def stats(self, columns: Collection[WorkerColumn]) -> MemoryStats:
        """The state as it stands. Cost: O(workers)."""
        stats = [column.stats for column in columns]
        return MemoryStats(
            used_bytes=self._core.used_bytes,
            max_bytes=self.max_bytes,
            entries=sum(self._core.entries(column.number) for column in columns),
            blocks=self._core.blocks,
            refused_blocks=sum(each.refused_blocks for each in stats),
            forgotten_blocks=sum(each.forgotten_blocks for each in stats),
        )
