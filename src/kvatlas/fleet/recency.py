"""How likely a worker still holds, in a while, what it holds now: survival by age, learnt from what it removed.

Engines give up the block longest without use. Each removal tells at which age blocks go, and from the ages at removal
and the ages of those that stay follows the share of blocks that live past an age (`SurvivalCurve`).

There are two clocks. The worker's own counts what it stored and what its requests used; ages by it model the order of
its free queue, and it knows requests that this router sent (`kvatlas.index.uses`). The other is the whole fleet's: it
has a stamp for every block, and a block that was looked up for a request which then went elsewhere seems younger than
its engine has it. What the first cannot tell yet, the second does.
"""

from collections.abc import Mapping, Sequence

from kvatlas.clock import Clock
from kvatlas.fleet.survival import STAMP_AGE_STARTS, SurvivalCurve
from kvatlas.index import BLOCKS_PER_STAMP, USE_AGE_STARTS, IdlePart, PrefixIndex, RecencyCounts, UseCounts

__all__ = ["FleetRecency", "RecencyWatch"]

_SAMPLE = 256
_REFRESH_S = 1.0
_REFRESH_SPACING_S = 0.001
"""Between two workers' refreshes, so that no request pays for those of a thousand workers."""
_LEAST_HALF_LIFE_BLOCKS = 1000
_LEAST_HALF_LIFE_USES = 200
_FORGOTTEN = 0.01
"""Of so many removals of a bin nothing is kept."""
_MIN_STORED = 100
"""Fewer blocks stored say nothing about the pace of a clock."""


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


class _Ages:
    """What one clock tells of removals. Old ones fade, so that the curve follows the load within a turnover or two.

    They count half once as many blocks were removed as there are, at least `least_half_life`.
    """

    __slots__ = ("_least_half_life", "_passed", "_removed", "_starts", "_stored", "curve", "pace")

    def __init__(self, starts: tuple[int, ...], least_half_life: int) -> None:
        self._starts = starts
        self._least_half_life = least_half_life
        self.start_anew()

    def start_anew(self) -> None:
        self._removed: dict[int, float] = {}
        self._passed = self._stored = 0.0
        self.pace = 0.0
        """By how much the clock moves while the worker stores one block; 0 while that is not known."""
        self.curve = SurvivalCurve()

    def learn(self, removed: Mapping[int, int], passed: float, stored: int, ages: Sequence[int], blocks: int) -> None:
        """Take in removals by bin, by how much the clock moved, blocks stored; and `ages` of the `blocks` there are."""
        fade: float = 0.5 ** (sum(removed.values()) / max(self._least_half_life, blocks))
        faded = {age_bin: fade * count for age_bin, count in self._removed.items() if count > _FORGOTTEN}
        self._removed = {age_bin: faded.get(age_bin, 0.0) + removed.get(age_bin, 0) for age_bin in {*faded, *removed}}
        self._passed = fade * self._passed + passed
        self._stored = fade * self._stored + stored
        self.pace = self._passed / self._stored if self._stored >= _MIN_STORED else 0.0
        if self._removed:  # and one bin more for those who outlive all that
            bins = range(min(self._removed), min(max(self._removed) + 2, len(self._starts)))
            counts = [self._removed.get(age_bin, 0.0) for age_bin in bins]
            self.curve = SurvivalCurve.learn(counts, ages, blocks, self._starts[bins.start : bins.stop])

    def surviving(self, age: float, stored_blocks: float) -> float:
        """The share of blocks of an age that are still there once the worker stored so many more."""
        now = self.curve.survival(age)
        return self.curve.survival(age + stored_blocks * self.pace) / now if now else 0.0


