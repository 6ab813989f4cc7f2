"""Scenarios observed on a real vLLM 0.32.0 (numbers as in the specification's list), for full attention.

One full-attention group, block size 4, 11 blocks of which 10 are usable, events on, unless a test says otherwise.
"""

import pytest

from kvatlas.errors import PrefixCacheError
from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvatlas.hashing import Lora, RequestExtras, hash64
from kvatlas.prefix_cache import AllocationRules, RequestStatus
from support.prefix_cache import HASHER, admit, decode, make_manager, make_request, table

A = list(range(100, 113))
"""13 tokens: three full blocks and one token."""
B = A[:8] + list(range(200, 205))
"""Shares 8 tokens with A."""


def hashes(token_ids, **extras):
    return [hash64(digest) for digest in HASHER.hash_tokens(token_ids, 4, extras=RequestExtras(**extras))]


def stored(events):
    return [event for event in events if isinstance(event, BlockStored)]


def removed(events):
    return [event for event in events if isinstance(event, BlockRemoved)]


def test_05_bytes_hashes_in_events():
    """Scenario 5: with integer hashes off, events carry the raw 32-byte digests, in stores and removals."""
    manager = make_manager(int_block_hashes=False)
    admit(manager, make_request("a", A))
    manager.evict_blocks([1])
    store, removal = manager.take_events()
    assert store.block_hashes == HASHER.hash_tokens(A, 4)
    assert removal.block_hashes == [HASHER.hash_tokens(A, 4)[0]]


def test_06_hashes_follow_complete_blocks():
    """Scenario 6: 7 tokens, 1 hash; one more token, 2 hashes; three more, still 2."""
    request = make_request("a", range(7))
    assert len(request.block_hashes) == 1
    request.append_output(7)
    assert len(request.block_hashes) == 2
    request.append_output([8, 9, 10])
    assert request.block_hashes == HASHER.hash_tokens(range(11), 4)
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (11, 7, 4)


def test_07_08_salt_in_events():
    """Scenarios 7, 8: only block 0 lists the salt; an empty salt lists nothing."""
    manager = make_manager()
    admit(manager, make_request("a", A[:8], extras=RequestExtras(cache_salt="x")))
    admit(manager, make_request("b", B[8:] + A[:3], extras=RequestExtras(cache_salt="")))
    salted, plain = manager.take_events()
    assert salted.extra_keys == [("x",), None]
    assert plain.extra_keys == [None, None]


def test_10_lora_path_tells_apart_unseen():
    """Scenario 10: one adapter name at two paths: no shared blocks, though events list equal extra keys."""
    manager = make_manager()
    first = make_request("a", A, extras=RequestExtras(lora=Lora("ad", "/1")))
    first.lora_id = 7
    admit(manager, first)
    assert admit(manager, make_request("b", A, extras=RequestExtras(lora=Lora("ad", "/2"))))[0] == 0
    one, two = manager.take_events()
    assert one.extra_keys == two.extra_keys == [("ad",)] * 3
    assert (one.lora_name, one.lora_id, two.lora_id) == ("ad", 7, None)
    assert one.block_hashes != two.block_hashes


def test_13_cold_prompt():
    """Scenario 13: 13 tokens take blocks 1-4 and publish three hashes; usage 0.4."""
    manager = make_manager()
    assert admit(manager, make_request("a", A)) == (0, [1, 2, 3, 4])
    assert manager.take_events() == [
        BlockStored(
            block_hashes=hashes(A),
            parent_block_hash=None,
            token_ids=A[:12],
            block_size=4,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            extra_keys=[None, None, None],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )
    ]
    assert manager.usage == pytest.approx(0.4)


def test_14_15_shared_prefix_and_the_order_of_freeing():
    """Scenarios 14, 15: B reuses two of A's blocks; freed blocks queue blank ones first, then tails before heads."""
    manager = make_manager()
    first, second, third = make_request("a", A), make_request("b", B), make_request("c", A)
    admit(manager, first)
    manager.take_events()
    assert admit(manager, second) == (8, [5, 6])
    assert table(manager, second) == [1, 2, 5, 6]
    (event,) = manager.take_events()
    assert event.block_hashes == hashes(B)[2:]
    assert event.parent_block_hash == hashes(A)[1]
    assert event.token_ids == B[8:12]
    manager.free(first)
    assert manager.free_block_ids() == [4, 7, 8, 9, 10, 3]
    manager.free(second)
    assert manager.free_block_ids() == [6, 4, 7, 8, 9, 10, 3, 5, 2, 1]
    assert admit(manager, third) == (12, [6])
    assert table(manager, third) == [1, 2, 3, 6]
    assert manager.free_block_ids() == [4, 7, 8, 9, 10, 5]


