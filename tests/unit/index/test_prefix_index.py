"""The fleet index: what workers announce, turned into hit tokens."""

import pytest

from kvatlas.errors import IndexStateError
from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, encode_batch
from kvatlas.hashing import BlockKeyHasher, Lora, MultimodalItem, RequestExtras
from kvatlas.index import CopyMode, PrefixIndex

TOKENS = list(range(100, 116))  # four blocks of four


def stored(
    first: int, count: int, *, parent: object = "chain", start: int | None = None, **fields: object
) -> BlockStored:
    """Blocks `first`.. of TOKENS, with hash 10 + n for block n."""
    begin = (first if start is None else start) * 4
    parent_hash = (10 + first - 1 if first else None) if parent == "chain" else parent
    return BlockStored(
        block_hashes=[10 + n for n in range(first, first + count)],
        parent_block_hash=parent_hash,
        token_ids=TOKENS[begin : begin + 4 * count],
        block_size=4,
        medium="GPU",
        **fields,
    )


def removed(*hashes: int, **fields: object) -> BlockRemoved:
    return BlockRemoved(block_hashes=list(hashes), medium="GPU", **fields)


@pytest.fixture(name="index")
def _index() -> PrefixIndex:
    index = PrefixIndex(BlockKeyHasher(seed=1))
    for worker in ("a", "b"):
        index.add_worker(worker, block_size=4)
    return index


def hits(index: PrefixIndex, token_ids: list[int] | None = None, **kwargs: object) -> dict[str, int]:
    return {w: m.hit_tokens for w, m in index.match(token_ids or [*TOKENS, 7], **kwargs).items()}


class TestMatch:
    def test_counts_leading_blocks_of_each_worker(self, index: PrefixIndex) -> None:
        """Each worker's answer is its own unbroken prefix."""
        index.apply("a", stored(0, 4))
        index.apply("b", stored(0, 2))
        assert hits(index) == {"a": 16, "b": 8}

    def test_leaves_one_token_to_compute(self, index: PrefixIndex) -> None:
        """A prompt of whole blocks never hits its last one: floor((n - 1) / block size)."""
        index.apply("a", stored(0, 4))
        assert hits(index, TOKENS)["a"] == 12
        assert hits(index, TOKENS[:1])["a"] == 0

    def test_stops_at_a_hole(self, index: PrefixIndex) -> None:
        """A block missing in the middle ends the prefix; storing it again restores all that follows."""
        index.apply("a", stored(0, 4))
        index.apply("a", removed(11))
        assert hits(index)["a"] == 4
        index.apply("a", stored(1, 1))
        assert hits(index)["a"] == 16

    def test_asks_only_about_named_workers(self, index: PrefixIndex) -> None:
        """Workers that are not candidates do not appear; unknown names are ignored."""
        index.apply("a", stored(0, 4))
        assert hits(index, worker_ids=["b", "gone"]) == {"b": 0}

    def test_worker_without_block_size_is_not_answered_for(self) -> None:
        """Nothing can be said of a worker before its block size is known; its first store tells it."""
        index = PrefixIndex(BlockKeyHasher(seed=1))
        index.add_worker("a")
        assert hits(index) == {}
        index.apply("a", stored(0, 1))
        assert hits(index) == {"a": 4}

    def test_workers_with_different_block_sizes(self, index: PrefixIndex) -> None:
        """Each block size has its own chain."""
        index.add_worker("c", block_size=8)
        index.apply(
            "c", BlockStored(block_hashes=[1], parent_block_hash=None, token_ids=TOKENS[:8], block_size=8, medium="GPU")
        )
        index.apply("a", stored(0, 3))
        assert hits(index) == {"a": 12, "b": 0, "c": 8}


