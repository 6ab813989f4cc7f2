"""Block sizes that follow from groups, and configurations that would end an engine."""

import pytest

from kvatlas.errors import ConfigError
from kvatlas.prefix_cache import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    resolve_block_sizes,
)


def groups(*specs):
    return tuple(KVCacheGroup(spec) for spec in specs)


def config(*specs, **settings):
    settings = {"num_blocks": 5, "hash_block_size": 4, "max_model_len": 100, **settings}
    return KVCacheConfig(groups=groups(*specs), **settings)


FULL, WINDOW = FullAttentionSpec(4), SlidingWindowSpec(4, 8)


@pytest.mark.parametrize(
    ("specs", "settings", "sizes"),
    [
        ((FullAttentionSpec(16),), {}, (16, 16)),
        ((FullAttentionSpec(16),), {"dcp_world_size": 2}, (32, 32)),
        ((MambaSpec(16),), {"dcp_world_size": 2}, (16, 16)),
        ((FullAttentionSpec(16),), {"prefix_match_unit": 16}, (16, 16)),
        ((FullAttentionSpec(16),), {"prefix_match_unit": 8, "hashing": False}, (16, 16)),
        ((FullAttentionSpec(8), FULL), {}, (8, 4)),
        ((FullAttentionSpec(8), SlidingWindowSpec(12, 8)), {}, (24, 4)),
        ((FullAttentionSpec(8), FULL), {"hashing": False}, (8, 8)),
        ((FullAttentionSpec(16), MambaSpec(32)), {"prefix_match_unit": 8}, (32, 8)),
        ((FullAttentionSpec(16), MambaSpec(96, "none")), {}, (96, 96)),
        ((FullAttentionSpec(16), CircularBufferSpec(6)), {}, (48, 16)),
        ((CircularBufferSpec(4), CircularBufferSpec(6)), {}, (12, 2)),
        ((FULL, MambaSpec(8)), {"dcp_world_size": 4}, (16, 8)),
        ((MLAAttentionSpec(16, tokens_per_state=4), SlidingWindowSpec(8, 8)), {}, (16, 8)),
    ],
)
def test_block_sizes(specs, settings, sizes):
    """Scheduler and hash block sizes as an engine derives them: least common multiple, greatest common divisor."""
    assert resolve_block_sizes(groups(*specs), **settings) == sizes


@pytest.mark.parametrize(
    ("specs", "unit", "message"),
    [
        ((FullAttentionSpec(16),), 8, "must be unset or 16"),
        ((FullAttentionSpec(16), FullAttentionSpec(8)), 16, "must divide every cacheable block size"),
        ((FullAttentionSpec(16, tokens_per_state=4), MambaSpec(16)), 2, "one state for 4 tokens"),
    ],
)
def test_block_sizes_that_cannot_be(specs, unit, message):
    """A match unit that does not fit the groups is refused, with what would."""
    with pytest.raises(ConfigError, match=message):
        resolve_block_sizes(groups(*specs), prefix_match_unit=unit)


@pytest.mark.parametrize(
    ("specs", "settings", "partial"),
    [
        ((FullAttentionSpec(8), MambaSpec(8)), {}, True),
        ((FullAttentionSpec(8), MambaSpec(8)), {"hash_block_size": 8}, False),
        ((FULL, MambaSpec(8)), {"hash_block_size": 8, "dcp_world_size": 2}, True),
        ((FULL, MambaSpec(4)), {"hash_block_size": 4}, False),
        ((FullAttentionSpec(8), MambaSpec(8, "none")), {}, False),
        ((FullAttentionSpec(8), SlidingWindowSpec(8, 8)), {}, False),
        ((WINDOW, MambaSpec(8)), {}, True),
        ((SlidingWindowSpec(8, 8), MambaSpec(8)), {}, False),
        ((FULL, MambaSpec(8), CircularBufferSpec(5)), {}, True),
        ((FULL, MambaSpec(8)), {"enable_caching": False}, False),
    ],
)
def test_where_hits_may_end_inside_a_block(specs, settings, partial):
    """Only with fine hashes under Mamba blocks, and only if every cacheable group can."""
    made = config(*specs, **settings)
    assert made.partial_hits is partial
    assert made.hit_alignment_tokens == (made.hash_block_size if partial else made.scheduler_block_size)


