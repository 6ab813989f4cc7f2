"""The state of the Python core of the index, and the smallest changes of it."""

import math

from kvatlas._native._pure_column import Column, Entry, print_of
from kvatlas._native.arguments import TICKS_PER_STAMP, no_such_plane, no_such_worker, require_u64

__all__ = ["CoreState"]


class CoreState:
    """Claims by plane, and each worker's books."""

    def __init__(self, seed: int, max_bytes: int = 0) -> None:
        require_u64("the seed", seed)
        self._seed = seed
        self.max_bytes = max_bytes
        self._planes: list[dict[int, int]] = [{}]
        self._shadows: list[dict[int, int]] = [{}]
        self._stamps: dict[int, int] = {}
        self._shadow_stamps: dict[int, int] = {}
        self._columns: dict[int, Column] = {}
        self._ticks = 0
        self._charged = 0

    @property
    def _stamp(self) -> int:
        return self._ticks // TICKS_PER_STAMP

    def _column(self, worker: int) -> Column:
        column = self._columns.get(worker)
        if column is None:
            raise no_such_worker(worker)
        return column

    def _plane(self, plane: int) -> dict[int, int]:
        if not 0 <= plane < len(self._planes):
            raise no_such_plane(plane, len(self._planes))
        return self._planes[plane]

    def _renew(self, column: Column, worker: int, entry: Entry) -> None:
        """A block in doubt is announced again: that copy is all that is known of it now, and it keeps its meaning."""
        for plane in list(entry.copies):
            self._take(column, worker, entry, plane)
        if entry.block_key is None:
            column.unkeyed -= 1  # counted again with the new copy
        entry.in_doubt = False
        column.doubted -= 1

    def _claim(self, column: Column, worker: int, plane: int, block_key: int, *, in_doubt: bool) -> None:
        self._set((self._shadows if in_doubt else self._planes)[plane], block_key, worker)
        if plane == 0 and column.reported.pop(block_key, None) is not None and not in_doubt:
            self._unset(self._shadows[0], block_key, worker)  # an event names it now

    def _set(self, holders: dict[int, int], block_key: int, worker: int, age: int = 0) -> None:
        holders[block_key] = holders.get(block_key, 0) | 1 << worker
        if (stamps := self._stamps_of(holders)) is not None:
            stamp = self._stamp - age
            stamps[block_key] = max(stamp, stamps.get(block_key, stamp))

    def _stamps_of(self, holders: dict[int, int]) -> dict[int, int] | None:
        if holders is self._planes[0]:
            return self._stamps
        return self._shadow_stamps if holders is self._shadows[0] else None

    def _take(self, column: Column, worker: int, entry: Entry, plane: int) -> None:
        """All copies of one plane go."""
        del entry.copies[plane]
        column.resident -= 1
        if entry.block_key is None:
            return
        self._unset(self._planes[plane], entry.block_key, worker)
        if entry.in_doubt:
            self._unset(self._shadows[plane], entry.block_key, worker)

    def _unset(self, holders: dict[int, int], block_key: int, worker: int) -> None:
        if holders is self._planes[0]:
            self._columns[worker].uses.pop(print_of(block_key), None)
        left = holders.get(block_key, 0) & ~(1 << worker)
        if left:
            holders[block_key] = left
        elif holders.pop(block_key, None) and (stamps := self._stamps_of(holders)) is not None:
            stamps.pop(block_key, None)

    def _leave(self, column: Column, number: int, entry: Entry) -> None:
        """An entry without copies says nothing more, unless somebody waits for it."""
        if entry.copies:
            return
        if entry.block_key is None:
            column.unkeyed -= 1
        column.doubted -= entry.in_doubt
        entry.block_key, entry.in_doubt = None, False
        if not entry.waited:
            del column.entries[number]

    def _stamp_of(self, entry: Entry) -> float:
        """The higher, the later of use; of what no prompt can match the lowest."""
        if entry.block_key is None or 0 not in entry.copies:
            return -math.inf
        shadow = self._shadow_stamps.get(entry.block_key, -math.inf) if entry.in_doubt else -math.inf
        return self._stamps.get(entry.block_key, shadow)

    def _cast_shadow(self, worker: int, plane: int, block_key: int) -> None:
        if self._planes[plane].get(block_key, 0) >> worker & 1:
            age = self._stamp - self._stamps[block_key] if plane == 0 else 0
            self._unset(self._planes[plane], block_key, worker)
            self._set(self._shadows[plane], block_key, worker, age)

    def _doubt_reported(self, column: Column, worker: int) -> None:
        if column.reported and not column.unsure:
            for block_key in column.reported:
                self._cast_shadow(worker, 0, block_key)
            column.unsure = True

    def expire_reported(self, worker: int, stored: int, /) -> int:
        """Forget reported claims from when the worker's count of stored blocks was below `stored`. Returns how many."""
        column = self._column(worker)
        old = [key for key, at in column.reported.items() if at < stored]
        for key in old:
            self._unset(self._planes[0], key, worker)
            self._unset(self._shadows[0], key, worker)
            del column.reported[key]
        return len(old)

    def counts(self, worker: int, /) -> tuple[int, ...]:
        """Blocks stored, removed, unknown removals, unpaired, refused, forgotten; resident, unkeyed, in doubt now."""
        c = self._column(worker)
        return (
            *(c.stored, c.removed, c.unknown_removals, c.unpaired, c.refused, c.forgotten),
            *(c.resident, c.unkeyed, c.doubted),
        )

    def shortfall(self, worker: int, /) -> tuple[int, int]:
        """Blocks refused or forgotten, ever, and blocks of unknown key, now: why a hit may be longer than found."""
        column = self._column(worker)
        return column.refused + column.forgotten, column.unkeyed

    def entries(self, worker: int, /) -> int:
        """Handles of a worker that the index remembers. Cost: O(1)."""
        return len(self._column(worker).entries)