class TestBlockSize:
    def test_what_stores_prove_beats_what_metrics_state(self) -> None:
        """Under decode context parallelism the metrics' block size is not the events' one."""
        index = PrefixIndex(BlockKeyHasher(seed=1))
        index.add_worker("a")
        index.set_block_size("a", 2)
        assert index.block_size("a") == 2
        index.apply("a", stored(0, 2))
        assert index.block_size("a") == 4
        assert hits(index) == {"a": 8}

    def test_a_new_life_may_have_another_block_size(self, index: PrefixIndex) -> None:
        """A purge forgets what the old life's stores taught."""
        index.apply("a", stored(0, 2))
        index.purge("a")
        wide = BlockStored(block_hashes=[1], parent_block_hash=None, token_ids=TOKENS[:8], block_size=8, medium="GPU")
        index.apply("a", wide)
        assert index.block_size("a") == 8
        assert hits(index)["a"] == 8

    def test_stores_of_other_media_teach_nothing_of_it(self) -> None:
        """A connector's chunks may be of any size."""
        index = PrefixIndex(BlockKeyHasher(seed=1))
        index.add_worker("a")
        index.apply(
            "a", BlockStored(block_hashes=[1], parent_block_hash=None, token_ids=TOKENS[:8], block_size=8, medium="CPU")
        )
        assert index.block_size("a") is None


class TestExactness:
    def test_plain_workers_are_exact(self, index: PrefixIndex) -> None:
        """Full attention on the device only, all content known: the hit is what the engine will report."""
        index.apply("a", stored(0, 2))
        assert index.match([*TOKENS, 7])["a"].exact

    @pytest.mark.parametrize(
        "event",
        [
            BlockStored(block_hashes=[99], parent_block_hash=98, token_ids=TOKENS[:4], block_size=4, medium="GPU"),
            BlockStored(block_hashes=[99], parent_block_hash=None, token_ids=TOKENS[:8], block_size=4, medium="GPU"),
            BlockStored(block_hashes=[99], parent_block_hash=None, token_ids=[], block_size=0, medium="CPU"),
            stored(0, 2, group_idx=1, kv_cache_spec_kind="unknown"),
        ],
        ids=["orphan", "masked", "another medium", "kind without a rule"],
    )
    def test_what_cannot_be_counted_is_not_promised(self, index: PrefixIndex, event: BlockStored) -> None:
        """Unknown content, copies elsewhere, unknown kinds: the engine may report something else."""
        index.apply("a", stored(0, 2))
        index.apply("a", event)
        assert not index.match([*TOKENS, 7])["a"].exact

    def test_exactness_returns_with_knowledge(self, index: PrefixIndex) -> None:
        """When the orphan's parent appears, or the orphan goes, nothing is unknown any more."""
        index.apply("a", stored(1, 1))
        assert not index.match([*TOKENS, 7])["a"].exact
        index.apply("a", stored(0, 1))
        assert index.match([*TOKENS, 7])["a"].exact
        index.apply("a", stored(3, 1))
        index.apply("a", removed(13))
        assert index.match([*TOKENS, 7])["a"].exact


class TestCopies:
    def test_block_lives_while_a_copy_does(self, index: PrefixIndex) -> None:
        """Stored twice and removed once is still resident; the second removal ends it; a third changes nothing."""
        index.apply("a", stored(0, 1))
        index.apply("a", stored(0, 1))
        index.apply("a", removed(10))
        assert hits(index)["a"] == 4
        index.apply("a", removed(10))
        assert hits(index)["a"] == 0
        index.apply("a", removed(10))
        assert index.stats("a").unknown_removals == 1
        index.apply("a", stored(0, 1))
        assert hits(index)["a"] == 4

    def test_set_mode_takes_repeats_for_reports(self) -> None:
        """In set mode the first removal ends a block however often it was announced."""
        index = PrefixIndex(BlockKeyHasher(seed=1))
        index.add_worker("a", block_size=4, copy_mode=CopyMode.SET)
        index.apply("a", stored(0, 1))
        index.apply("a", stored(0, 1))
        index.apply("a", removed(10))
        assert hits(index)["a"] == 0

    def test_removal_touches_only_its_worker_and_medium(self, index: PrefixIndex) -> None:
        """Another worker's copy, and the same worker's copy in another medium, stay."""
        for worker in ("a", "b"):
            index.apply(worker, stored(0, 1))
        cpu = BlockStored(block_hashes=[10], parent_block_hash=None, token_ids=TOKENS[:4], block_size=4, medium="cpu")
        index.apply("a", cpu)
        index.apply("a", removed(10))
        match = index.match([*TOKENS, 7])
        assert match["a"].hit_tokens == 0
        assert match["a"].tiers == {"GPU": 0, "CPU": 4}
        assert match["b"].hit_tokens == 4