def test_16_identical_aligned_prompt():
    """Scenario 16: of 8 cached tokens 4 are hit; the recomputed block duplicates the cached one, and is published."""
    manager = make_manager()
    admit(manager, make_request("a", A[:8]))
    manager.take_events()
    second = make_request("b", A[:8])
    assert admit(manager, second) == (4, [3])
    (event,) = manager.take_events()
    assert event.block_hashes == hashes(A[:8])[1:]
    assert manager.num_cached_keys == 2


def test_17_18_duplicates():
    """Scenarios 17, 18: equal blocks are both published; the first is hit; losing one leaves the other to be hit."""
    manager = make_manager()
    first, second = make_request("a", A[:4]), make_request("b", A[:4])
    assert admit(manager, first) == (0, [1])
    assert admit(manager, second) == (0, [2])
    assert [event.block_hashes for event in manager.take_events()] == [hashes(A[:4])] * 2
    probe = make_request("c", A[:5])
    assert [block.block_id for block in manager.get_computed_blocks(probe).blocks[0]] == [1]
    manager.evict_blocks([1])
    assert [event.block_hashes for event in removed(manager.take_events())] == [hashes(A[:4])]
    assert [block.block_id for block in manager.get_computed_blocks(probe).blocks[0]] == [2]


def test_19_decode():
    """Scenario 19: a store when the 8th token's slot is allocated; a third block for token 9."""
    manager = make_manager()
    request = make_request("a", A[:6])
    admit(manager, request)
    manager.take_events()
    seen = []
    for token_id in (1, 2, 3):
        new = decode(manager, request, token_id)
        seen.append((request.num_tokens, new, len(stored(manager.take_events()))))
    assert seen == [(7, [], 0), (8, [], 1), (9, [3], 0)]


def test_20_hits_that_are_free_count_as_needed():
    """Scenario 20: 3 usable blocks, two of them hits: 15 tokens need two new and two hit blocks, so they do not fit."""
    manager = make_manager(num_blocks=4)
    first = make_request("a", A[:9])
    admit(manager, first)
    manager.free(first)
    manager.take_events()
    queue = manager.free_block_ids()
    request = make_request("b", [*A[:9], 1, 2, 3, 4, 5, 6])
    assert admit(manager, request) == (8, None)
    assert manager.free_block_ids() == queue
    assert manager.take_events() == []
    assert manager.num_cached_keys == 2


def test_21_a_failed_allocation_changes_nothing():
    """Scenario 21: reference counts, map, queue, table and events stay as they were."""
    manager = make_manager(num_blocks=5)
    request = make_request("a", A)
    admit(manager, request)
    manager.take_events()
    request.append_output([1, 2, 3, 4])
    before = (table(manager, request), manager.free_block_ids(), manager.num_cached_keys, manager.usage)
    assert manager.allocate_slots(request, 4) is None
    assert (table(manager, request), manager.free_block_ids(), manager.num_cached_keys, manager.usage) == before
    assert manager.take_events() == []


def test_22_evict_blocks_twice():
    """Scenario 22, rough edge 21: one removal; the block, still used, is not cached again and later goes to the queue's front."""
    manager = make_manager()
    request = make_request("a", A)
    admit(manager, request)
    manager.take_events()
    manager.evict_blocks({1})
    manager.evict_blocks({1})
    (event,) = manager.take_events()
    assert event == BlockRemoved(block_hashes=hashes(A)[:1], medium="GPU", group_idx=0)
    decode(manager, request, 5)
    assert stored(manager.take_events()) == []
    manager.free(request)
    assert manager.free_block_ids() == [4, 1, 5, 6, 7, 8, 9, 10, 3, 2]


def test_23_reset():
    """Scenario 23: refused while blocks are used; else one AllBlocksCleared, no removal, and the next lookup misses."""
    manager = make_manager()
    request = make_request("a", A)
    admit(manager, request)
    manager.take_events()
    assert not manager.reset_prefix_cache()
    assert manager.take_events() == []
    assert not manager.make_stats().reset
    manager.free(request)
    queue = manager.free_block_ids()
    assert manager.reset_prefix_cache()
    assert manager.take_events() == [AllBlocksCleared()]
    assert manager.make_stats().reset
    assert manager.free_block_ids() == queue
    assert admit(manager, make_request("b", A))[0] == 0


