"""The joint hit rule on residency written out by hand, and what a vLLM 0.32 cache announces that the rule rests on."""

import pytest

from kvatlas.errors import IndexStateError
from kvatlas.events import BlockStored
from kvatlas.index.match import (
    GroupProfile,
    has_known_join,
    has_known_rule,
    joint_hit_blocks,
    max_hit_blocks,
    window_hit_blocks,
    window_need_blocks,
)
from kvatlas.prefix_cache import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from support.prefix_cache_groups import Cache

FULL = GroupProfile(0, "full_attention")
MAMBA = GroupProfile(1, "mamba")
CHUNKED = GroupProfile(1, "chunked_local_attention")
NEVER = GroupProfile(1, "encoder_only_attention")


def window(group_id: int, tokens: int | None, **fields: int) -> GroupProfile:
    """A sliding-window group."""
    return GroupProfile(group_id, "sliding_window", tokens, **fields)


def hit(profiles: list[GroupProfile], limit: int, held: dict[int, set[int]], size: int = 4, **options: int) -> int:
    """The rule's answer in blocks; `held` gives each group's blocks, those of full attention of this size included."""
    full = limit
    for profile in profiles:
        if profile.is_full and profile.block_size in {None, size}:
            full = next((block for block in range(full) if block not in held[profile.group_id]), full)
    return joint_hit_blocks(profiles, full, lambda group, block: block in held.get(group, ()), size, **options)


class TestKinds:
    def test_the_last_token_is_always_computed(self) -> None:
        """8 tokens in blocks of 4: one block at most; 9 tokens: two."""
        assert [max_hit_blocks(tokens, 4) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]

    @pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention"])
    def test_full_attention_is_a_prefix(self, kind: str) -> None:
        """Blocks after the first that is missing count for nothing."""
        assert hit([GroupProfile(0, kind)], 5, {0: {0, 1, 3, 4}}) == 2

    def test_window_needs_what_it_sees_before_the_end(self) -> None:
        """A window of 8 tokens sees 7 before the next: two blocks of 4, wherever they end."""
        assert window_need_blocks(8, 4) == 2
        assert hit([FULL, window(1, 8)], 7, {0: set(range(7)), 1: {5, 6}}) == 7
        assert hit([FULL, window(1, 8)], 7, {0: set(range(7)), 1: {2, 3, 6}}) == 4
        assert hit([FULL, window(1, 8)], 7, {0: set(range(3)), 1: {1, 2, 5, 6}}) == 3

    def test_prefix_shorter_than_the_window_needs_all_of_itself(self) -> None:
        """The start of the sequence ends a window early."""
        assert hit([FULL, window(1, 100)], 4, {0: set(range(4)), 1: {0, 1, 3}}) == 2
        assert hit([FULL, window(1, 100)], 4, {0: set(range(4)), 1: {1, 2, 3}}) == 0

    def test_window_of_one_token_still_asks_for_a_block(self) -> None:
        """It sees nothing before the next token, but the engine's lookup wants one block there."""
        assert window_need_blocks(1, 4) == 1
        assert hit([FULL, window(1, 1)], 3, {0: {0, 1, 2}, 1: set()}) == 0
        assert hit([FULL, window(1, 1)], 3, {0: {0, 1, 2}, 1: {1}}) == 2

    def test_window_search_skips_what_no_window_can_contain(self) -> None:
        """Nothing held, 1000 blocks, windows of 10: 100 questions."""
        asked = []
        assert window_hit_blocks(lambda block: bool(asked.append(block)), 1000, 10) == 0
        assert len(asked) == 100

    def test_mamba_needs_the_state_at_the_end_only(self) -> None:
        """A prefix of n blocks needs the state announced as block n - 1; earlier states are of no use to it."""
        assert hit([FULL, MAMBA], 6, {0: set(range(6)), 1: {4}}) == 5
        assert hit([FULL, MAMBA], 6, {0: set(range(4)), 1: {1, 4, 5}}) == 2
        assert hit([FULL, MAMBA], 6, {0: set(range(6)), 1: set()}) == 0

    @pytest.mark.parametrize(
        ("profile", "blocks"),
        [(window(0, 8), 6), (GroupProfile(0, "mamba"), 6), (GroupProfile(0, "chunked_local_attention"), 0)],
        ids=["window", "mamba", "chunked"],
    )
    def test_single_group_without_full_attention(self, profile: GroupProfile, blocks: int) -> None:
        """Blocks 4 and 5 of 7 held: a whole window, a state; with chunks of unknown length nothing is sure."""
        assert hit([profile], 7, {0: {4, 5}}) == blocks

    def test_chunks_before_the_last_count_without_being_held(self) -> None:
        """Chunk of two blocks, limit 5: blocks 0 to 3 are free, block 4 must be held."""
        known = GroupProfile(1, "chunked_local_attention", chunk_tokens=8)
        assert hit([FULL, known], 5, {0: set(range(5)), 1: set()}) == 4
        assert hit([FULL, known], 5, {0: set(range(5)), 1: {4}}) == 5
        assert hit([FULL, known], 5, {0: set(range(3)), 1: set()}) == 2

    def test_unknown_chunks_count_from_the_start_only(self) -> None:
        """Any chunk length serves at least the blocks held from the start."""
        assert hit([FULL, CHUNKED], 5, {0: set(range(5)), 1: {0, 1, 3, 4}}) == 2

    def test_unknown_window_counts_from_the_start_only(self) -> None:
        """Any window serves at least the blocks held from the start."""
        assert hit([FULL, window(1, None)], 5, {0: set(range(5)), 1: {0, 1, 3, 4}}) == 2

    @pytest.mark.parametrize("kind", ["encoder_only_attention", "cross_attention", "unknown", "of the future"])
    def test_kind_without_a_rule_gives_nothing(self, kind: str) -> None:
        """Not even a group that holds everything: nobody knows what it asks for."""
        assert hit([FULL, GroupProfile(1, kind)], 3, {0: {0, 1, 2}, 1: {0, 1, 2}}) == 0

    def test_no_group_gives_nothing(self) -> None:
        """A worker that has announced nothing holds nothing."""
        assert hit([], 3, {}) == 0


