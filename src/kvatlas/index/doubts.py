"""Doubts about one worker's claims: when they begin, what the engine's own words do to them, and when they end.

A loss of events may hide removals, so all that was claimed before it is in doubt. It is so until an event announces a
block anew, the engine reports a hit on it, or one turnover has passed: as many blocks stored as the pool holds. An LRU
pool cannot have kept a block that long unless it was used, and a use shows in a report.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas._native import IndexCore
from kvatlas.index.column_state import DoubtState

__all__ = ["DoubtBook", "Healed", "Moment"]

_STORED, _REMOVED, _UNKNOWN_REMOVALS, _RESIDENT, _DOUBTED = 0, 1, 2, 6, 8
_LEAST_TURNOVER_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in a worker's history, to tell later whether something happened since.

    Attributes:
        epoch: changes with every life, clear and loss.
        removals: blocks removed so far.
        stores: blocks stored so far.
    """

    epoch: int
    removals: int
    stores: int


@dataclass(frozen=True, slots=True)
class Healed:
    """What an engine's report changed.

    Attributes:
        confirmed_blocks: doubts that ended.
        adopted_blocks: blocks that no event named and the engine holds.
        refuted_blocks: doubted claims that were wrong.
        placed_blocks: blocks of unknown content that the prompt's digests made known.
    """

    confirmed_blocks: int = 0
    adopted_blocks: int = 0
    refuted_blocks: int = 0
    placed_blocks: int = 0


class DoubtBook:
    """The doubts about one worker.

    Attributes:
        epoch: changes with every life, clear and loss.
        has_business: whether `settle` has anything to do, and whether there may be doubted claims. Cheap to ask.
    """

    __slots__ = (
        "_began_at",
        "_capacity_blocks",
        "_core",
        "_healed_since",
        "_hidden_since",
        "_number",
        "_turnover_blocks",
        "epoch",
        "has_business",
    )

    def __init__(self, core: IndexCore, number: int) -> None:
        self._core = core
        self._number = number
        self._began_at: int | None = None
        self._hidden_since: int | None = None  # blocks stored when the last loss hid stores, until they must be gone
        self._turnover_blocks = 0
        self._healed_since = False
        self._capacity_blocks: int | None = None
        self.epoch = 0
        self.has_business = False

    @property
    def capacity_blocks(self) -> int | None:
        """Blocks in the engine's pool, where it is known; else what it held at the loss counts as one turnover.

        That ends doubts sooner and so claims less; what the loss hid is then never known to be gone.
        """
        return self._capacity_blocks

    @capacity_blocks.setter
    def capacity_blocks(self, blocks: int) -> None:
        if blocks != self._capacity_blocks:
            self._capacity_blocks = blocks
            self._look_for_business()

    @property
    def is_pending(self) -> bool:
        """Whether a loss is less than one turnover ago."""
        return self._began_at is not None

    @property
    def doubted_blocks(self) -> int:
        """Blocks in doubt now."""
        return self._core.counts(self._number)[_DOUBTED]

    def state(self) -> DoubtState:
        """What a snapshot keeps of it."""
        return DoubtState(self._began_at, self._turnover_blocks, self._capacity_blocks, self.epoch, self._hidden_since)

    def restore(self, state: DoubtState) -> None:
        """Go on as a snapshot says; the core has the blocks already."""
        self._began_at = state.began_at
        self._turnover_blocks = state.turnover_blocks
        self._capacity_blocks = state.capacity_blocks
        self._hidden_since = state.hidden_since
        self.epoch = state.epoch
        self._look_for_business()

    def begin(self) -> None:
        """Events are lost: all that is claimed is in doubt. Cost: O(blocks of the worker)."""
        counts = self._core.counts(self._number)
        self._turnover_blocks = max(self._turnover_blocks, counts[_RESIDENT], _LEAST_TURNOVER_BLOCKS)
        nothing_new = self._began_at == counts[_STORED] and not self._healed_since
        self._began_at = self._hidden_since = counts[_STORED]
        self._healed_since = False
        self.has_business = True
        self.epoch += 1
        if not nothing_new:  # a burst of losses is one sweep
            self._core.doubt(self._number)

    def end(self) -> None:
        """The worker is known to be empty, or another life: nothing old is left to doubt."""
        self._began_at = self._hidden_since = None
        self._turnover_blocks = 0
        self._look_for_business()
        self.epoch += 1

    def settle(self) -> bool:
        """End what one turnover ends. Call it after events were applied.

        Returns:
            Whether all that a loss hid is gone just now: one turnover of a pool of known size has passed.

        Cost: O(1), and O(blocks of the worker) once in a turnover.
        """
        if not self.has_business:
            return False
        stored = self._core.counts(self._number)[_STORED]
        turnover = self._capacity_blocks or self._turnover_blocks
        if self._core.reported(self._number) and stored > turnover:
            self._core.expire_reported(self._number, stored - turnover)
            self._look_for_business()
        if self._began_at is not None and stored - self._began_at >= turnover:
            self._core.settle(self._number)
            self._began_at = None
            self._look_for_business()
        if self._hidden_since is None or not self._capacity_blocks or stored - self._hidden_since < turnover:
            return False
        self._hidden_since = None
        self._look_for_business()
        return True

    def _look_for_business(self) -> None:
        hiding = self._hidden_since is not None and self._capacity_blocks is not None
        pending = self._began_at is not None or hiding
        self.has_business = pending or self._core.reported(self._number) > 0 or self.doubted_blocks > 0

    def moment(self) -> Moment:
        """Now."""
        counts = self._core.counts(self._number)
        return Moment(self.epoch, counts[_REMOVED] + counts[_UNKNOWN_REMOVALS], counts[_STORED])

    def heal(self, block_keys: Sequence[int], cached_blocks: int, sent: Moment, *, placed_blocks: int = 0) -> Healed:
        """Take an engine's count of cached blocks for its word.

        Args:
            block_keys: the prompt's chain, as far as it was claimed or is cached.
            cached_blocks: how many of them the engine had when the request came.
            sent: when it was sent. A report from before a loss or a clear says nothing any more; after removals since,
                blocks that no event named are adopted in doubt only.
            placed_blocks: passed on.
        """
        now = self.moment()
        if sent.epoch != now.epoch:
            return Healed(placed_blocks=placed_blocks)
        self._turnover_blocks = max(self._turnover_blocks, self._core.counts(self._number)[_RESIDENT])
        self._healed_since = True
        certain = sent.removals == now.removals
        confirmed, adopted = self._core.confirm(self._number, block_keys[:cached_blocks], certain=certain)
        refuted = self._core.refute(self._number, block_keys[cached_blocks:])
        self._look_for_business()
        return Healed(confirmed, adopted, refuted, placed_blocks)