def test_24_caching_off():
    """Scenario 24: nothing is looked up or stored, no stores are published, but a reset still is."""
    manager = make_manager(enable_caching=False)
    request = make_request("a", A, hasher=None)
    assert request.block_hashes == []
    assert admit(manager, request) == (0, [1, 2, 3, 4])
    decode(manager, request, 1)
    manager.free(request)
    assert manager.free_block_ids() == [4, 3, 2, 1, 5, 6, 7, 8, 9, 10]
    assert manager.reset_prefix_cache()
    assert manager.take_events() == [AllBlocksCleared()]
    assert manager.num_cached_keys == 0
    assert manager.make_stats().requests == 0


def test_25_touch():
    """Scenario 25: a block two requests use is in no queue; after both frees it is in the queue once."""
    manager = make_manager()
    first, second = make_request("a", A), make_request("b", A[:5])
    admit(manager, first)
    manager.take_events()
    assert admit(manager, second) == (4, [5])
    assert manager.take_events() == []
    manager.free(first)
    assert 1 not in manager.free_block_ids()
    manager.free(second)
    assert manager.free_block_ids().count(1) == 1


def test_26_usage_is_load_not_fill():
    """Scenario 26, rough edge 24: after all requests end usage is 0 though the cache is warm: it is load, not fill."""
    manager = make_manager()
    request = make_request("a", A)
    admit(manager, request)
    manager.free(request)
    assert manager.usage == 0
    assert manager.num_cached_keys == 3
    assert make_manager(num_blocks=1).usage == 0


def test_27_skip_reading():
    """Scenario 27: prompt logprobs: hit 0, fresh blocks, duplicates cached for others, statistics untouched."""
    manager = make_manager()
    admit(manager, make_request("a", A))
    manager.make_stats()
    manager.take_events()
    assert admit(manager, make_request("b", A, skip_reading_prefix_cache=True)) == (0, [5, 6, 7, 8])
    assert len(stored(manager.take_events())) == 1
    assert manager.make_stats().requests == 0


def test_28_drafts_are_not_cached():
    """Scenario 28: 7 tokens and 3 drafts fill two blocks' slots, yet the second gets a hash only once accepted."""
    manager = make_manager()
    request = make_request("a", A[:7])
    assert admit(manager, request, 10) == (0, [1, 2, 3])
    assert manager.num_cached_keys == 1
    request.num_computed_tokens = 7
    decode(manager, request, 1)
    assert manager.num_cached_keys == 2


def test_28_lookahead_slots():
    """Lookahead tokens get slots and no hash, and end at the longest sequence the model takes."""
    manager = make_manager(max_model_len=14)
    request = make_request("a", A)
    assert admit(manager, request, lookahead_tokens=20) == (0, [1, 2, 3, 4])
    assert manager.num_cached_keys == 3


def test_29_chunked_prefill():
    """Scenario 29: chunks 6, 12, 18 publish 1, 2 and 1 hashes, each with the parent before its range."""
    manager = make_manager()
    prompt = list(range(300, 318))
    request = make_request("a", prompt)
    admit(manager, request, 6)
    for _ in range(2):
        manager.allocate_slots(request, 6)
        request.num_computed_tokens += 6
    events = manager.take_events()
    expected = hashes(prompt)
    assert [event.block_hashes for event in events] == [expected[:1], expected[1:3], expected[3:]]
    assert [event.parent_block_hash for event in events] == [None, expected[0], expected[2]]
    assert [event.token_ids for event in events] == [prompt[:4], prompt[4:12], prompt[12:16]]


def test_30_preempted_and_resumed():
    """Scenario 30, rough edge 22: 13 + 3 tokens hit 12 of 16 on resumption, counted apart from first admissions."""
    manager = make_manager()
    request = make_request("a", A)
    admit(manager, request)
    for token_id in (1, 2, 3):
        decode(manager, request, token_id)
    manager.free(request)
    request.status = RequestStatus.PREEMPTED
    request.num_computed_tokens = 0
    request.num_preemptions += 1
    assert admit(manager, request)[0] == 12
    stats = manager.make_stats()
    assert (stats.requests, stats.queries, stats.hits) == (1, 13, 0)
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 16, 12)
    assert manager.make_stats().queries == 0


def test_31_watermark():
    """Scenario 31: with 2 of 6 blocks kept free, 4 blocks are refused beside running requests and given to one alone."""
    manager = make_manager(num_blocks=6, watermark=0.4)
    prompt = list(range(16))
    busy = AllocationRules(has_scheduled_requests=True)
    assert admit(manager, make_request("a", prompt), rules=busy)[1] is None
    running = make_request("b", prompt)
    running.status = RequestStatus.RUNNING
    assert admit(manager, running, rules=busy)[1] == [1, 2, 3, 4]
    manager.free(running)
    assert admit(manager, make_request("c", prompt))[1] is not None


