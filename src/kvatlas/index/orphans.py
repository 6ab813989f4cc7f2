"""Runs of blocks whose parent is not known yet: kept, within bounds, until its key is."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvatlas.hashing import BlockExtras

__all__ = ["OrphanPool", "Run"]

_WORD_BYTES = 8
_FEW_BLOCKS = 1024
_RUN_BYTES = 400  # measured: the objects of one run, its place in the pool


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of one store event.

    Attributes:
        numbers: their handles.
        token_ids: len(numbers) * units * unit_tokens ids.
        extras: one for each unit.
        unit_tokens: tokens that one block key covers.
        units: of a block.
    """

    numbers: "array[int]"
    token_ids: Sequence[int]
    extras: tuple[BlockExtras, ...]
    unit_tokens: int
    units: int = 1


class OrphanPool:
    """Waiting runs of one worker, by the handle they wait for.

    Args:
        max_blocks: how many blocks may wait; beyond it the oldest wait ends and is counted.
        charge: counts bytes held, more or fewer; says no when there is no room for more.
    """

    __slots__ = ("_charge", "_max_blocks", "_waiting", "blocks_now", "dropped_blocks", "waited_blocks")

    def __init__(self, max_blocks: int, charge: Callable[[int], bool]) -> None:
        self._max_blocks = max_blocks
        self._charge = charge
        self._waiting: OrderedDict[int, list[Run]] = OrderedDict()
        self.blocks_now = 0
        self.waited_blocks = 0
        """Blocks that ever waited."""
        self.dropped_blocks = 0
        """Blocks whose wait was ended for want of room."""

    @property
    def may_wait_in_vain(self) -> bool:
        """Whether so many blocks wait that it is worth a look how many of them are resident still."""
        return self.blocks_now > _FEW_BLOCKS

    def limit_for(self, resident: int) -> int:
        """How many blocks should go on waiting, when so many blocks without a key are resident.

        Nobody tells the pool of removals: of twice as many, half wait in vain. The oldest are given up, as an LRU pool
        does.
        """
        return self.blocks_now if self.blocks_now <= 2 * resident + _FEW_BLOCKS else resident + _FEW_BLOCKS // 2

    def __contains__(self, handle: object) -> bool:
        """Whether somebody waits for a handle."""
        return handle in self._waiting

    def add(self, parent: int, run: Run) -> list[int]:
        """Have a run wait for a handle.

        Returns:
            Handles that nobody waits for any more, since the pool was full.
        """
        self.waited_blocks += len(run.numbers)
        if not self._charge(_held_bytes(run)):
            self.dropped_blocks += len(run.numbers)
            return [] if parent in self._waiting else [parent]
        self._waiting.setdefault(parent, []).append(run)
        self.blocks_now += len(run.numbers)
        return self.shrink(self._max_blocks)

    def shrink(self, max_blocks: int) -> list[int]:
        """End the oldest waits until at most `max_blocks` wait. Returns the handles nobody waits for any more."""
        given_up = []
        while self.blocks_now > max_blocks:
            parent, dropped = self._waiting.popitem(last=False)
            for run in dropped:
                self.dropped_blocks += len(run.numbers)
                self._gone(run)
            given_up.append(parent)
        return given_up

    def take(self, parent: int) -> list[Run]:
        """The runs that wait for a handle; they no longer do."""
        runs = self._waiting.pop(parent, [])
        for run in runs:
            self._gone(run)
        return runs

    def restore(self, waited_blocks: int, dropped_blocks: int) -> None:
        """Go on from a snapshot, which keeps counts and no runs."""
        self.waited_blocks = waited_blocks
        self.dropped_blocks = dropped_blocks

    def clear(self) -> None:
        """Forget all of them."""
        for runs in self._waiting.values():
            for run in runs:
                self._gone(run)
        self._waiting.clear()

    def _gone(self, run: Run) -> None:
        self.blocks_now -= len(run.numbers)
        self._charge(-_held_bytes(run))


def _held_bytes(run: Run) -> int:
    return _RUN_BYTES + _WORD_BYTES * (len(run.token_ids) + len(run.numbers))
