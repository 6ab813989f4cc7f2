"""Ages in the Python core of the index: how long blocks were without use, when they are removed and while they stay."""

from array import array
from collections.abc import Iterator, Sequence

from kvatlas._native._pure_column import Column, Entry, print_of
from kvatlas._native._pure_dump import DumpingState
from kvatlas._native.arguments import AGE_BINS, MAX_U32, USE_BINS, age_code

__all__ = ["AgingState"]

_LEAST_USES = 1024
_BLOCKS_PER_USE = 8


class AgingState(DumpingState):
    """The part of the core's interface that is about recency.

    An age is in stamps: it grows by one with every `TICKS_PER_STAMP` blocks that the whole fleet stores or is asked
    for. A store, a find that reaches the block, and a use make it 0.

    Beside it each worker has a clock of its own, which counts the blocks it stored and those its requests used: a model
    of its free queue. What it says of which blocks is told in `c/uses.h`.
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

    def touch(self, worker: int, block_keys: Sequence[int], fresh: int, /) -> int:
        """A request used the blocks of its prompt on a worker.

        Those that the worker surely holds in plane 0 are of use now, for the fleet and by the worker's own clock.

        Args:
            worker: where it ran.
            block_keys: its prompt's; an array of 64-bit words is read where it lies.
            fresh: the first block that the request computed.

        Returns:
            How many of the blocks the worker holds.

        Cost: natively 5-20 ns a block.
        """
        column, count = self._column(worker), len(block_keys)
        held = []
        for i, key in enumerate(block_keys):
            if self._planes[0].get(key, 0) >> worker & 1:
                self._stamps[key] = self._stamp
                held.append(i)
                if print_of(key) in column.uses:
                    column.uses[print_of(key)] = column.clock + count - i
        self._ticks += len(held)
        if held:
            now = column.clock
            column.used += count
            for i in (*[i for i in held if i >= fresh][:1], held[-1]):
                self._note_use(column, print_of(block_keys[i]), now + count - i)
        return len(held)

    def chain_uses(self, worker: int, block_keys: Sequence[int], blocks: int, /) -> list[tuple[int, int]]:
        """Which of the first `blocks` of a chain have a time: (position, age by the worker's own clock) of each.

        A block between two of them is as old as the one before it. Cost: natively 2-5 ns a block.
        """
        column = self._column(worker)
        times = [(i, column.uses.get(print_of(key))) for i, key in enumerate(block_keys[: max(0, blocks)])]
        return [(i, column.clock - time & MAX_U32) for i, time in times if time is not None]

    def use_counts(self, worker: int, /) -> tuple[int, int]:
        """The worker's clock: blocks it stored and blocks its requests used; and how many blocks have a time."""
        column = self._column(worker)
        return column.clock, len(column.uses)

    def use_removals(self, worker: int, /) -> dict[int, int]:
        """Removals of blocks with a time since the last `forget_all`: `age_code` of their age -> how many."""
        return {code: count for code, count in enumerate(self._column(worker).use_ages) if count}

    def use_ages(self, worker: int, sample: int, /) -> list[int]:
        """Ages of at most `sample` of the blocks with a time, spread evenly. Cost: natively O(sample)."""
        column = self._column(worker)
        ages = [column.clock - time & MAX_U32 for time in column.uses.values()]
        return ages[:: -(-len(ages) // sample) or 1] if sample > 0 else []

    def _note_use(self, column: Column, block_print: int, time: int) -> None:
        """With as many as there may be already the older half goes first; of equal age those of larger prints."""
        uses = column.uses
        if block_print not in uses and len(uses) >= max(_LEAST_USES, len(column.entries) // _BLOCKS_PER_USE):
            ages = sorted(((column.clock - time & MAX_U32, known) for known, time in uses.items()), reverse=True)
            for _, known in ages[: len(ages) // 2]:
                del uses[known]
        uses[block_print] = time

    def _forget_ages(self, worker: int) -> None:
        column = self._column(worker)
        column.removal_ages, column.use_ages = [0] * AGE_BINS, [0] * USE_BINS

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
            time = column.uses.get(print_of(entry.block_key or 0))
            if time is not None:
                column.use_ages[age_code(column.clock - time & MAX_U32)] += 1
