"""Mamba: one state is a hit. Scenario numbers as in the specification's list, observed on a real vLLM 0.32.0.

Full attention and Mamba, blocks of 8 tokens; `FINE` hashes every 4, so hits may end inside a block.
"""

import pytest

from kvatlas.errors import PrefixCacheError
from kvatlas.events import BlockRemoved, BlockStored
from kvatlas.prefix_cache import AllocationRules, FullAttentionSpec, MambaSpec, SlidingWindowSpec
from support.prefix_cache_groups import Cache, block_ids, hashed

PROMPT = list(range(100, 130))
FULL, MAMBA = FullAttentionSpec(8), MambaSpec(8)
CHUNKS = (8, 16, 24, 30)
FINE_CHUNKS = (8, 16, 24, 28, 30)
DENSE = {"retention_interval": None}
FINE = {"hash_block_size": 4, **DENSE}


def test_43_a_state_for_each_chunk():
    """Scenario 43: with hashes as long as blocks a resend hits the last whole block, by one state."""
    cache = Cache(FULL, MAMBA, **DENSE)
    request = cache.run("a", PROMPT, *CHUNKS)
    assert cache.tables(request) == [[1, 3, 5, 7], [0, 0, 6, 8]]
    assert cache.look_up(PROMPT) == (24, [[1, 3, 5], [0, 0, 6]])


def test_43_a_hit_may_end_inside_a_block():
    """Scenario 43, fine hashes: a resend hits 28 of 30 tokens, and each group copies the block the hit ends in."""
    cache = Cache(FULL, MAMBA, **FINE)
    first = cache.run("a", PROMPT, *FINE_CHUNKS)
    cache.manager.release_block_copies(cache.manager.take_block_copies())
    assert cache.look_up(PROMPT) == (28, [[1, 3, 5, 7], [0, 0, 0, 9]])
    second = cache.run("b", PROMPT)
    copies = cache.manager.take_block_copies()
    assert [(copy.source.block_id, copy.destination.block_id) for copy in copies] == [(7, 10), (9, 11)]
    assert cache.tables(second) == [[1, 3, 5, 10], [0, 0, 0, 11]]
    assert [copy.source.ref_cnt for copy in copies] == [2, 1]
    assert [copy.destination.ref_cnt for copy in copies] == [2, 2]
    cache.manager.release_block_copies(copies)
    assert [copy.source.ref_cnt for copy in copies] == [1, 0]
    cache.manager.free(first)
    cache.manager.free(second)
    assert cache.manager.usage == 0


def test_states_of_two_steps_ago_are_freed():
    """The step reads the last state and writes its own; the one before goes to the queue, still cached."""
    cache = Cache(FULL, MAMBA, **DENSE, num_blocks=12)
    request = cache.run("a", PROMPT, 8, 16)
    assert cache.tables(request)[1] == [2, 4]
    cache.step(request, 8)
    assert cache.tables(request)[1] == [0, 4, 6]
    assert cache.manager.free_block_ids()[-1] == 2
    assert hashed(cache, 1) == [2, 4, 6]


def test_a_running_state_moves_out_of_its_blocks_way():
    """A state cached inside a block is copied before the next step overwrites it; the copy takes its name over, silently."""
    cache = Cache(FULL, MAMBA, **FINE)
    request = cache.run("a", PROMPT, 8, 16, 24, 28)
    assert hashed(cache, 1)[-1] == 8
    cache.manager.take_events()
    new = cache.step(request, 2)
    assert new == ([], [])
    assert hashed(cache, 1)[-1] == 9
    (copy,) = cache.manager.take_block_copies()
    assert (copy.source.block_id, copy.destination.block_id) == (8, 9)
    assert not [event for event in cache.manager.take_events() if isinstance(event, BlockRemoved)]


def test_a_copied_state_must_still_be_in_the_table():
    """Freed behind the scheduler's back, the state to copy is gone: refused by name, where the engine asserts."""
    cache = Cache(FULL, MAMBA, **FINE)
    request = cache.run("a", PROMPT, 8, 16, 24, 28)
    cache.manager.remove_skipped(request, 40)
    with pytest.raises(PrefixCacheError, match="no longer at index 3"):
        cache.step(request, 2)