class TestSeveralGroups:
    def test_windows_of_different_sizes_agree(self) -> None:
        """Each shortens the other's answer until one length suits both, in any order."""
        held = {0: set(range(9)), 1: {1, 2, 5, 7, 8}, 2: {0, 1, 2, 4, 5, 6}}
        profiles = [FULL, window(1, 8), window(2, 12)]
        assert hit(profiles, 9, held) == 3
        assert hit([profiles[2], profiles[0], profiles[1]], 9, held) == 3

    def test_several_full_groups_hold_the_shortest(self) -> None:
        """The group that lost most bounds all."""
        other = GroupProfile(1, "mla_attention")
        assert hit([FULL, other], 4, {0: {0, 1, 2, 3}, 1: {0, 1}}) == 2

    def test_window_and_state_must_end_together(self) -> None:
        """States after 2, 4 and 6 blocks, windows before 3 and 4."""
        assert hit([FULL, MAMBA, window(2, 8)], 7, {0: set(range(7)), 1: {1, 3, 5}, 2: {1, 2, 3}}) == 4

    def test_hits_end_where_all_groups_end_a_block(self) -> None:
        """Full blocks of 8 beside a window in blocks of 4: of 5 small blocks 4 count. Entries of 8 end with odd blocks."""
        full = GroupProfile(0, "full_attention", block_size=8)
        assert hit([full, window(1, 8, block_size=4)], 6, {0: {1, 3}, 1: {0, 1, 2, 3, 4, 5}}) == 4
        assert hit([full, window(1, 8, block_size=4)], 6, {0: {1, 3, 5}, 1: {1, 2, 4}}) == 0
        assert (
            hit([GroupProfile(0, "mla_attention"), window(1, 9, block_size=8)], 5, {0: set(range(5)), 1: {1, 3}}) == 4
        )

    def test_hits_end_inside_blocks_beside_longer_states(self) -> None:
        """Blocks of 16, hashes of 4, as stores that end inside blocks have shown: the longest end both hold."""
        full, mamba = GroupProfile(0, "full_attention", block_size=16), GroupProfile(1, "mamba", block_size=16)
        assert hit([full, mamba], 9, {0: {3, 5}, 1: {3, 5}}) == 6
        assert hit([full, mamba], 9, {0: {3, 5}, 1: {4, 6}}) == 5
        assert hit([full, mamba], 9, {0: {3, 8}, 1: {3, 8}}) == 4

    def test_several_full_groups_inside_blocks_end_with_whole_blocks(self) -> None:
        """The engine joins groups of equal layers first, which no event shows: 32, 32, 24 tokens may make 16."""
        sizes = {0: 8, 1: 16, 2: 8}
        full = [GroupProfile(group, "full_attention", block_size=size) for group, size in sizes.items()]
        mamba = GroupProfile(3, "mamba", block_size=16)
        held = {0: {1, 3, 5, 7}, 1: {3, 7}, 2: {1, 3, 5}, 3: {1, 3, 5, 7}}
        assert hit([*full, mamba], 8, held) == 4

    def test_window_beside_longer_states_ends_with_states(self) -> None:
        """Hits might end every 4 tokens here, or every 8: only what both allow is claimed."""
        full, mamba = GroupProfile(0, "full_attention", block_size=4), GroupProfile(1, "mamba", block_size=8)
        profiles = [full, mamba, window(2, 4, block_size=4)]
        assert hit(profiles, 3, {0: {0, 1, 2}, 1: {1, 2}, 2: {0, 1, 2}}) == 2
        assert not has_known_join(profiles, 4)

    def test_silent_group_may_move_the_ends(self) -> None:
        """Group 0 announces nothing, all stores span multiples of 12: 8 tokens cannot be claimed, 12 can."""
        profiles = [GroupProfile(1, "full_attention")]
        assert hit(profiles, 2, {1: {0, 1}}, alignment_tokens=12) == 0
        assert hit(profiles, 4, {1: {0, 1, 2, 3}}, alignment_tokens=12) == 3

    def test_sizes_that_do_not_fit_are_refused(self) -> None:
        """Blocks of 6 cannot be counted in blocks of 4."""
        with pytest.raises(IndexStateError, match="group 0 has blocks of 6 tokens, which 4 does not divide"):
            hit([GroupProfile(0, "full_attention", block_size=6)], 2, {0: {0}})


