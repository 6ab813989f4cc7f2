"""Survival learnt from removals: made histograms, and watches over an index whose worker evicts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.clock import ManualClock
from kvatlas.events import BlockRemoved, BlockStored
from kvatlas.fleet import FleetRecency, SurvivalCurve
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import BLOCKS_PER_STAMP, PrefixIndex

BLOCK = 4


def bins(**counts: int) -> list[int]:
    """A histogram from `b7=100`: bin 7 has 100 removals."""
    made = [0] * 32
    for name, count in counts.items():
        made[int(name[1:])] = count
    return made


def test_too_few_removals_say_nothing() -> None:
    """Below 100 removals all survives at every age, and there are no quantiles."""
    curve = SurvivalCurve.learn(bins(b3=99), [], 0)
    assert not curve.is_known
    assert [curve.survival(age) for age in (0, 5, 8, 1e9)] == [1.0] * 4
    assert (curve.half_life, curve.removal_age(0.5)) == (None, None)


def test_an_engine_that_evicts_at_one_age() -> None:
    """All blocks go at ages of 64 to 127 stamps: younger ones are safe, older ones gone, half of them by 96."""
    curve = SurvivalCurve.learn(bins(b7=1000), [], 0)
    assert [curve.survival(age) for age in (0, 63.9, 64, 96, 128, 10_000)] == [1.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    assert curve.half_life == 96
    assert curve.removal_age(0.25) == 80


def test_those_that_stay_count() -> None:
    """100 removals at a young age beside 900 blocks that are older: a tenth goes, nine tenths outlive it."""
    curve = SurvivalCurve.learn(bins(b1=100), [1000] * 9, 900)
    assert curve.survival(1) == 1.0
    assert curve.survival(2) == pytest.approx(0.9)
    assert curve.survival(500) == pytest.approx(0.9)
    assert curve.half_life is None
    assert curve.removal_age(0.5) == pytest.approx(1.5)


def test_blocks_that_are_young_still_say_little() -> None:
    """Residents younger than every removal do not soften what happens later."""
    curve = SurvivalCurve.learn(bins(b7=200), [3] * 50, 5000)
    assert (curve.survival(64), curve.survival(128)) == (1.0, 0.0)


@given(
    removed=st.lists(st.integers(0, 500), min_size=32, max_size=32),
    ages=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    resident=st.integers(0, 10_000),
)
def test_survival_never_rises(removed: list[int], ages: list[int], resident: int) -> None:
    """From 1 down, within 0..1, whatever the counts."""
    curve = SurvivalCurve.learn(removed, ages, resident)
    ages_asked = sorted({age for exponent in range(33) for age in (2**exponent - 1, 2**exponent, 1.5 * 2**exponent)})
    shares = [curve.survival(age) for age in ages_asked]
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert sorted(shares, reverse=True) == pytest.approx(shares)


class Evicting:
    """An index whose only worker has room for `capacity` blocks and gives up the oldest."""

    def __init__(self, capacity: int) -> None:
        self.clock = ManualClock()
        self.index = PrefixIndex(BlockKeyHasher(1))
        self.index.add_worker("w", block_size=BLOCK)
        self.fleet = FleetRecency(self.index, self.clock)
        self.watch = self.fleet.watch("w")
        self.capacity = capacity
        self.held: list[int] = []
        self.next_hash = 1

    def store(self, count: int) -> None:
        """Blocks without a parent enter one by one; what does not fit goes."""
        for _ in range(count):
            number = self.next_hash
            self.next_hash += 1
            if len(self.held) == self.capacity:
                self.index.apply("w", BlockRemoved([self.held.pop(0)], medium="GPU"))
            tokens = [number, number >> 8, 7, 7]
            self.index.apply("w", BlockStored([number], None, tokens, BLOCK, medium="GPU"))
            self.held.append(number)

    def wait(self) -> None:
        """Two seconds pass."""
        self.clock.advance(2.0)


def test_without_pressure_nothing_is_taken_off() -> None:
    """A pool that never removed anything keeps every hit whole, however long the queue."""
    engine = Evicting(100_000)
    for _ in range(3):
        engine.store(500)
        engine.wait()
        assert engine.watch.surviving_share(10**6) == 1.0
    assert engine.watch.curve.removals == 0


def test_a_long_queue_pushes_a_hit_out() -> None:
    """The pool turns over in 3,200 blocks: a queue far shorter takes nothing, one twice as long takes all."""
    engine = Evicting(3_200)
    for _ in range(10):
        engine.store(1_000)
        engine.wait()
        engine.watch.surviving_share(1)
    assert engine.watch.curve.is_known
    assert engine.watch.surviving_share(0) == 1.0
    assert engine.watch.surviving_share(500 * BLOCK) == 1.0
    assert engine.watch.surviving_share(6_400 * BLOCK) == pytest.approx(0.0)
    turnover = engine.watch.curve.removal_age(0.5)
    assert turnover is not None
    assert 0.5 < turnover * BLOCKS_PER_STAMP / 3_200 < 2


def test_the_curve_is_read_once_a_second() -> None:
    """Between two looks the index is not asked, and two workers are not looked at within a millisecond."""
    engine = Evicting(200)
    engine.store(1_000)
    engine.watch.surviving_share(1)
    before = engine.watch.curve
    engine.store(1_000)
    engine.watch.surviving_share(1)
    assert engine.watch.curve is before
    engine.wait()
    engine.fleet.next_refresh_s = engine.clock.monotonic_s() + 0.0005
    engine.watch.surviving_share(1)
    engine.clock.advance(0.001)
    assert engine.watch.curve.removals > before.removals


def test_a_new_life_begins_anew() -> None:
    """A worker whose events begin anew has no history."""
    engine = Evicting(200)
    for _ in range(3):
        engine.store(1_000)
        engine.wait()
        assert engine.watch.curve.is_known
    engine.index.purge("w")
    engine.held.clear()
    engine.wait()
    assert not engine.watch.curve.is_known
    assert engine.watch.surviving_share(10**6) == 1.0


def test_old_removals_fade() -> None:
    """When the pool's pace changes, the new ages outweigh the old ones within two turnovers."""
    engine = Evicting(3_000)
    engine.store(10_000)
    engine.wait()
    early = engine.watch.curve.removal_age(0.5)
    engine.capacity = 300
    while len(engine.held) > 300:
        engine.index.apply("w", BlockRemoved([engine.held.pop(0)], medium="GPU"))
    for _ in range(10):
        engine.store(1_000)
        engine.wait()
        late = engine.watch.curve.removal_age(0.5)
    assert early is not None
    assert late is not None
    assert late < early / 4


