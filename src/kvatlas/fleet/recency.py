"""How likely a worker still holds, in a while, what it holds now: survival by age, learnt from what it removed.

Engines give up the block longest without use. The index knows about when each block was last of use, so each removal
tells at which age blocks go. From the ages at removal and the ages of those that stay follows the share of blocks that
live past an age, as in any study of lives where some are still alive at its end.

Ages are in stamps of the whole fleet (see `kvatlas.index.recency`): a block that was looked up for a request which then
went elsewhere seems younger than its engine has it. So an age at removal is at most what the engine waited, and a
worker without removals has no curve at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.clock import Clock
from kvatlas.index import BLOCKS_PER_STAMP, PrefixIndex, RecencyCounts

__all__ = ["FleetRecency", "RecencyWatch", "SurvivalCurve"]

_MIN_REMOVALS = 100
"""Fewer prove nothing about ages."""
_SAMPLE = 256
_REFRESH_S = 1.0
_REFRESH_SPACING_S = 0.001
"""Between two workers' refreshes, so that no request pays for those of a thousand workers."""
_LEAST_HALF_LIFE_BLOCKS = 1000


@dataclass(frozen=True, slots=True)
class SurvivalCurve:
    """The share of a worker's blocks that live past an age.

    Attributes:
        removals: how many removals it rests on, older ones counting less.
        removed: float[bins], those by age: bin 0 is age 0, bin i ages from 2^(i-1) to 2^i - 1.
        alive: float[bins], the share that outlives the bin. Never rises. All 1.0 while removals are too few.
    """

    removals: float
    removed: tuple[float, ...]
    alive: tuple[float, ...]

    @classmethod
    def learn(cls, removed: Sequence[float], resident_ages: Sequence[int], resident_blocks: int) -> "SurvivalCurve":
        """The curve of some removals and of those that stay.

        Args:
            removed: removals by age, in bins as above.
            resident_ages: ages of a sample of the resident blocks; they outlived these ages and say nothing beyond.
            resident_blocks: how many blocks the sample stands for.

        Cost: about 20 us.
        """
        total = sum(removed)
        bins = len(removed)
        if total < _MIN_REMOVALS:
            return cls(total, tuple(removed), (1.0,) * bins)
        staying = [0.0] * bins
        weight = resident_blocks / len(resident_ages) if resident_ages else 0.0
        for age in resident_ages:
            staying[min(age.bit_length(), bins - 1)] += weight
        alive, share = [], 1.0
        at_risk = total + sum(staying)
        for gone, left in zip(removed, staying, strict=True):
            at_risk -= left  # not known to outlive this bin: the engine may remove its older half
            if gone:
                share *= max(0.0, 1.0 - gone / max(at_risk, gone))
            alive.append(share)
            at_risk -= gone
        return cls(total, tuple(removed), tuple(alive))

    @property
    def is_known(self) -> bool:
        """Whether there were removals enough to say anything."""
        return self.removals >= _MIN_REMOVALS

    def survival(self, age: float) -> float:
        """The share of blocks that live past an age in stamps (>= 0), 0..1. Cost: 0.5 us."""
        bin_number = min(int(age).bit_length(), len(self.alive) - 1)
        start = self.alive[bin_number - 1] if bin_number else 1.0
        end = self.alive[bin_number]
        if start == end:
            return start
        low = 1 << bin_number >> 1 if bin_number else 0  # and the bin is as wide as that, or 1
        return start + (end - start) * min(1.0, (age - low) / (low or 1))

    @property
    def half_life(self) -> float | None:
        """The age, in stamps, that half of all blocks outlive; None when more than half outlive every known age."""
        return _crossing([1.0 - share for share in self.alive], 0.5)

    def removal_age(self, share: float) -> float | None:
        """The age, in stamps, below which `share` (0..1) of the removals were; None while there are too few."""
        if not self.is_known:
            return None
        below, risen = 0.0, []
        for count in self.removed:
            below += count
            risen.append(below / self.removals)
        return _crossing(risen, share)


def _bounds(bin_number: int) -> tuple[int, int]:
    """Ages from the first to, not including, the second."""
    return (1 << bin_number >> 1, 1 << bin_number) if bin_number else (0, 1)