class TestOrphans:
    def test_unknown_parent_is_never_the_root(self, index: PrefixIndex) -> None:
        """A store whose parent was not announced matches nothing, least of all a prompt that starts with its tokens."""
        index.apply("a", stored(2, 1, parent=99))
        assert hits(index)["a"] == 0
        assert hits(index, TOKENS[8:])["a"] == 0
        assert index.stats("a").orphans_now == 1

    def test_orphans_join_when_the_parent_appears(self, index: PrefixIndex) -> None:
        """Children and grandchildren that came first count from the moment the chain closes."""
        index.apply("a", stored(3, 1))
        index.apply("a", stored(1, 2))
        assert hits(index)["a"] == 0
        index.apply("a", stored(0, 1))
        assert hits(index)["a"] == 16
        assert index.stats("a").orphans_now == 0

    def test_runs_that_wait_in_vain_are_given_up(self) -> None:
        """Removed orphans leave the pool once many wait; those still resident stay and join when their parent comes."""
        index = PrefixIndex(BlockKeyHasher(seed=1))
        index.add_worker("a", block_size=4)
        for parent in range(10_000, 14_000):
            block = parent + 10_000
            index.apply("a", BlockStored([block], parent, [1, 2, 3, parent], 4, medium="GPU"))
            if parent < 13_900:
                index.apply("a", BlockRemoved([block], medium="GPU"))
            assert index.stats("a").orphans_now <= 1024 + 2 * index.stats("a").unkeyed_now
        assert index.stats("a").unkeyed_now == 100
        index.apply("a", BlockStored([13_999], None, [5, 6, 7, 8], 4, medium="GPU"))
        assert index.match([5, 6, 7, 8, 1, 2, 3, 13_999, 0])["a"].hit_blocks == 2

    def test_removed_orphan_does_not_come_back(self, index: PrefixIndex) -> None:
        """A block removed while it waited stays gone when its parent appears."""
        index.apply("a", stored(1, 1))
        index.apply("a", removed(11))
        index.apply("a", stored(0, 1))
        assert hits(index)["a"] == 4

    def test_pool_is_bounded(self) -> None:
        """Beyond the bound the oldest wait is dropped and counted."""
        index = PrefixIndex(BlockKeyHasher(seed=1), max_orphan_blocks=2)
        index.add_worker("a", block_size=4)
        for n, parent in enumerate((50, 51, 52)):
            index.apply(
                "a",
                BlockStored(
                    block_hashes=[n], parent_block_hash=parent, token_ids=TOKENS[:4], block_size=4, medium="GPU"
                ),
            )
        assert index.stats("a").orphans_now == 2
        assert index.stats("a").dropped_orphan_blocks == 1


class TestPurge:
    def test_clear_is_one_workers(self, index: PrefixIndex) -> None:
        """AllBlocksCleared of one worker leaves the others alone."""
        for worker in ("a", "b"):
            index.apply(worker, stored(0, 2))
        index.apply("a", AllBlocksCleared())
        assert hits(index) == {"a": 0, "b": 8}

    def test_clear_is_of_the_device(self, index: PrefixIndex) -> None:
        """The host tier of an engine keeps its blocks when the device pool is cleared; a new life loses both."""
        index.apply("a", stored(0, 1))
        index.apply(
            "a",
            BlockStored(block_hashes=[10], parent_block_hash=None, token_ids=TOKENS[:4], block_size=4, medium="CPU"),
        )
        index.apply("a", AllBlocksCleared())
        assert index.match([*TOKENS, 7])["a"].tiers == {"GPU": 0, "CPU": 4}
        index.apply("a", BlockRemoved(block_hashes=[10], medium="CPU"))
        assert index.stats("a").unknown_removals == 0
        assert index.stats("a").resident_now == 0

    def test_removed_worker_leaves_nothing_behind(self, index: PrefixIndex) -> None:
        """A new worker that gets the freed place starts empty."""
        index.apply("a", stored(0, 2))
        index.remove_worker("a")
        index.add_worker("new", block_size=4)
        assert hits(index) == {"b": 0, "new": 0}

    def test_unknown_and_repeated_workers_are_refused(self, index: PrefixIndex) -> None:
        """Mistakes name the worker and what is known."""
        with pytest.raises(IndexStateError, match="known workers: a, b"):
            index.purge("zz")
        with pytest.raises(IndexStateError, match="already"):
            index.add_worker("a")
        with pytest.raises(IndexStateError, match="block size 0"):
            index.add_worker("c", block_size=0)