class Serving(Evicting):
    """Such a worker, whose blocks this router's requests use: prompts of 8 blocks of their own."""

    def serve(self, count: int) -> None:
        """Requests come and end one by one; the blocks of the oldest go, each prompt's end first."""
        for _ in range(count):
            hashes = list(range(self.next_hash, self.next_hash + 8))
            self.next_hash += 8
            if len(self.held) == self.capacity:
                gone, self.held = self.held[:8], self.held[8:]
                self.index.apply("w", BlockRemoved(gone[::-1], medium="GPU"))
            tokens = self.prompt(hashes[0])
            self.index.apply("w", BlockStored(hashes, None, tokens[:-1], BLOCK, medium="GPU"))
            self.index.uses.touch("w", tokens)
            self.held += hashes

    def prompt(self, first: int) -> list[int]:
        """The prompt whose first block has that hash."""
        return [first + i for i in range(8 * BLOCK)] + [0]

    def share(self, first: int, queued_blocks: int) -> float:
        """The surviving share of the hit of an earlier prompt."""
        parts = self.index.uses.idle_parts(self.prompt(first), {"w": 8})["w"]
        return self.watch.surviving_share(queued_blocks * BLOCK, parts)


def test_the_age_of_a_hit_counts() -> None:
    """A pool of 1,600 blocks: behind a queue of 400 the hit that is next to go is lost, and one just used is whole."""
    engine = Serving(1_600)
    for _ in range(8):
        engine.serve(100)
        engine.wait()
        engine.watch.surviving_share(1)
    assert engine.watch.own_curve.is_known
    assert engine.watch.wants_parts(1)
    assert not engine.watch.wants_parts(0)
    oldest, newest, middle = engine.held[0], engine.held[-8], engine.held[800]
    assert engine.share(newest, 400) == 1.0
    assert engine.share(middle, 400) == 1.0
    assert engine.share(oldest, 400) == pytest.approx(0.0, abs=0.05)
    assert engine.share(middle, 1_200) == pytest.approx(0.0, abs=0.05)
    assert engine.share(oldest, 0) == 1.0
    assert engine.watch.surviving_share(400 * BLOCK) == 1.0  # without parts it counts as just used


def test_curves_survive_a_restart() -> None:
    """A warm start knows the curves at once, from the removals a snapshot tells."""
    engine = Serving(1_600)
    engine.serve(1_000)
    index = PrefixIndex(BlockKeyHasher(1))
    index.add_worker("w")
    before = engine.index
    index.restore("w", before.dump_state("w"), before.dump_blocks("w"), before.planes)
    watch = FleetRecency(index, engine.clock).watch("w")
    assert watch.curve.removed == engine.watch.curve.removed
    assert watch.own_curve.removals == engine.watch.own_curve.removals > 1_000
    assert watch.own_curve.half_life == pytest.approx(engine.watch.own_curve.half_life, rel=0.01)