def _crossing(rising: Sequence[float], share: float) -> float | None:
    """The age at which what rises over the bins, evenly within each, comes to `share`; None if it never does."""
    before = 0.0
    for bin_number, reached in enumerate(rising):
        if reached >= share and reached > before:
            low, high = _bounds(bin_number)
            return low + (high - low) * max(0.0, share - before) / (reached - before)
        before = reached
    return None


class FleetRecency:
    """Makes the watches of a fleet's workers and keeps their refreshes apart."""

    def __init__(self, index: PrefixIndex, clock: Clock) -> None:
        self._index = index
        self._clock = clock
        self.next_refresh_s = -1.0
        """No watch refreshes before that time."""

    def watch(self, worker_id: str) -> "RecencyWatch":
        """A watch of one worker, which must be in the index whenever the watch is asked."""
        return RecencyWatch(self, self._index, self._clock, worker_id)


class RecencyWatch:
    """One worker's curve, looked at once a second at most, and what it says of a hit that has to wait.

    Old removals fade: they count half once as many blocks were removed as the worker holds, so the curve follows the
    load within a turnover or two. A worker that begins a new life begins a new curve.
    """

    __slots__ = (
        "_clock",
        "_curve",
        "_fleet",
        "_fleet_blocks",
        "_index",
        "_last",
        "_next_s",
        "_removed",
        "_stamps_per_token",
        "_stored_blocks",
        "_worker_id",
    )

    def __init__(self, fleet: FleetRecency, index: PrefixIndex, clock: Clock, worker_id: str) -> None:
        self._fleet = fleet
        self._index = index
        self._clock = clock
        self._worker_id = worker_id
        self._last: RecencyCounts | None = None
        self._next_s = -1.0
        self._start_anew()

    def _start_anew(self) -> None:
        self._removed: tuple[float, ...] = ()
        self._fleet_blocks = self._stored_blocks = 0.0
        self._stamps_per_token = 0.0
        self._curve = SurvivalCurve(0.0, (), (1.0,))

    @property
    def curve(self) -> SurvivalCurve:
        """The curve, brought up to date if it is more than a second old."""
        if self._clock.monotonic_s() >= self._next_s:
            self.refresh()
        return self._curve

    def surviving_share(self, queued_tokens: int) -> float:
        """The share of a hit that is looked up now and still there once `queued_tokens` before it are computed.

        Returns:
            0..1; 1.0 while removals are too few to know, and without a queue.

        Cost: 0.5 to 1 us, and every second, at most once a millisecond for the whole fleet, a refresh.
        """
        if queued_tokens <= 0:
            return 1.0
        now_s = self._clock.monotonic_s()
        if now_s >= self._next_s and now_s >= self._fleet.next_refresh_s:
            self.refresh()
        return self._curve.survival(queued_tokens * self._stamps_per_token)

    def refresh(self) -> None:
        """Read the worker's counts and learn from what is new in them. Cost: about 60 us."""
        now_s = self._clock.monotonic_s()
        self._next_s = now_s + _REFRESH_S
        self._fleet.next_refresh_s = now_s + _REFRESH_SPACING_S
        counts = self._index.recency(self._worker_id, _SAMPLE)
        last, self._last = self._last, counts
        fresh = counts.removal_ages
        if last is not None:
            fresh = tuple(new - old for new, old in zip(fresh, last.removal_ages, strict=True))
            if min(fresh) < 0:  # its counts began anew, and so did its cache
                self._start_anew()
                fresh, last = counts.removal_ages, None
        half_life = max(_LEAST_HALF_LIFE_BLOCKS, counts.resident_blocks)
        fade: float = 0.5 ** (sum(fresh) / half_life)
        before = self._removed or (0.0,) * len(fresh)
        self._removed = tuple(fade * old + new for old, new in zip(before, fresh, strict=True))
        if last is not None:
            self._fleet_blocks = fade * self._fleet_blocks + counts.fleet_blocks - last.fleet_blocks
            self._stored_blocks = fade * self._stored_blocks + counts.stored_blocks - last.stored_blocks
        self._stamps_per_token = self._pace(self._index.block_size(self._worker_id))
        self._curve = SurvivalCurve.learn(self._removed, counts.resident_ages, counts.resident_blocks)

    def _pace(self, block_size: int | None) -> float:
        """Stamps that pass in the fleet while this worker computes one token; 0 while that is not known."""
        if not block_size or self._stored_blocks < _MIN_REMOVALS:
            return 0.0
        return self._fleet_blocks / self._stored_blocks / BLOCKS_PER_STAMP / block_size
