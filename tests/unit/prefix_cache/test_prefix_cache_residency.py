"""Life, idleness and reuse of blocks, measured on a clock that stands still until it is told to move."""

import pytest

from kvatlas.clock import ManualClock
from kvatlas.errors import ConfigError
from kvatlas.prefix_cache import BlockResidency, FullAttentionSpec, ResidencyMetrics
from support.prefix_cache_groups import Cache

FULL = FullAttentionSpec(4)


@pytest.fixture
def clock():
    return ManualClock()


def test_life_of_a_block(clock):
    """Born when handed out, accessed by hits, ended when handed out again."""
    metrics = ResidencyMetrics(clock, 1.0)
    cache = Cache(FULL, num_blocks=3, residency=metrics)
    cache.manager.free(cache.run("a", range(5)))
    for _ in range(2):
        clock.advance(3)
        cache.manager.free(cache.run("b", range(5)))
    clock.advance(2)
    assert [life.lifetime_s for life in metrics.take()] == [3, 3]  # the second block, blank, handed out anew each time
    cache.run("c", range(10, 18))
    assert sorted(metrics.take(), key=lambda life: life.lifetime_s) == [
        BlockResidency(lifetime_s=2, idle_s=2, reuse_gaps_s=()),
        BlockResidency(lifetime_s=8, idle_s=2, reuse_gaps_s=(3,)),
    ]
    assert metrics.take() == []


def test_only_the_latest_accesses_are_kept(clock):
    """Of many hits the gaps between the last four remain."""
    metrics = ResidencyMetrics(clock, 1.0)
    metrics.allocated(1)
    for gap in (1, 2, 3, 4, 5, 6):
        clock.advance(gap)
        metrics.accessed(1)
    metrics.evicted(1)
    assert metrics.take() == [BlockResidency(lifetime_s=21, idle_s=0, reuse_gaps_s=(4, 5, 6))]


def test_sampling(clock):
    """A fraction of the allocations is followed, the same one for the same seed."""
    followed = []
    for _ in range(2):
        metrics = ResidencyMetrics(clock, 0.1, seed=7)
        for block_id in range(1000):
            metrics.allocated(block_id)
            metrics.evicted(block_id)
        followed.append(len(metrics.take()))
    assert followed[0] == followed[1]
    assert 60 < followed[0] < 140


def test_eviction_of_bad_blocks_ends_a_life(clock):
    """Blocks evicted by id end too, in use or not; blocks that are not followed are no matter."""
    metrics = ResidencyMetrics(clock, 1.0)
    cache = Cache(FULL, residency=metrics)
    cache.run("a", range(5))
    cache.manager.evict_blocks([1, 50])
    assert len(metrics.take()) == 1
    metrics.accessed(1)
    metrics.evicted(1)
    assert metrics.take() == []


def test_a_reset_forgets_lives(clock):
    """Lives under way and lives that ended are forgotten with the cache."""
    metrics = ResidencyMetrics(clock, 1.0)
    cache = Cache(FULL, num_blocks=3, residency=metrics)
    for request_id in "ab":
        cache.manager.free(cache.run(request_id, range(9 if request_id == "a" else 5)[:5]))
    assert cache.manager.reset_prefix_cache()
    assert metrics.take() == []
    cache.run("c", range(50, 58))
    assert metrics.take() == []


def test_without_caching_lives_do_not_end(clock):
    """With caching off nothing is evicted: a block handed out again starts anew."""
    metrics = ResidencyMetrics(clock, 1.0)
    cache = Cache(FULL, num_blocks=3, residency=metrics, enable_caching=False)
    for request_id in "ab":
        cache.manager.free(cache.run(request_id, range(5)))
    assert metrics.take() == []


@pytest.mark.parametrize("rate", [0, 1.5, -0.1])
def test_rates(clock, rate):
    """A rate is above 0 and at most 1."""
    with pytest.raises(ConfigError, match="sample_rate"):
        ResidencyMetrics(clock, rate)