def test_32_full_sequence_must_fit():
    """Scenario 32: 16 tokens on 3 free blocks with a 4-token chunk: refused with the rule, one block without."""
    whole = AllocationRules(full_sequence_must_fit=True)
    assert admit(make_manager(num_blocks=4), make_request("a", range(16)), 4, rules=whole)[1] is None
    assert admit(make_manager(num_blocks=4), make_request("a", range(16)), 4)[1] == [1]
    assert admit(make_manager(num_blocks=5), make_request("a", range(16)), 4, rules=whole)[1] == [1]


def test_33_nothing_asked_for():
    """Scenario 33: an allocation of nothing is a mistake of the caller."""
    with pytest.raises(PrefixCacheError, match="asks for nothing"):
        make_manager().allocate_slots(make_request("a", A), 0)


def test_41_eagle():
    """Scenario 41, one group: 13 tokens cached, resent with a draft model: hit 8 instead of 12."""
    manager = make_manager(use_eagle=True)
    admit(manager, make_request("a", A))
    assert admit(manager, make_request("b", A))[0] == 8


def test_47_asynchronous_external_load():
    """Scenario 47: 12 of 13 tokens loaded by a connector: blocks without events, then one store, then one token."""
    manager = make_manager()
    request = make_request("a", A)
    found = manager.get_computed_blocks(request)
    rules = AllocationRules(delay_caching=True)
    new = manager.allocate_slots(request, 0, computed_blocks=found, external_tokens=12, rules=rules)
    assert new == ([],)
    assert table(manager, request) == [1, 2, 3]
    assert manager.take_events() == []
    request.num_computed_tokens = 12
    manager.cache_blocks(request, 12)
    (event,) = manager.take_events()
    assert event.block_hashes == hashes(A)
    assert manager.allocate_slots(request, 1) == ([4],)


def test_external_load_after_a_local_hit():
    """Hit blocks are adopted before external ones are allocated, so no allocation evicts them; a synchronous load is cached at once."""
    manager = make_manager(num_blocks=5)
    first = make_request("a", A[:5])
    admit(manager, first)
    manager.free(first)
    second = make_request("b", A)
    found = manager.get_computed_blocks(second)
    new = manager.allocate_slots(
        second, 1, new_computed_tokens=found.hit_tokens, computed_blocks=found, external_tokens=8
    )
    assert found.hit_tokens == 4
    assert table(manager, second)[0] == 1
    assert new == (table(manager, second)[3:],)
    assert manager.num_cached_keys == 3


def test_reserved_blocks():
    """Blocks promised to others are as good as used."""
    manager = make_manager(num_blocks=5)
    assert admit(manager, make_request("a", A), rules=AllocationRules(reserved_blocks=1))[1] is None
    assert admit(manager, make_request("a", A))[1] == [1, 2, 3, 4]


def test_57_full_report():
    """Scenario 57: in full mode every lookup publishes the chain it hit, even when admission then fails."""
    manager = make_manager(num_blocks=6)
    admit(manager, make_request("a", A))
    manager.take_events()
    request = make_request("b", A + A, report_mode="full")
    for _ in range(2):
        assert admit(manager, request) == (12, None)
        (event,) = manager.take_events()
        assert (event.block_hashes, event.parent_block_hash, event.token_ids) == (hashes(A), None, A[:12])
        assert event.extra_keys == [None] * 3
    silent = make_manager(enable_events=False)
    admit(silent, make_request("a", A))
    assert admit(silent, make_request("b", A, report_mode="full"))[0] == 12
    assert silent.take_events() == []


def test_eviction_is_told_before_the_store_that_caused_it():
    """One removal for each block lost, in pop order, before the store of the same call."""
    manager = make_manager(num_blocks=4)
    first = make_request("a", A[:12])
    admit(manager, first)
    manager.free(first)
    manager.take_events()
    admit(manager, make_request("b", range(8)))
    events = manager.take_events()
    assert [event.block_hashes for event in events] == [hashes(A)[2:], hashes(A)[1:2], hashes(range(8))]
    assert isinstance(events[-1], BlockStored)


def test_session_id_is_passed_on():
    """The session of the request that stored a block is in the event."""
    manager = make_manager()
    request = make_request("a", A)
    request.session_id = "s1"
    admit(manager, request)
    assert manager.take_events()[0].session_id == "s1"