class TestHandles:
    def test_signed_unsigned_and_bytes_hashes(self, index: PrefixIndex) -> None:
        """A hash removes what it stored whether the engine writes it as u64, i64 or bytes; forms do not cross."""
        wide = 2**64 - 5
        index.apply("a", BlockStored(block_hashes=[wide], parent_block_hash=None, token_ids=TOKENS[:4], block_size=4))
        index.apply(
            "b", BlockStored(block_hashes=[b"\xff" * 32], parent_block_hash=None, token_ids=TOKENS[:4], block_size=4)
        )
        assert hits(index) == {"a": 4, "b": 4}
        index.apply("b", removed(wide))
        index.apply("a", removed(-5))
        assert hits(index) == {"a": 0, "b": 4}
        index.apply("b", BlockRemoved(block_hashes=[b"\xff" * 32]))
        assert hits(index) == {"a": 0, "b": 0}


class TestExtras:
    def test_lora_salt_and_image_of_one_name_are_three_things(self, index: PrefixIndex) -> None:
        """Equal text in different dimensions never matches."""
        index.apply("a", stored(0, 2, lora_name="x", extra_keys=[("x",), ("x",)]))
        prompt = [*TOKENS[:8], 7]
        assert hits(index, prompt)["a"] == 0
        assert hits(index, prompt, extras=RequestExtras(cache_salt="x"))["a"] == 0
        assert hits(index, prompt, extras=RequestExtras(multimodal=(MultimodalItem("x", 0, 8),)))["a"] == 0
        assert hits(index, prompt, extras=RequestExtras(lora=Lora("x", "/any/path")))["a"] == 8

    def test_salt_counts_on_the_first_block(self, index: PrefixIndex) -> None:
        """A salted chain matches the same salt only, in vLLM's form and in SGLang's."""
        index.apply("a", stored(0, 2, extra_keys=[("s",), None]))
        index.apply("b", stored(0, 1, cache_salt="s"))
        index.apply("b", stored(1, 1, cache_salt="s"))
        prompt = [*TOKENS[:8], 7]
        assert hits(index, prompt, extras=RequestExtras(cache_salt="s")) == {"a": 8, "b": 8}
        assert hits(index, prompt) == {"a": 0, "b": 0}


class TestUnprovable:
    def test_masked_span_shifts_no_keys(self, index: PrefixIndex) -> None:
        """More tokens than hashes: resident by name, matching nothing until another event gives the tokens."""
        event = BlockStored(block_hashes=[11], parent_block_hash=None, token_ids=TOKENS[:8], block_size=4, medium="GPU")
        index.apply("a", event)
        assert hits(index)["a"] == 0
        assert index.stats("a").unpaired_blocks == 1
        index.apply("a", stored(0, 2))
        assert hits(index)["a"] == 8

    def test_extra_keys_of_no_known_form_match_nothing(self, index: PrefixIndex) -> None:
        """Two texts without a LoRA name could be anything: the blocks are counted and matched by nobody."""
        index.apply("a", stored(0, 1, extra_keys=[("x", "y")]))
        assert index.stats("a").unpaired_blocks == 1
        assert hits(index)["a"] == 0
        index.apply("a", removed(10))
        assert index.stats("a").unknown_removals == 0

    def test_bigrams_are_not_taken_for_tokens(self, index: PrefixIndex) -> None:
        """Pairs of ids are counted and left out."""
        pairs = [(t, t + 1) for t in TOKENS[:4]]
        index.apply(
            "a", BlockStored(block_hashes=[1], parent_block_hash=None, token_ids=pairs, block_size=4, medium="GPU")
        )
        assert hits(index)["a"] == 0
        assert index.stats("a").unpaired_blocks == 1


