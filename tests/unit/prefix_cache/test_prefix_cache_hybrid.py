"""Several groups together: the fixed point, alignment, draft models, shared prefixes, context parallelism.

Scenario numbers as in the specification's list, observed on a real vLLM 0.32.0.
"""

import pytest

from kvatlas.errors import ConfigError, PrefixCacheError
from kvatlas.prefix_cache import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheGroup,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from support.prefix_cache_groups import Cache, block_ids, hashed

PROMPT = list(range(100, 130))
SHARES_20 = PROMPT[:20] + list(range(10))
FULL, WINDOW = FullAttentionSpec(4), SlidingWindowSpec(4, 8)


def test_39_the_shorter_group_decides():
    """Scenario 39: with a hole in the full-attention group both groups hit what is before it."""
    cache = Cache(FULL, WINDOW, retention_interval=None)
    cache.run("a", PROMPT)
    assert cache.look_up(PROMPT) == (28, [[1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 0, 14, 15]])
    cache.manager.evict_blocks([5])
    assert cache.look_up(PROMPT) == (16, [[1, 2, 3, 4], [0, 0, 11, 12]])


def test_39_the_window_can_be_the_shorter_one():
    """A hole in the window group shortens full attention's blocks too."""
    cache = Cache(FULL, WINDOW, retention_interval=None)
    cache.run("a", PROMPT)
    cache.manager.evict_blocks([14])
    assert cache.look_up(PROMPT) == (20, [[1, 2, 3, 4, 5], [0, 0, 0, 12, 13]])


def test_40_a_shared_prefix_is_kept_once_it_was_seen():
    """Scenario 40: the second request finds where the prefix ends, the third one hits it."""
    cache = Cache(FULL, WINDOW)
    cache.run("a", PROMPT)
    found = cache.admit(cache.request("b", SHARES_20))
    assert (found.hit_tokens, found.shared_prefix_boundary) == (0, 20)
    assert len(hashed(cache, 1)) == 6
    third = cache.request("c", PROMPT[:20] + [7] * 10)
    found = cache.admit(third)
    assert (found.hit_tokens, found.shared_prefix_boundary) == (20, 0)
    assert block_ids(found) == [[1, 2, 3, 4, 5], [0, 0, 0, 28, 29]]


def test_41_draft_model():
    """Scenario 41, several groups: 30 tokens resent hit 24, not 28."""
    cache = Cache(FULL, WINDOW, use_eagle=True)
    cache.run("a", PROMPT)
    assert cache.look_up(PROMPT) == (24, [[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 13, 14]])


def test_42_different_block_sizes():
    """Scenario 42: each group publishes its own block size, and only whole scheduler blocks are cached."""
    cache = Cache(FullAttentionSpec(8), WINDOW, retention_interval=None)
    assert (cache.config.scheduler_block_size, cache.config.hash_block_size) == (8, 4)
    cache.run("a", PROMPT)
    events = cache.manager.take_events()
    assert [(event.block_size, len(event.block_hashes), len(event.token_ids)) for event in events] == [
        (8, 3, 24),
        (4, 6, 24),
    ]
    assert [event.group_idx for event in events] == [0, 1]
    assert events[0].block_hashes[-1] == events[1].block_hashes[-1]


def test_42_hits_end_where_both_groups_end_a_block():
    """A window that is cached up to 20 tokens is of no use to blocks of 8."""
    cache = Cache(FullAttentionSpec(8), WINDOW, retention_interval=None)
    cache.run("a", PROMPT[:25])
    assert cache.look_up(PROMPT) == (24, [[1, 2, 3], [0, 0, 0, 0, 9, 10]])
    cache.manager.evict_blocks([10])
    assert cache.look_up(PROMPT) == (16, [[1, 2], [0, 0, 7, 8]])


def test_prompt_tail_is_cached_though_nobody_can_hit_it():
    """Where hashes are finer than blocks, full attention also names the block in which the prompt ends."""
    cache = Cache(FullAttentionSpec(8), WINDOW, retention_interval=None)
    request = cache.run("a", PROMPT[:15])
    cache.manager.take_events()
    cache.decode(request, 1)
    full, tail, window = cache.manager.take_events()
    assert (full.block_size, len(full.block_hashes)) == (8, 1)
    assert (tail.block_size, tail.token_ids, tail.group_idx) == (4, PROMPT[8:12], 0)
    assert window.group_idx == 1
    assert cache.look_up(PROMPT[:16])[0] == 8