class RecencyWatch:
    """One worker's curves, looked at once a second at most, and what they say of a hit that has to wait.

    A worker that begins a new life begins new curves.
    """

    __slots__ = (
        "_clock",
        "_fleet",
        "_index",
        "_last",
        "_last_uses",
        "_next_s",
        "_own",
        "_stamps",
        "_worker_id",
    )

    def __init__(self, fleet: FleetRecency, index: PrefixIndex, clock: Clock, worker_id: str) -> None:
        self._fleet = fleet
        self._index = index
        self._clock = clock
        self._worker_id = worker_id
        self._stamps = _Ages(STAMP_AGE_STARTS, _LEAST_HALF_LIFE_BLOCKS)
        self._own = _Ages(USE_AGE_STARTS, _LEAST_HALF_LIFE_USES)
        self._last: RecencyCounts | None = None
        self._last_uses: UseCounts | None = None
        self._next_s = -1.0

    @property
    def curve(self) -> SurvivalCurve:
        """By ages in the fleet's stamps, brought up to date if it is more than a second old."""
        self._look()
        return self._stamps.curve

    @property
    def own_curve(self) -> SurvivalCurve:
        """By ages on the worker's own clock, of blocks that requests used; as fresh as `curve`."""
        self._look()
        return self._own.curve

    def wants_parts(self, queued_tokens: int) -> bool:
        """Whether `surviving_share` makes use of how long a hit's parts went without use. Cost: 0.3 us."""
        return queued_tokens > 0 and self._own.curve.is_known

    def surviving_share(self, queued_tokens: int, parts: Sequence[IdlePart] = ()) -> float:
        """The share of a hit that is looked up now and still there once `queued_tokens` before it are computed.

        Args:
            queued_tokens: of requests that the worker serves before.
            parts: the hit's, as the index tells them; without them its blocks count as just used, by the fleet's
                stamps.

        Returns:
            0..1; 1.0 while removals are too few to know, and without a queue.

        Cost: 1 us, 1 us for each part, and every second, at most once a millisecond for the whole fleet, a refresh.
        """
        if queued_tokens <= 0:
            return 1.0
        now_s = self._clock.monotonic_s()
        if now_s >= self._next_s and now_s >= self._fleet.next_refresh_s:
            self.refresh()
        block_size = self._index.block_size(self._worker_id)
        if block_size is None:
            return 1.0
        stored_blocks = queued_tokens / block_size
        if not parts or not self._own.curve.is_known:
            return self._stamps.surviving(0, stored_blocks)
        staying = sum(part.blocks * self._own.surviving(part.age, stored_blocks) for part in parts)
        return staying / sum(part.blocks for part in parts)

    def _look(self) -> None:
        if self._clock.monotonic_s() >= self._next_s:
            self.refresh()

    def refresh(self) -> None:
        """Read the worker's counts and learn from what is new in them. Cost: about 150 us."""
        now_s = self._clock.monotonic_s()
        self._next_s = now_s + _REFRESH_S
        self._fleet.next_refresh_s = now_s + _REFRESH_SPACING_S
        counts = self._index.recency(self._worker_id).counts(_SAMPLE)
        uses = self._index.uses.counts(self._worker_id, _SAMPLE)
        last, last_uses = self._last, self._last_uses
        self._last, self._last_uses = counts, uses
        if last is not None and any(new < old for new, old in zip(counts.removal_ages, last.removal_ages, strict=True)):
            last = last_uses = None  # its counts began anew, and so did its cache
            self._stamps.start_anew()
            self._own.start_anew()
        self._learn_stamps(counts, last)
        self._learn_uses(uses, last_uses)

    def _learn_stamps(self, counts: RecencyCounts, last: RecencyCounts | None) -> None:
        before = last.removal_ages if last else (0,) * len(counts.removal_ages)
        fresh = {
            i: new - old for i, (new, old) in enumerate(zip(counts.removal_ages, before, strict=True)) if new > old
        }
        stamps = (counts.fleet_blocks - last.fleet_blocks) / BLOCKS_PER_STAMP if last else 0.0
        stored = counts.stored_blocks - last.stored_blocks if last else 0
        self._stamps.learn(fresh, stamps, stored, counts.resident_ages, counts.resident_blocks)

    def _learn_uses(self, uses: UseCounts, last: UseCounts | None) -> None:
        before = last.removals if last else {}
        fresh = {age_bin: max(0, count - before.get(age_bin, 0)) for age_bin, count in uses.removals.items()}
        passed = uses.clock - last.clock if last else 0
        stored = uses.stored_blocks - last.stored_blocks if last else 0
        self._own.learn(fresh, passed, stored, uses.resident_ages, uses.timed_blocks)