class TestGroups:
    def test_window_group_needs_only_its_window(self, index: PrefixIndex) -> None:
        """Full attention needs all blocks, a window of 5 tokens (one block) only the last; the shorter answer wins."""
        index.apply("a", stored(0, 4, group_idx=0, kv_cache_spec_kind="full_attention"))
        window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 5}
        index.apply("a", stored(0, 4, **window))
        assert hits(index)["a"] == 16
        index.apply("a", removed(10, 11, 12, group_idx=1))
        assert hits(index)["a"] == 16
        index.apply("a", removed(13, group_idx=1))
        assert hits(index)["a"] == 0

    def test_window_group_named_before_tokens_are_known(self, index: PrefixIndex) -> None:
        """The window group's masked hashes join the keys that the full group proves."""
        window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 5}
        masked = BlockStored(
            block_hashes=[13], parent_block_hash=None, token_ids=TOKENS, block_size=4, medium="GPU", **window
        )
        index.apply("a", masked)
        index.apply("a", stored(0, 4, group_idx=0, kv_cache_spec_kind="full_attention"))
        assert hits(index)["a"] == 16

    def test_placeholder_of_another_medium_changes_no_kind(self, index: PrefixIndex) -> None:
        """Offloading stores name a group without its kind: that is not full attention."""
        index.apply("a", stored(0, 4, group_idx=0, kv_cache_spec_kind="unknown"))
        assert hits(index)["a"] == 0
        index.apply(
            "a",
            BlockStored(
                block_hashes=[10], parent_block_hash=None, token_ids=[], block_size=0, medium="CPU", group_idx=0
            ),
        )
        assert hits(index)["a"] == 0

    def test_new_life_may_have_other_groups(self, index: PrefixIndex) -> None:
        """A purge forgets kinds, too."""
        index.apply("a", stored(0, 4, group_idx=0, kv_cache_spec_kind="unknown"))
        index.purge("a")
        index.apply("a", stored(0, 4, group_idx=0, kv_cache_spec_kind="full_attention"))
        assert hits(index)["a"] == 16

    def test_unknown_kind_gets_no_credit(self, index: PrefixIndex) -> None:
        """A group whose rule is not known makes the worker's hit 0, not a guess."""
        index.apply("a", stored(0, 4, group_idx=0, kv_cache_spec_kind="full_attention"))
        index.apply("a", stored(0, 4, group_idx=1, kv_cache_spec_kind="unknown"))
        assert hits(index)["a"] == 0

    def test_group_without_a_plane_allows_no_hit(self, index: PrefixIndex) -> None:
        """When the fleet has used up all planes, a further group's blocks are unknown: no claim, and it says so."""
        for group in range(2, 260):
            index.apply("b", stored(0, 1, group_idx=group, kv_cache_spec_kind="full_attention"))
        index.apply("a", stored(0, 4, group_idx=0, kv_cache_spec_kind="full_attention"))
        assert hits(index)["a"] == 16
        index.apply("a", stored(0, 4, group_idx=1, kv_cache_spec_kind="full_attention"))
        match = index.match([*TOKENS, 7])["a"]
        assert (match.hit_tokens, match.exact) == (0, False)

    def test_groups_of_longer_blocks_keep_being_found(self, index: PrefixIndex) -> None:
        """Blocks of a group that are two keys long match however many events like theirs came before."""
        index.apply("a", stored(0, 4, group_idx=0, kv_cache_spec_kind="full_attention"))
        wide = BlockStored(
            block_hashes=[90, 91],
            parent_block_hash=None,
            token_ids=TOKENS,
            block_size=8,
            medium="GPU",
            group_idx=1,
            kv_cache_spec_kind="full_attention",
        )
        for _ in range(3):
            index.ingest("a", encode_batch(EventBatch(ts=1.0, events=[wide])))
            assert hits(index)["a"] == 16
            index.apply("a", BlockRemoved(block_hashes=[90, 91], medium="GPU", group_idx=1))
            assert hits(index)["a"] == 0