def test_equal_groups_must_all_hit():
    """Two groups of one kind are looked up as one: what one lost, both lost."""
    cache = Cache(FULL, WINDOW, WINDOW, retention_interval=None)
    request = cache.run("a", PROMPT)
    _, one, two = cache.tables(request)
    assert cache.look_up(PROMPT)[1][1:] == [[0] * 5 + one[5:7], [0] * 5 + two[5:7]]
    cache.manager.evict_blocks([two[5]])
    assert cache.look_up(PROMPT)[0] == 20
    cache.manager.evict_blocks(two)
    assert cache.look_up(PROMPT) == (0, [[], [], []])


def test_a_layout_keeps_groups_apart():
    """Groups whose layers are shaped differently are searched one by one, with the same result."""
    other = SlidingWindowSpec(4, 8, layout="8 heads")
    cache = Cache(FULL, WINDOW, other, retention_interval=None)
    request = cache.run("a", PROMPT)
    cache.manager.evict_blocks([cache.tables(request)[2][5]])
    assert cache.look_up(PROMPT)[0] == 20


def test_draft_model_flag_spreads_over_equal_groups():
    """Groups of one kind give up a block together, flagged or not."""
    cache = Cache(FULL, KVCacheGroup(FULL, is_eagle=True), WINDOW, retention_interval=None)
    cache.run("a", PROMPT)
    assert cache.look_up(PROMPT)[0] == 24


def test_a_shorter_hit_is_given_up_once():
    """Several kinds with a draft model settle on one length, each giving up one block of what it found."""
    cache = Cache(FULL, WINDOW, SlidingWindowSpec(4, 16), use_eagle=True, retention_interval=None)
    request = cache.run("a", PROMPT)
    assert cache.look_up(PROMPT)[0] == 24
    cache.manager.evict_blocks([cache.tables(request)[1][6]])
    assert cache.look_up(PROMPT)[0] == 20


def test_a_hit_that_another_kind_shortened_is_given_up_anew():
    """A group that gave up its block at a longer hit must do so again at the shorter one."""
    draft = KVCacheGroup(WINDOW, is_eagle=True)
    cache = Cache(FULL, draft, SlidingWindowSpec(4, 12), retention_interval=None)
    _, first, second = cache.tables(cache.run("a", PROMPT))
    cache.manager.evict_blocks([first[2], second[4]])
    assert cache.look_up(PROMPT)[0] == 4


def test_window_run_at_the_start_loses_twice():
    """A draft model's run of blocks back to the start is cut to the alignment before its end is given up."""
    eagle_window = KVCacheGroup(SlidingWindowSpec(4, 16), is_eagle=True)
    cache = Cache(FullAttentionSpec(8), eagle_window, retention_interval=None)
    cache.run("a", PROMPT)
    assert cache.look_up(PROMPT[:13]) == (0, [[], []])


def test_46_decode_context_parallelism():
    """Scenario 46: two ranks hold a block together: 8 tokens, published as such."""
    cache = Cache(FULL, dcp_world_size=2)
    request = cache.run("a", PROMPT)
    (event,) = cache.manager.take_events()
    assert (event.block_size, len(event.block_hashes)) == (8, 3)
    assert cache.tables(request) == [[1, 2, 3, 4]]
    assert cache.look_up(PROMPT) == (24, [[1, 2, 3]])


def test_46_mamba_is_not_split():
    """States are whole on every rank: only attention blocks grow."""
    cache = Cache(FULL, MambaSpec(8), dcp_world_size=2)
    assert cache.config.block_sizes == (8, 8)
    assert cache.config.hash_block_size == 8
    assert cache.config.partial_hits


def test_rough_edge_18_full_report_with_parallelism():
    """A full report that ends the engine is refused by name: the report's block size is not multiplied by the ranks."""
    cache = Cache(FULL, dcp_world_size=2)
    cache.run("a", PROMPT)
    with pytest.raises(PrefixCacheError, match="kv_cache_report_mode=full ends a vLLM"):
        cache.look_up(PROMPT, report_mode="full")
    assert cache.look_up(PROMPT)[0] == 24


