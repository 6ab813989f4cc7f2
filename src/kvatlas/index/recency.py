"""How long a worker's blocks go without use: the raw counts, of those removed and of those that stay."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas._native import IndexCore
from kvatlas._native.arguments import TICKS_PER_STAMP

__all__ = ["BLOCKS_PER_STAMP", "RecencyBooks", "RecencyCounts"]

BLOCKS_PER_STAMP = TICKS_PER_STAMP
"""Ages are in stamps: so many blocks, stored or used by any worker or found for anybody, make every block one older."""


@dataclass(frozen=True, slots=True)
class RecencyCounts:
    """One worker's counts, for its first group on the device.

    Attributes:
        fleet_blocks: blocks stored and used by all workers and found by all look-ups so far: the clock ages run on.
        stored_blocks: blocks this worker stored so far.
        resident_blocks: blocks it has books on now.
        removal_ages: int[32], blocks it removed in this life by age in stamps: bin 0 for 0, bin i for 2^(i-1) to
            2^i - 1.
        resident_ages: ages in stamps of some of the blocks it holds, spread evenly.
    """

    fleet_blocks: int
    stored_blocks: int
    resident_blocks: int
    removal_ages: tuple[int, ...]
    resident_ages: list[int]


class RecencyBooks:
    """The ages of one worker's blocks in the core; valid while the worker is in the index."""

    __slots__ = ("_core", "_number")

    def __init__(self, core: IndexCore, number: int) -> None:
        self._core = core
        self._number = number

    def counts(self, sample: int) -> RecencyCounts:
        """The counts as they stand, with at most `sample` resident ages. Cost: about 100 ns for each of the sample."""
        core, number = self._core, self._number
        return RecencyCounts(
            fleet_blocks=core.ticks,
            stored_blocks=core.counts(number)[0],
            resident_blocks=core.entries(number),
            removal_ages=core.removal_ages(number),
            resident_ages=core.resident_ages(number, sample),
        )

    def ages(self, block_hashes: Sequence[int | bytes]) -> list[int | None]:
        """How long blocks went without use, in stamps; None where the worker does not surely hold one of known content.

        Args:
            block_hashes: the engine's own, as in its events.
        """
        return self._core.ages(self._number, self._core.handle_numbers(block_hashes))
