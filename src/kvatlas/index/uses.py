"""Who used which blocks when, by each worker's own clock: a model of every worker's free queue.

An engine puts a request's blocks at the tail of its free queue when the request ends, the prompt's end first, and takes
new blocks from the head. So what counts for a block is how much the worker stored and used since a request last used
it. The core keeps such times for two blocks of each request; see `_native/c/uses.h`.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvatlas._native import IndexCore
from kvatlas._native.arguments import USE_BINS, age_of_code
from kvatlas.errors import IndexStateError
from kvatlas.hashing import NO_EXTRAS, BlockKeyHasher, RequestExtras
from kvatlas.index.column import WorkerColumn
from kvatlas.index.matching import PromptMatcher
from kvatlas.index.planes import Planes

__all__ = ["USE_AGE_STARTS", "IdlePart", "PromptUses", "UseCounts"]

USE_AGE_STARTS = tuple(age_of_code(code) for code in range(USE_BINS))
"""The least age of each bin of `UseCounts.removals`: exact below 8, then eight bins to each power of two."""


class IdlePart(NamedTuple):
    """Consecutive blocks of a hit, and how long they went without use on the worker that holds them.

    Attributes:
        blocks: how many.
        age: by the worker's own clock; see `UseCounts`.
    """

    blocks: int
    age: int


@dataclass(frozen=True, slots=True)
class UseCounts:
    """One worker's free queue as its own clock has it.

    The clock counts the blocks that the worker stored and those that requests used there: what makes a block age. Two
    blocks of each request have a time of their own; another block is as old as the nearest of those up its chain.

    Attributes:
        clock: now.
        stored_blocks: blocks this worker stored so far.
        timed_blocks: blocks with a time now.
        removals: bin of `USE_AGE_STARTS` -> blocks with a time that it removed in this life at such an age.
        resident_ages: ages of some of the blocks with a time, spread evenly.
    """

    clock: int
    stored_blocks: int
    timed_blocks: int
    removals: dict[int, int]
    resident_ages: list[int]


class PromptUses:
    """The uses of all workers' blocks; the index gives it.

    Args:
        columns: the index's own, by worker id.
    """

    __slots__ = ("_columns", "_core", "_hasher", "_planes")

    def __init__(
        self, core: IndexCore, planes: Planes, hasher: BlockKeyHasher, columns: Mapping[str, WorkerColumn]
    ) -> None:
        self._core = core
        self._planes = planes
        self._hasher = hasher
        self._columns = columns

    def touch(
        self, worker_id: str, token_ids: Sequence[int], *, fresh_blocks: int = 0, extras: RequestExtras = NO_EXTRAS
    ) -> int:
        """A worker used a prompt's blocks: its first token came, or the answer ended and its blocks are free.

        Those that it holds count as just used, in the fleet's stamps and by the worker's own clock.

        Args:
            worker_id: which.
            token_ids: the prompt.
            fresh_blocks: number of its first block that was computed there, not found.
            extras: LoRA, images, salt: part of what a block's content is.

        Returns:
            How many of the blocks it holds; 0 while its block size is unknown.

        Raises:
            IndexStateError: no such worker.

        Cost: hashing the prompt, and natively 5-20 ns a block.
        """
        column = self._column(worker_id)
        matcher = self.matcher(column, token_ids, extras)
        return 0 if matcher is None else self._core.touch(column.number, matcher.all_keys(), fresh_blocks)

    def idle_parts(
        self, token_ids: Sequence[int], hit_blocks: Mapping[str, int], *, extras: RequestExtras = NO_EXTRAS
    ) -> dict[str, tuple[IdlePart, ...]]:
        """How long what workers hold of a prompt went without use.

        Args:
            token_ids: the prompt.
            hit_blocks: worker id -> leading blocks it holds.
            extras: as for `touch`.

        Returns:
            worker id -> the parts of its hit, front first; none where nothing is known of any of its blocks. Blocks
            before the first one with a time begin many prompts and are in steady use: their age is 0.

        Raises:
            IndexStateError: no such worker.

        Cost: hashing the prompt once for each block size and model, natively 2-5 ns for each of the blocks.
        """
        matchers: dict[tuple[int | None, int], PromptMatcher | None] = {}
        parts = {}
        for worker_id, blocks in hit_blocks.items():
            column = self._column(worker_id)
            alike = (column.block_size, column.root_key)
            if alike not in matchers:
                matchers[alike] = self.matcher(column, token_ids, extras)
            matcher = matchers[alike]
            if matcher is not None:
                parts[worker_id] = _parts_of(self._core.chain_uses(column.number, matcher.all_keys(), blocks), blocks)
        return parts

    def age(self, worker_id: str, block_hash: int | bytes) -> int | None:
        """A block's age by the worker's own clock; None when it has no time of its own.

        Args:
            worker_id: which.
            block_hash: the engine's own, as in its events.

        Raises:
            IndexStateError: no such worker.
        """
        number = self._column(worker_id).number
        key = self._core.key_of(number, self._core.handle_numbers([block_hash])[0])
        found = [] if key is None else self._core.chain_uses(number, array("Q", [key]), 1)
        return found[0][1] if found else None

    def counts(self, worker_id: str, sample: int) -> UseCounts:
        """The worker's own clock as it stands, with at most `sample` resident ages. Cost: 10 us and 50 ns for each.

        Raises:
            IndexStateError: no such worker.
        """
        core, number = self._core, self._column(worker_id).number
        clock, timed_blocks = core.use_counts(number)
        return UseCounts(
            clock=clock,
            stored_blocks=core.counts(number)[0],
            timed_blocks=timed_blocks,
            removals=core.use_removals(number),
            resident_ages=core.use_ages(number, sample),
        )

    def matcher(self, column: WorkerColumn, token_ids: Sequence[int], extras: RequestExtras) -> PromptMatcher | None:
        """Of one prompt in one worker's blocks; None while its block size is unknown."""
        if (size := column.block_size) is None:
            return None
        return PromptMatcher(self._core, self._planes, self._hasher, token_ids, extras, size, column.root_key)

    def _column(self, worker_id: str) -> WorkerColumn:
        column = self._columns.get(worker_id)
        if column is None:
            raise IndexStateError(f"no worker {worker_id!r} in the index: nothing is known of its blocks' use")
        return column


def _parts_of(uses: Sequence[tuple[int, int]], blocks: int) -> tuple[IdlePart, ...]:
    """From (position, age) of the blocks of a hit that have a time."""
    if not uses:
        return ()
    starts = [(0, 0), *uses] if uses[0][0] else list(uses)
    ends = [start for start, _ in starts[1:]] + [blocks]
    return tuple(IdlePart(end - start, age) for (start, age), end in zip(starts, ends, strict=True))