def test_44_sparse_states():
    """Scenario 44: with retention 0 interior chunks publish stores without hashes, and only the last state is kept."""
    cache = Cache(FULL, MAMBA)
    cache.run("a", PROMPT, *CHUNKS)
    events = [event for event in cache.manager.take_events() if event.group_idx == 1]
    assert [(len(event.block_hashes), len(event.token_ids), event.extra_keys) for event in events] == [
        (0, 8, None),
        (0, 8, None),
        (1, 8, [None]),
    ]
    assert {event.kv_cache_spec_kind for event in events} == {"mamba"}
    assert cache.look_up(PROMPT)[0] == 24
    assert cache.look_up(PROMPT[:20])[0] == 0


def test_44_a_state_every_n_tokens():
    """Retention 16 keeps every second state and the prompt's last; as short as a block, all."""
    cache = Cache(FULL, MAMBA, retention_interval=16)
    request = cache.run("a", PROMPT * 2, *range(8, 60, 8), 60)
    assert len(hashed(cache, 1)) == 4
    assert cache.manager.estimate_cached_tokens(request) == 56
    cache = Cache(FULL, MAMBA, retention_interval=8)
    cache.run("a", PROMPT, *CHUNKS)
    assert len(hashed(cache, 1)) == 3


def test_45_states_of_the_same_step():
    """Scenario 45: a state another request caches in this step is not there yet; in the next step it is."""
    cache = Cache(FULL, MAMBA, **DENSE)
    first, second = cache.request("a", PROMPT), cache.request("b", PROMPT)
    assert cache.admit(first, 8)
    found = cache.manager.get_computed_blocks(second)
    assert found.hit_tokens == 8
    assert cache.manager.allocate_slots(second, 8, new_computed_tokens=8, computed_blocks=found) is None
    cache.manager.new_step_starts()
    assert cache.manager.allocate_slots(second, 8, new_computed_tokens=8, computed_blocks=found) is not None


def test_45_holds_for_copies():
    """A name that moved to a copy in this step is not to be used in it."""
    cache = Cache(FULL, MAMBA, **FINE)
    first = cache.run("a", PROMPT, 8, 16, 24, 28)
    second = cache.request("b", PROMPT)
    cache.step(first, 2)
    found = cache.manager.get_computed_blocks(second)
    assert found.hit_tokens == 28
    assert cache.manager.allocate_slots(second, 2, new_computed_tokens=28, computed_blocks=found) is None


def test_shared_prefix_of_states():
    """Full attention knows a shared prefix the states do not: the boundary says where to keep one."""
    cache = Cache(FULL, MAMBA)
    cache.run("a", PROMPT, *CHUNKS)
    shares_20 = PROMPT[:20] + list(range(10))
    request = cache.request("b", shares_20)
    found = cache.admit(request, 8, 16, 24, 30)
    assert (found.hit_tokens, found.shared_prefix_boundary) == (0, 16)
    assert cache.look_up(PROMPT[:20] + [7] * 10)[0] == 16


def test_divergent_hits_for_a_connector():
    """A connector is offered full attention's hit, and told that the states are missing."""
    cache = Cache(FULL, MAMBA)
    request = cache.run("a", PROMPT, *CHUNKS)
    shorter = cache.request("b", PROMPT[:20])
    found = cache.manager.get_computed_blocks_for_connector(shorter)
    assert (found.hit_tokens, found.diverged, found.shared_prefix_boundary) == (16, True, 0)
    assert block_ids(found) == [[1, 3], []]
    assert block_ids(cache.manager.truncate(found, 8)) == [[1], []]
    equal = cache.manager.get_computed_blocks_for_connector(cache.request("c", PROMPT))
    assert (equal.hit_tokens, equal.diverged) == (24, False)
    cache.manager.evict_blocks([cache.tables(request)[0][1]])
    behind = cache.manager.get_computed_blocks_for_connector(cache.request("d", PROMPT))
    assert (behind.hit_tokens, behind.diverged) == (0, False)
    skipping = cache.request("e", PROMPT, skip_reading_prefix_cache=True)
    assert cache.manager.get_computed_blocks_for_connector(skipping) is cache.manager.not_looked_up