@pytest.mark.parametrize(
    ("specs", "settings", "message"),
    [
        ((FULL,), {"retention_interval": 8}, "has no effect without"),
        ((WINDOW,), {"retention_interval": 6}, "multiple of the scheduler block size"),
        ((WINDOW,), {"retention_interval": -4}, "multiple of the scheduler block size"),
        ((CrossAttentionSpec(4),), {}, "cannot be cached"),
        ((FULL, ChunkedLocalAttentionSpec(4, 8)), {"use_eagle": True}, "cannot be used with a draft model"),
        ((FullAttentionSpec(8), ChunkedLocalAttentionSpec(4, 8)), {}, "give all groups one block size"),
        ((WINDOW,), {"dcp_world_size": 2}, "set dcp_sharded=False"),
        ((FULL,), {"dcp_world_size": 0}, "dcp_world_size must be at least 1"),
    ],
)
def test_what_would_end_an_engine(specs, settings, message):
    """Assertions an engine meets at its start or its first request are errors of the configuration here."""
    with pytest.raises(ConfigError, match=message):
        config(*specs, **settings)


@pytest.mark.parametrize(
    ("specs", "settings"),
    [
        ((CrossAttentionSpec(4),), {"enable_caching": False}),
        ((WINDOW,), {"dcp_world_size": 2, "enable_caching": False}),
        ((SlidingWindowSpec(4, 8, dcp_sharded=False),), {"dcp_world_size": 2}),
        ((FULL, CircularBufferSpec(3)), {"dcp_world_size": 2}),
        ((FULL, ChunkedLocalAttentionSpec(4, 8)), {}),
        ((FULL,), {"retention_interval": None}),
        ((FULL, MambaSpec(10)), {"enable_caching": False}),
    ],
)
def test_what_is_fine(specs, settings):
    """The same kinds where nothing is looked up, or with settings that fit."""
    assert config(*specs, **settings).groups == groups(*specs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlidingWindowSpec(4, 0), "sliding_window of a SlidingWindowSpec"),
        (lambda: ChunkedLocalAttentionSpec(4, 0), "attention_chunk_size"),
        (lambda: RSWASpec(4, rswa_window=0), "rswa_window"),
        (lambda: SinkFullAttentionSpec(4, sink_len=6), "multiple of block_size"),
        (lambda: MambaSpec(0), "block_size of a MambaSpec"),
        (lambda: FullAttentionSpec(4, tokens_per_state=0), "tokens_per_state"),
    ],
)
def test_sizes_below_one(make, message):
    """Each kind names the size that cannot be."""
    with pytest.raises(ConfigError, match=message):
        make()


def test_kinds_in_events():
    """Names and windows as events carry them."""
    kinds = [
        FULL,
        MLAAttentionSpec(4),
        RSWASpec(4, rswa_window=8),
        SinkFullAttentionSpec(4, sink_len=4),
        WINDOW,
        SlidingWindowMLASpec(4, 8),
        ChunkedLocalAttentionSpec(4, 8),
        MambaSpec(4),
        CrossAttentionSpec(4),
        CircularBufferSpec(4),
    ]
    assert [(spec.kind, spec.published_window) for spec in kinds] == [
        ("full_attention", None),
        ("mla_attention", None),
        ("full_attention", None),
        ("sink_full_attention", None),
        ("sliding_window", 8),
        ("sliding_window_mla", 8),
        ("chunked_local_attention", None),
        ("mamba", None),
        ("cross_attention", None),
        ("unknown", None),
    ]
