"""The share of a worker's blocks that live past an age, from the ages of those it removed and of those that stay.

As in any study of lives where some are still alive at its end.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["STAMP_AGE_STARTS", "SurvivalCurve"]

STAMP_AGE_STARTS = (0, *(1 << exponent for exponent in range(31)))
"""The least age of each bin of `RecencyCounts.removal_ages`."""
_MIN_REMOVALS = 100
"""Fewer prove nothing about ages."""


@dataclass(frozen=True, slots=True)
class SurvivalCurve:
    """The share of a worker's blocks that live past an age. The unit of ages is whoever's who learns it.

    Attributes:
        removals: how many removals it rests on, older ones counting less.
        removed: float[bins], those by age.
        alive: float[bins], the share that outlives the bin. Never rises. All 1.0 while removals are too few.
        starts: int[bins], the least age of each bin, rising; all outlive what lies before the first.
    """

    removals: float = 0.0
    removed: tuple[float, ...] = ()
    alive: tuple[float, ...] = (1.0,)
    starts: tuple[int, ...] = (0,)

    @classmethod
    def learn(
        cls,
        removed: Sequence[float],
        resident_ages: Sequence[int],
        resident_blocks: int,
        starts: tuple[int, ...] = STAMP_AGE_STARTS,
    ) -> "SurvivalCurve":
        """The curve of some removals and of those that stay.

        Args:
            removed: removals by age, in bins.
            resident_ages: ages of a sample of the resident blocks; they outlived these ages and say nothing beyond.
            resident_blocks: how many blocks the sample stands for.
            starts: the least age of each bin.

        Cost: 60 us for 256 ages.
        """
        total = sum(removed)
        bins = len(removed)
        if total < _MIN_REMOVALS:
            return cls(total, tuple(removed), (1.0,) * bins, starts)
        staying = [0.0] * bins
        weight = resident_blocks / len(resident_ages) if resident_ages else 0.0
        for age in resident_ages:
            staying[max(0, bisect_right(starts, age) - 1)] += weight
        alive, share = [], 1.0
        at_risk = total + sum(staying)
        for gone, left in zip(removed, staying, strict=True):
            at_risk -= left  # not known to outlive this bin: the engine may remove its older half
            if gone:
                share *= max(0.0, 1.0 - gone / max(at_risk, gone))
            alive.append(share)
            at_risk -= gone
        return cls(total, tuple(removed), tuple(alive), starts)

    @property
    def is_known(self) -> bool:
        """Whether there were removals enough to say anything."""
        return self.removals >= _MIN_REMOVALS

    def survival(self, age: float) -> float:
        """The share of blocks that live past an age (>= 0), 0..1. Cost: 0.5 us."""
        bin_number = bisect_right(self.starts, age) - 1
        if bin_number < 0:
            return 1.0
        start = self.alive[bin_number - 1] if bin_number else 1.0
        end = self.alive[bin_number]
        if start == end:
            return start
        low, high = self._bounds(bin_number)
        return start + (end - start) * min(1.0, (age - low) / (high - low))

    @property
    def half_life(self) -> float | None:
        """The age that half of all blocks outlive; None when more than half outlive every known age."""
        return self._crossing([1.0 - share for share in self.alive], 0.5)

    def removal_age(self, share: float) -> float | None:
        """The age below which `share` (0..1) of the removals were; None while there are too few."""
        if not self.is_known:
            return None
        below, risen = 0.0, []
        for count in self.removed:
            below += count
            risen.append(below / self.removals)
        return self._crossing(risen, share)

    def _bounds(self, bin_number: int) -> tuple[int, int]:
        """Ages from the first to, not including, the second; the last bin is as wide as its start, or 1."""
        low = self.starts[bin_number]
        if bin_number + 1 < len(self.starts):
            return low, self.starts[bin_number + 1]
        return low, 2 * low or 1

    def _crossing(self, rising: Sequence[float], share: float) -> float | None:
        """The age at which what rises over the bins, evenly within each, comes to `share`; None if it never does."""
        before = 0.0
        for bin_number, reached in enumerate(rising):
            if reached >= share and reached > before:
                low, high = self._bounds(bin_number)
                return low + (high - low) * max(0.0, share - before) / (reached - before)
            before = reached
        return None