def test_full_report_of_all_groups():
    """One event for each group, each with its own block size."""
    cache = Cache(FullAttentionSpec(8), WINDOW, retention_interval=None)
    cache.run("a", PROMPT)
    cache.manager.take_events()
    cache.look_up(PROMPT, report_mode="full")
    assert [(event.group_idx, event.block_size, len(event.block_hashes)) for event in cache.manager.take_events()] == [
        (0, 8, 3),
        (1, 4, 6),
    ]


def test_shared_blocks_are_adopted_before_external_ones_are_allocated():
    """No group's allocation for a connector evicts what another group is about to adopt."""
    cache = Cache(FULL, WINDOW, retention_interval=None, num_blocks=20)
    first = cache.run("a", PROMPT[:9])
    cache.manager.free(first)
    second = cache.request("b", PROMPT)
    found = cache.manager.get_computed_blocks(second)
    new = cache.manager.allocate_slots(
        second, 2, new_computed_tokens=found.hit_tokens, computed_blocks=found, external_tokens=20
    )
    assert found.hit_tokens == 8
    assert cache.tables(second)[0][:2] == block_ids(found)[0]
    assert [len(blocks) for blocks in new] == [1, 1]


def test_a_running_request_may_load_more():
    """External tokens of a request that was admitted before get their blocks as any other tokens do."""
    cache = Cache(FULL, num_blocks=20)
    request = cache.run("a", PROMPT[:9])
    request.append_output([1] * 8)
    assert cache.manager.allocate_slots(request, 0, external_tokens=8) == ([4, 5],)


def test_cutting_what_was_never_looked_up_stays_no_lookup():
    """Otherwise the admission would count in the statistics of a cache that was not asked."""
    cache = Cache(FULL)
    manager = cache.manager
    assert manager.truncate(manager.not_looked_up, 0) is manager.not_looked_up


def test_cutting_a_hit():
    """A hit can be cut where all groups end a block, not elsewhere."""
    cache = Cache(FULL, MLAAttentionSpec(4))
    cache.run("a", PROMPT)
    found = cache.manager.get_computed_blocks(cache.request("b", PROMPT))
    cut = cache.manager.truncate(found, 12)
    assert cut.hit_tokens == 12
    assert block_ids(cut) == [[1, 2, 3], [9, 10, 11]]
    for end in (13, 32):
        with pytest.raises(PrefixCacheError, match="cannot be cut"):
            cache.manager.truncate(found, end)


def test_deferred_freeing():
    """Blocks of a forgotten request stay in use until they are let go, then the last group's tail goes first."""
    cache = Cache(FULL, WINDOW, num_blocks=10)
    request = cache.run("a", PROMPT[:8])
    blocks = cache.manager.pop_blocks(request)
    assert [block.block_id for block in blocks] == [1, 2, 3, 4]
    assert cache.tables(request) == [[], []]
    assert cache.manager.num_free_blocks == 5
    cache.manager.free_popped(blocks)
    assert cache.manager.free_block_ids()[-3:] == [3, 2, 1]
    assert cache.manager.free_block_ids()[0] == 4


def test_estimate_is_the_least_of_the_groups():
    """What the cache knows of a request is what its least informed group knows."""
    cache = Cache(FULL, WINDOW)
    request = cache.run("a", PROMPT)
    assert cache.manager.estimate_cached_tokens(request) == 28
    cache.manager.evict_blocks(cache.tables(request)[1][6:])
    assert cache.manager.estimate_cached_tokens(request) == 24
    assert cache.manager.estimate_cached_tokens(cache.request("b", PROMPT)) == 0


def test_remove_skipped_alone():
    """A scheduler may free behind the window between allocations."""
    cache = Cache(FULL, WINDOW)
    request = cache.run("a", PROMPT)
    cache.manager.remove_skipped(request, 30)
    assert cache.tables(request)[1][:6] == [0, 0, 0, 0, 0, 14]


def test_chunks_beside_full_attention():
    """Groups of one block size: the chunked group never shortens a hit of whole chunks."""
    cache = Cache(FULL, ChunkedLocalAttentionSpec(4, 8))
    cache.run("a", PROMPT)
    assert cache.look_up(PROMPT) == (28, [[1, 2, 3, 4, 5, 6, 7], [0] * 6 + [15]])


def test_nothing_to_cache_is_refused():
    """Groups none of which can be cached make no prefix cache."""
    with pytest.raises(ConfigError, match="none of the KV cache groups"):
        Cache(CircularBufferSpec(4), CircularBufferSpec(8))
