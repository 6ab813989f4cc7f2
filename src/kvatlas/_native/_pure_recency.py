"""Ages in the Python core of the index: how long blocks were without use, when they are removed and while they stay."""

from array import array
from collections.abc import Iterator

from kvatlas._native._pure_column import Column, Entry
from kvatlas._native._pure_doubts import DoubtingState
from kvatlas._native.arguments import AGE_BINS

__all__ = ["AgingState"]


class AgingState(DoubtingState):
    """The part of the core's interface that is about recency.

    An age is in stamps: it grows by one with every `TICKS_PER_STAMP` blocks that the whole fleet stores or is asked
    for. A store, and a find that reaches the block, make it 0.
    """

    @property
    def ticks(self) -> int:
        """Blocks stored and found so far, by all workers."""
        return self._ticks

    def removal_ages(self, worker: int, /) -> tuple[int, ...]:
        """Removals of claimed blocks in plane 0 since the last `forget_all`, by their age in stamps.

        Returns:
            int[32]: bin 0 counts age 0, bin i ages from 2^(i-1) to 2^i - 1.

        Cost: 1 us.
        """
        return tuple(self._column(worker).removal_ages)

    def ages(self, worker: int, numbers: "array[int]", /) -> list[int | None]:
        """Each block's age; None for one that is not claimed in plane 0, or is in doubt. Cost: O(blocks)."""
        column = self._column(worker)
        entries = (column.entries.get(number) for number in numbers)
        return [None if entry is None else self._age(entry) for entry in entries]

    def resident_ages(self, worker: int, sample: int, /) -> list[int]:
        """Ages of at most `sample` of the blocks claimed in plane 0, spread evenly. Cost: natively O(sample)."""
        known = list(self._claimed_ages(self._column(worker)))
        return known[:: -(-len(known) // sample) or 1] if sample else []

    def _claimed_ages(self, column: Column) -> Iterator[int]:
        for entry in column.entries.values():
            age = self._age(entry)
            if age is not None:
                yield age

    def _age(self, entry: Entry) -> int | None:
        key = entry.block_key
        if key is None or entry.in_doubt or 0 not in entry.copies or key not in self._planes[0]:
            return None
        return self._stamp - self._stamps[key]

    def _note_removal(self, column: Column, entry: Entry) -> None:
        age = self._age(entry)
        if age is not None:
            column.removal_ages[min(age.bit_length(), AGE_BINS - 1)] += 1