class TestWhatIsKnown:
    @pytest.mark.parametrize(
        ("profile", "known"),
        [
            (FULL, True),
            (GroupProfile(0, "sink_full_attention"), True),
            (window(0, 8), True),
            (GroupProfile(0, "sliding_window_mla", 8), True),
            (window(0, None), False),
            (MAMBA, True),
            (CHUNKED, False),
            (GroupProfile(0, "chunked_local_attention", chunk_tokens=8), True),
            (NEVER, False),
            (GroupProfile(0, "unknown"), False),
        ],
    )
    def test_rule_of_one_group(self, profile: GroupProfile, known: bool) -> None:
        """Known when residency, and what the profile says, decide."""
        assert has_known_rule(profile) is known

    @pytest.mark.parametrize(
        ("profiles", "known"),
        [
            ([FULL, window(1, 8)], True),
            ([FULL, MAMBA, window(2, 8)], True),
            ([FULL, CHUNKED], False),
            ([FULL, GroupProfile(1, "chunked_local_attention", chunk_tokens=8)], True),
            ([FULL, GroupProfile(1, "chunked_local_attention", chunk_tokens=10)], False),
            ([FULL, window(2, 8)], False),
            ([], False),
            ([GroupProfile(0, "full_attention", block_size=8), window(1, 8)], True),
            ([FULL, GroupProfile(1, "mamba", block_size=8)], True),
            ([GroupProfile(0, "full_attention", block_size=8), MAMBA], False),
            ([GroupProfile(0, "full_attention", block_size=8), GroupProfile(1, "mamba", block_size=8)], True),
            ([FULL, GroupProfile(1, "mla_attention", block_size=8), GroupProfile(2, "mamba", block_size=8)], False),
            ([FULL, GroupProfile(1, "mamba", block_size=8), window(2, 8)], False),
            ([FULL, GroupProfile(1, "mamba", block_size=8), window(2, 8, block_size=8)], True),
        ],
    )
    def test_join_of_several(self, profiles: list[GroupProfile], known: bool) -> None:
        """Known when every rule is, no group is silent, and the ends of hits have one reading. Blocks of 4."""
        assert has_known_join(profiles, 4) is known