@pytest.mark.parametrize(
    "specs", [(FULL,), (MAMBA,), (FULL, SlidingWindowSpec(8, 16)), (MAMBA, SlidingWindowSpec(8, 16))]
)
def test_other_models_have_one_hit(specs):
    """Without states beside full attention a connector's lookup is the plain one."""
    cache = Cache(*specs, retention_interval=None if len(specs) > 1 else 0)
    cache.run("a", PROMPT, *CHUNKS)
    request = cache.request("b", PROMPT)
    found = cache.manager.get_computed_blocks_for_connector(request)
    assert found == cache.manager.get_computed_blocks(request)
    assert found.hit_tokens == 24


def test_rough_edge_18_full_report_of_a_partial_hit():
    """A full report of a hit inside a block ends the engine when the prompt does not fill the block: refused by name."""
    cache = Cache(FULL, MAMBA, **FINE)
    cache.run("a", PROMPT, *FINE_CHUNKS)
    with pytest.raises(PrefixCacheError, match="report incrementally"):
        cache.look_up(PROMPT, report_mode="full")
    cache.manager.take_events()
    assert cache.look_up([*PROMPT, 1, 2], report_mode="full")[0] == 28
    full, mamba = cache.manager.take_events()
    assert isinstance(full, BlockStored)
    assert (len(full.block_hashes), len(mamba.block_hashes)) == (4, 4)


def test_alone_in_the_model():
    """Mamba without attention: the last cached state is the hit."""
    cache = Cache(MAMBA)
    cache.run("a", PROMPT, *CHUNKS)
    assert cache.look_up(PROMPT) == (24, [[0, 0, 1]])
    assert cache.look_up(PROMPT[:24]) == (0, [[]])


def test_windows_keep_hits_on_block_ends():
    """Beside a window whose blocks hold several hashes, hits stay aligned to all block sizes."""
    cache = Cache(FULL, MAMBA, SlidingWindowSpec(8, 16), hash_block_size=4)
    assert not cache.config.partial_hits
    assert cache.config.hit_alignment_tokens == 8
    cache = Cache(FULL, MAMBA, SlidingWindowSpec(4, 8), hash_block_size=4)
    assert cache.config.partial_hits


def test_speculative_scratch_blocks():
    """Scratch blocks for drafts come with the first step and move ahead of the running state."""
    cache = Cache(FULL, MambaSpec(8, num_speculative_blocks=2), **DENSE)
    request = cache.run("a", PROMPT, 8)
    assert cache.tables(request)[1] == [2, 3, 4]
    cache.step(request, 8)
    assert cache.tables(request)[1] == [2, 3, 4, 6]
    cache.step(request, 8)
    assert cache.tables(request)[1] == [0, 3, 4, 6, 8]


def test_scratch_blocks_are_moved_over_a_gap():
    """A chunk of several blocks leaves NULLs; scratch blocks in their places go to the end of the table."""
    cache = Cache(FULL, MambaSpec(8, num_speculative_blocks=1), **DENSE)
    request = cache.run("a", list(range(80)), 8)
    assert cache.tables(request)[1] == [2, 3]
    new = cache.step(request, 32)
    assert cache.tables(request)[1] == [2, 0, 0, 0, 3, 8]
    assert new[1] == [0, 0, 3, 8]


def test_lookahead_needs_no_state():
    """Draft tokens beyond the step get slots in attention groups only."""
    cache = Cache(FULL, MAMBA, **DENSE)
    request = cache.request("a", PROMPT)
    new = cache.manager.allocate_slots(request, 8, lookahead_tokens=10)
    assert [len(blocks) for blocks in new] == [3, 1]


def test_a_scratch_block_others_use_cannot_move():
    """Scratch blocks are their request's own; anything else is a mistake of the caller."""
    cache = Cache(FULL, MambaSpec(8, num_speculative_blocks=1), **DENSE)
    request = cache.run("a", list(range(80)), 8)
    cache.block(cache.tables(request)[1][1]).ref_cnt += 1
    with pytest.raises(PrefixCacheError, match="cannot be moved"):
        cache.step(request, 32)


def test_loaded_states():
    """A connector's tokens need one state, at their end; it takes a block that the count leaves out."""
    cache = Cache(FULL, MAMBA, **DENSE)
    request = cache.request("a", PROMPT)
    found = cache.manager.get_computed_blocks(request)
    rules = AllocationRules(delay_caching=True)
    assert cache.manager.allocate_slots(request, 0, computed_blocks=found, external_tokens=24, rules=rules) is not None
    assert cache.tables(request) == [[1, 2, 3], [0, 0, 4]]
    full = Cache(FULL, MAMBA, **DENSE, num_blocks=6)
    request = full.request("a", PROMPT)
    found = full.manager.get_computed_blocks(request)
    with pytest.raises(PrefixCacheError, match="1 free blocks were asked for but only 0"):
        full.manager.allocate_slots(request, 6, computed_blocks=found, external_tokens=24)


