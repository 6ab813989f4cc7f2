"""How long a worker's blocks go without use: the raw counts, of those removed and of those that stay."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas._native import IndexCore
from kvatlas._native.arguments import TICKS_PER_STAMP

__all__ = ["BLOCKS_PER_STAMP", "RecencyCounts", "read_ages", "read_recency"]

BLOCKS_PER_STAMP = TICKS_PER_STAMP
"""Ages are in stamps: so many blocks, stored by any worker or found for anybody, make every block one stamp older."""


@dataclass(frozen=True, slots=True)
class RecencyCounts:
    """One worker's counts, for its first group on the device.

    Attributes:
        fleet_blocks: blocks stored by all workers and found by all look-ups so far: the clock that ages run on.
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


def read_recency(core: IndexCore, number: int, sample: int) -> RecencyCounts:
    """The counts of one worker, with at most `sample` resident ages. Cost: about 10 ns for each of the sample."""
    return RecencyCounts(
        fleet_blocks=core.ticks,
        stored_blocks=core.counts(number)[0],
        resident_blocks=core.entries(number),
        removal_ages=core.removal_ages(number),
        resident_ages=core.resident_ages(number, sample),
    )


def read_ages(core: IndexCore, number: int, block_hashes: Sequence[int | bytes]) -> list[int | None]:
    """The age in stamps of each block; None where the claim is not certain, or the content not known."""
    return core.ages(number, core.handle_numbers(block_hashes))