PROMPT = list(range(30))


class TestWhatEnginesAnnounce:
    """The engine side of the rules, on the cache that equals vLLM 0.32's: blocks of 8 tokens."""

    def listed(self, cache: Cache, group: int) -> list[int]:
        """How many hashes each store of a group lists."""
        events = cache.manager.take_events()
        return [len(e.block_hashes) for e in events if isinstance(e, BlockStored) and e.group_idx == group]

    @pytest.mark.parametrize(
        ("retention", "listed"), [(None, [1, 1, 1]), (0, [0, 0, 1]), (16, [0, 1, 1])], ids=["all", "last", "every 16"]
    )
    def test_mamba_announces_the_states_it_keeps(self, retention: int | None, listed: list[int]) -> None:
        """Steps end with blocks; each leaves one state. By default only the last of the prompt is kept and listed."""
        cache = Cache(FullAttentionSpec(8), MambaSpec(8), retention_interval=retention)
        cache.run("a", PROMPT, 8, 16, 24, 30)
        assert self.listed(cache, 1) == listed

    def test_mamba_lists_the_state_a_long_step_leaves(self) -> None:
        """A step of three blocks leaves one state: one hash for 24 tokens, that of the last block."""
        cache = Cache(FullAttentionSpec(8), MambaSpec(8), retention_interval=None)
        cache.run("a", PROMPT, 24, 30)
        full, mamba, *_ = cache.manager.take_events()
        assert isinstance(full, BlockStored)
        assert isinstance(mamba, BlockStored)
        assert mamba.block_hashes == full.block_hashes[-1:]
        assert len(mamba.token_ids) == 24

    def test_chunk_length_is_in_no_event(self) -> None:
        """A cold lookup counts the chunks before the last, and no event says how long they are."""
        cache = Cache(ChunkedLocalAttentionSpec(8, 16))
        assert cache.look_up(PROMPT)[0] == 16
        cache.run("a", PROMPT)
        (event,) = cache.manager.take_events()
        assert isinstance(event, BlockStored)
        assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == ("chunked_local_attention", None)

    def test_draft_model_is_in_no_event(self) -> None:
        """With a draft model the end of a hit is given up, and the events are the same: nothing tells the two apart."""
        plain, drafting = Cache(FullAttentionSpec(8)), Cache(FullAttentionSpec(8), use_eagle=True)
        plain.run("a", PROMPT)
        drafting.run("a", PROMPT)
        assert plain.manager.take_events() == drafting.manager.take_events()
        assert (plain.look_up(PROMPT)[0], drafting.look_up(PROMPT)[0]) == (24, 16)

    def test_silent_group_behind_the_last_is_in_no_event(self) -> None:
        """A ring of 5 tokens makes hits end every 40: seen by no number of a group, only by the spans of stores."""
        cache = Cache(FullAttentionSpec(8), CircularBufferSpec(5))
        cache.run("a", list(range(90)))
        (event,) = cache.manager.take_events()
        assert isinstance(event, BlockStored)
        assert (event.group_idx, len(event.token_ids)) == (0, 80)
        assert cache.look_up(list(range(60)))[0] == 40

    def test_group_is_not_known_before_its_first_store(self) -> None:
        """Where hits end inside blocks, a short sequence lets full attention speak and leaves Mamba silent."""
        cache = Cache(FullAttentionSpec(8), MambaSpec(16))
        cache.decode(cache.run("a", [0, 1, 2, 3]), 4, 5, 6, 7)
        assert {event.group_idx for event in cache.manager.take_events()} == {0}
        assert cache.look_up(list(range(9)))[0] == 0

    def test_sliding_window_group_announces_its_window(self) -> None:
        """The one size a rule needs that events do carry."""
        cache = Cache(FullAttentionSpec(8), SlidingWindowSpec(8, 20))
        cache.run("a", PROMPT)
        windows = [event.kv_cache_spec_sliding_window for event in cache.manager.take_events()]
        assert windows == [None, 20]