def test_mode_none_allocates_like_attention():
    """Without prefix caching a Mamba group just has blocks, some of them scratch; states before the last are freed."""
    cache = Cache(FULL, MambaSpec(8, "none", num_speculative_blocks=1), enable_caching=False)
    request = cache.run("a", PROMPT[:12])
    assert cache.tables(request) == [[1, 2], [3, 4, 5]]
    cache.decode(request, *range(6))
    assert cache.tables(request) == [[1, 2, 3], [0, 0, 5, 6]]
    cache.manager.free(request)
    assert cache.manager.usage == 0


class TestCheckpoints:
    """A kernel that exports a state from inside a chunk spares the scheduler a short one."""

    EXPORTING = MambaSpec(8, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=4)

    def test_exported_state_is_hit(self):
        """One chunk for the whole prompt: the block before the running state holds, and is named by, 28 tokens."""
        cache = Cache(FULL, self.EXPORTING, hash_block_size=4)
        request = cache.run("a", PROMPT)
        assert cache.tables(request)[1] == [0, 0, 5, 6]
        assert (cache.block(5).num_hashed_tokens, hashed(cache, 1)) == (28, [5])
        assert cache.look_up(PROMPT) == (28, [[1, 2, 3, 4], [0, 0, 0, 5]])

    def test_not_named_twice(self):
        """An export that ends with its block is what the block was named by already."""
        cache = Cache(FULL, self.EXPORTING)
        request = cache.run("a", PROMPT)
        assert cache.tables(request)[1] == [0, 0, 5, 6]
        assert cache.look_up(PROMPT) == (24, [[1, 2, 3], [0, 0, 5]])
        events = [event for event in cache.manager.take_events() if event.group_idx == 1]
        assert [len(event.block_hashes) for event in events] == [1]

    def test_only_at_the_end_of_the_prefill(self):
        """With retention 0 earlier chunks reserve no block for a state nobody would keep."""
        cache = Cache(FULL, self.EXPORTING, hash_block_size=4)
        request = cache.run("a", PROMPT * 2, 32)
        assert [block_id > 0 for block_id in cache.tables(request)[1]] == [False, False, False, True]

    def test_a_transient_state_is_not_kept(self):
        """With states at every 16 tokens only, an export in between takes the name of its block away."""
        cache = Cache(FULL, self.EXPORTING, hash_block_size=4, retention_interval=16)
        cache.run("a", PROMPT * 2, 32)
        assert all(cache.block(block_id).num_hashed_tokens % 16 == 0 for block_id in hashed(cache, 1))
        assert [type(event) for event in cache.manager.take_events()].count(BlockRemoved) <= 1

    def test_unaligned_starts_export_nothing(self):
        """The kernel exports from starts it can count from, and never over a state that is still needed."""
        cache = Cache(FULL, MambaSpec(8, num_prefill_checkpoint_blocks=1), hash_block_size=4)
        request = cache.run("a", PROMPT)
        assert cache.tables(request)[1][:3] == [0, 0, 0]


def test_draft_model_keeps_the_state_one_block_earlier():
    """Full attention gives up a hashed block, so the state is kept one earlier."""
    cache = Cache(FULL, MAMBA, hash_block_size=4, use_eagle=True)
    cache.run("a", PROMPT, 8, 16, 24, 30)
    assert cache.look_up(PROMPT)[0] == 24


def test_shared_prefix_checkpoint_inside_a_block():
    """With a draft model and the switch on, the state at a junction inside a block is kept too."""
    kept = []
    for switch in (False, True):
        cache = Cache(FULL, MAMBA, hash_block_size=4, use_eagle=True, mamba_shared_prefix_checkpoint=switch)
        request = cache.request("a", PROMPT)
        request.shared_prefix_boundary = 12
        cache.manager.allocate_slots(request, 12)
        kept.append([cache.block(block_id).num_hashed_tokens for block_id in hashed(cache, 1)])
    assert kept == [[], [12]]
