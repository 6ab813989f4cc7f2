"""Kinds that forget: sliding window, chunked local attention, reference window, buffers. Numbers: the specification's list.

Block size 4 unless a test says otherwise; scenarios were observed on a real vLLM 0.32.0.
"""

import pytest

from kvatlas.events import BlockStored
from kvatlas.prefix_cache import (
    AllocationRules,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from support.prefix_cache_groups import Cache, hashed

PROMPT = list(range(100, 130))
"""30 tokens: 7 full blocks and two tokens."""
SHARES_20 = PROMPT[:20] + list(range(10))
WINDOW = SlidingWindowSpec(4, 8)


def test_34_window_with_every_block_kept():
    """Scenario 34: the blocks of one window make a hit; what is before them counts as hit and is not resident."""
    cache = Cache(WINDOW, retention_interval=None)
    cache.run("a", PROMPT)
    assert cache.look_up(PROMPT) == (28, [[0, 0, 0, 0, 0, 6, 7]])
    assert cache.look_up(SHARES_20) == (20, [[0, 0, 0, 4, 5]])


def test_35_window_with_the_default_retention():
    """Scenario 35: only the window before the prompt's end is kept: a resend hits, a shared prefix does not."""
    cache = Cache(WINDOW)
    first = cache.run("a", PROMPT)
    assert hashed(cache) == [6, 7]
    assert cache.look_up(PROMPT)[0] == 28
    assert cache.look_up(SHARES_20) == (0, [[]])
    (event,) = cache.manager.take_events()
    assert (len(event.block_hashes), len(event.token_ids), event.parent_block_hash) == (2, 28, None)
    assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == ("sliding_window", 8)
    cache.manager.free(first)
    assert cache.manager.free_block_ids()[:6] == [8, 5, 4, 3, 2, 1]
    assert cache.manager.free_block_ids()[-2:] == [7, 6]


def test_36_retention_as_short_as_the_window():
    """Scenario 36: a window at every 8 tokens is every block; at every 16, half of them and the prompt's end."""
    cache = Cache(WINDOW, retention_interval=8)
    cache.run("a", PROMPT)
    assert hashed(cache) == [1, 2, 3, 4, 5, 6, 7]
    cache = Cache(WINDOW, retention_interval=16)
    cache.run("a", PROMPT)
    assert hashed(cache) == [3, 4, 6, 7]


def test_37_decode_past_the_window():
    """Scenario 37: blocks behind the window go to the end of the queue, still cached; their places become NULL."""
    cache = Cache(WINDOW, retention_interval=None, num_blocks=10)
    request = cache.run("a", PROMPT[:13])
    cache.decode(request, 1, 2, 3, 4)
    assert cache.tables(request) == [[0, 0, 3, 4, 5]]
    assert cache.manager.free_block_ids() == [6, 7, 8, 9, 1, 2]
    assert hashed(cache) == [1, 2, 3, 4]


def test_37_blocks_of_running_steps_stay():
    """Tokens of steps still running do not count: their windows reach further back."""
    cache = Cache(WINDOW, retention_interval=None)
    request = cache.run("a", PROMPT[:20])
    request.append_output(1)
    request.num_in_flight_tokens = 8
    cache.step(request)
    assert cache.tables(request)[0][:3] == [0, 2, 3]


def test_21_a_failed_allocation_trims_the_window_only():
    """Scenario 21, its exception: blocks behind the window are freed even when the allocation then fails."""
    cache = Cache(WINDOW, num_blocks=6)
    request = cache.run("a", PROMPT[:20])
    request.append_output([1] * 40)
    cache.manager.take_events()
    assert cache.step(request, 40) is None
    assert cache.tables(request) == [[0, 0, 0, 4, 5]]
    assert cache.manager.take_events() == []


def test_extra_retained_tokens_keep_blocks_longer():
    """Tokens kept below the window delay the freeing of their block."""
    cache = Cache(SlidingWindowSpec(4, 8, extra_retained_tokens=4), retention_interval=None)
    request = cache.run("a", PROMPT[:13])
    cache.decode(request, 1, 2, 3, 4)
    assert cache.tables(request) == [[0, 2, 3, 4, 5]]


def test_window_hit_at_the_start_may_be_short():
    """Blocks back to the start are a hit though they are fewer than a window."""
    cache = Cache(SlidingWindowSpec(4, 20), retention_interval=None)
    cache.run("a", PROMPT[:9])
    assert cache.look_up(PROMPT) == (8, [[1, 2]])


def test_window_search_skips_holes():
    """A missing block rules out every window that contains it."""
    cache = Cache(SlidingWindowSpec(4, 12), retention_interval=None)
    cache.run("a", PROMPT)
    cache.manager.evict_blocks([5])
    assert cache.look_up(PROMPT) == (16, [[0, 2, 3, 4]])
    cache.manager.evict_blocks([2, 1])
    assert cache.look_up(PROMPT) == (0, [[]])


def test_window_of_one_token_needs_one_block():
    """A window of the token alone still needs a cached block to end at, and none is ever kept sparsely."""
    cache = Cache(SlidingWindowSpec(4, 1), retention_interval=None)
    cache.run("a", PROMPT)
    assert hashed(cache) == []
    assert cache.look_up(PROMPT) == (0, [[]])


def test_window_with_a_draft_model():
    """With a draft model a hit takes one block more and gives it up."""
    cache = Cache(WINDOW, retention_interval=None, use_eagle=True)
    cache.run("a", PROMPT)
    assert cache.look_up(PROMPT) == (24, [[0, 0, 0, 0, 5, 6]])
    cache = Cache(WINDOW, use_eagle=True)
    cache.run("a", PROMPT)
    assert hashed(cache) == [5, 6, 7]


def test_full_sequence_of_a_window_is_what_it_holds_at_a_time():
    """The gate for the whole sequence counts the window and the tokens in flight, not the whole prompt."""
    whole = AllocationRules(full_sequence_must_fit=True)
    cache = Cache(WINDOW, num_blocks=8, max_in_flight_tokens=8)
    assert cache.admit(cache.request("a", range(100)), 8, rules=whole) is not None
    cache = Cache(WINDOW, num_blocks=5, max_in_flight_tokens=8)
    assert cache.admit(cache.request("a", range(100)), 8, rules=whole) is None
    assert SlidingWindowSpec(4, 8).max_admission_blocks(8, 4096) == 5
    assert SlidingWindowSpec(4, 8).max_admission_blocks(8, 10) == 4
    assert ChunkedLocalAttentionSpec(4, 8).max_admission_blocks(8, 4096) == 4
    assert FullAttentionSpec(4).max_admission_blocks(8, 4096) is None


def test_external_tokens_behind_the_window_get_no_blocks():
    """A connector's tokens that the window has left get NULL: only the window's blocks are allocated."""
    cache = Cache(WINDOW, retention_interval=None)
    request = cache.request("a", PROMPT)
    found = cache.manager.get_computed_blocks(request)
    new = cache.manager.allocate_slots(request, 2, computed_blocks=found, external_tokens=28)
    assert new == ([3],)
    assert cache.tables(request) == [[0, 0, 0, 0, 0, 1, 2, 3]]


def test_38_chunks():
    """Scenario 38: on a cold cache all chunks before the last count as hit, as NULL blocks."""
    cache = Cache(ChunkedLocalAttentionSpec(4, 8))
    assert cache.look_up(PROMPT) == (24, [[0] * 6])
    assert cache.look_up(PROMPT[:18]) == (16, [[0] * 4])
    assert cache.look_up(PROMPT[:16]) == (8, [[0] * 2])


def test_rough_edge_20_cold_chunks_count_as_hits():
    """Statistics overstate reuse: the NULL blocks of a cold cache are hits."""
    cache = Cache(ChunkedLocalAttentionSpec(4, 8))
    request = cache.run("a", PROMPT)
    assert cache.manager.make_stats().hits == 24
    assert cache.tables(request) == [[0] * 6 + [1, 2]]
    assert cache.look_up(PROMPT) == (28, [[0] * 6 + [1]])


def test_chunks_are_freed_as_they_end():
    """Decoding into the next chunk frees the one before."""
    cache = Cache(ChunkedLocalAttentionSpec(4, 8))
    request = cache.run("a", PROMPT[:7])
    cache.decode(request, 1)
    assert cache.tables(request) == [[1, 2]]
    cache.decode(request, 2)
    assert cache.tables(request) == [[0, 0, 3]]


def test_reference_window_frees_the_gap():
    """Prompt and window stay, the blocks between go."""
    cache = Cache(RSWASpec(4, rswa_window=6))
    request = cache.run("a", PROMPT[:10])
    cache.decode(request, *range(14))
    assert cache.tables(request) == [[1, 2, 3, 0, 5, 6]]
    assert cache.manager.take_events()[0].kv_cache_spec_kind == "full_attention"


def test_sinks_are_cached_like_full_attention():
    """Only the kind in the events differs."""
    cache = Cache(SinkFullAttentionSpec(4, sink_len=8))
    cache.run("a", PROMPT)
    assert cache.look_up(PROMPT)[0] == 28
    assert cache.manager.take_events()[0].kv_cache_spec_kind == "sink_full_attention"


def test_cross_attention_allocates_for_the_encoder_once():
    """As many blocks as the encoder's input fills, with the first allocation; nothing is cached."""
    cache = Cache(FullAttentionSpec(4), CrossAttentionSpec(4), enable_caching=False)
    request = cache.request("a", PROMPT[:6])
    request.num_encoder_tokens = 9
    assert cache.manager.allocate_slots(request, 6) == ([1, 2], [3, 4, 5])
    request.num_computed_tokens = 6
    request.append_output([1, 2, 3])
    assert cache.manager.allocate_slots(request, 3) == ([6], [])
    assert cache.manager.computed_block_ids("a", 7) == ([1, 2], [3, 4, 5])
    cache.manager.free(request)
    assert cache.manager.usage == 0


def test_cross_attention_is_not_loaded():
    """A connector's tokens get blocks in the other group only."""
    cache = Cache(FullAttentionSpec(4), CrossAttentionSpec(4), enable_caching=False)
    request = cache.request("a", PROMPT)
    request.num_encoder_tokens = 4
    assert cache.manager.allocate_slots(request, 2, external_tokens=28) == ([8], [9])


def test_circular_buffer_is_one_block():
    """One block a request whatever its length, also for external tokens, and no part in hits."""
    cache = Cache(CircularBufferSpec(2), FullAttentionSpec(4), WINDOW, retention_interval=None)
    request = cache.run("a", PROMPT)
    assert [len(blocks) for blocks in cache.tables(request)] == [1, 8, 8]
    assert cache.look_up(PROMPT) == (28, [[], [2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 0, 15, 16]])
    assert cache.manager.estimate_cached_tokens(request) == 28
    cache.decode(request, 1, 2, 3)
    assert len(cache.tables(request)[0]) == 1
    loaded = cache.request("b", range(30))
    cache.manager.allocate_slots(loaded, 2, external_tokens=28)
    assert len(cache.tables(loaded)[0]) == 1


def test_circular_buffer_alone_never_hits():
    """With caching on and nothing to cache, lookups find nothing."""
    cache = Cache(CircularBufferSpec(4))
    cache.run("a", PROMPT)
    assert cache.look_up(PROMPT) == (0, [[]])
    assert cache.manager.take_events() == []


def test_bounded_replay_is_not_cached():
    """A window that is computed again keeps its blocks to itself."""
    replayed = SlidingWindowMLASpec(4, 8, bounded_replay=True)
    cache = Cache(FullAttentionSpec(4), replayed)
    cache.run("a", PROMPT)
    assert hashed(cache, 1) == []
    assert cache.look_up(PROMPT)[0] == 28
    assert {event.kv_cache_spec_kind for event in cache.manager.take_events()} == {"full_attention"}


@pytest.mark.parametrize("caching", [True, False])
def test_windows_free_without_caching_too(caching):
    """What is freed behind the window does not depend on caching; where in the queue it goes does."""
    cache = Cache(WINDOW, retention_interval=None, num_blocks=10, enable_caching=caching)
    request = cache.run("a", PROMPT[:13])
    cache.decode(request, 1, 2, 3, 4)
    assert cache.tables(request) == [[0, 0, 3, 4, 5 if caching else 2]]


def test_rough_edge_19_full_reports_list_what_is_not_resident():
    """A full report of a window group lists the whole chain, NULL positions included, and is told again."""
    cache = Cache(WINDOW, retention_interval=None)
    cache.run("a", PROMPT)
    cache.manager.take_events()
    for _ in range(2):
        cache.look_up(PROMPT, report_mode="full")
        (event,) = cache.manager.take_events()
        assert isinstance(event, BlockStored)
        assert (len(event.block_hashes), event.parent_block_hash, event.token_ids) == (7, None, PROMPT[:28])


def test_groups_can_be_flagged_for_the_draft_model():
    """Only the flagged group keeps a block more."""
    cache = Cache(FullAttentionSpec(4), KVCacheGroup(WINDOW, is_eagle=True), use_eagle=True)
    cache.run("a", PROMPT)
    assert len(hashed(cache, 0)) == 7
    assert len(hashed(cache, 1)) == 3
