"""Doubts after a loss: what is claimed how, and how doubts end."""

import pytest

from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import Healed, PrefixIndex

BLOCK = 4
PROMPT = list(range(33))
"""Eight blocks and one token more."""


def stored(first: int, count: int, *, chain: int = 0, parent: int | None = None) -> BlockStored:
    """Blocks of the prompt (chain 0) or of another one."""
    start = chain * 1000
    return BlockStored(
        block_hashes=[start + number + 1 for number in range(first, first + count)],
        parent_block_hash=(start + first if first else None) if parent is None else parent,
        token_ids=[start + token for token in range(first * BLOCK, (first + count) * BLOCK)],
        block_size=BLOCK,
        medium="GPU",
    )


def removed(*blocks: int) -> BlockRemoved:
    """Blocks of the prompt."""
    return BlockRemoved(block_hashes=[block + 1 for block in blocks], medium="GPU")


@pytest.fixture
def index() -> PrefixIndex:
    """One worker with a pool of 20 blocks, and another that must never be touched."""
    index = PrefixIndex(BlockKeyHasher(seed=1))
    for worker in ("w", "other"):
        index.add_worker(worker, block_size=BLOCK)
        index.apply(worker, stored(0, 8))
    index.set_capacity("w", 20)
    return index


def claims(index: PrefixIndex) -> tuple[int, int]:
    """Blocks of the prompt claimed beyond doubt and in doubt."""
    match = index.match(PROMPT)["w"]
    return match.hit_blocks, match.doubted_tokens // BLOCK


def test_a_loss_puts_claims_in_doubt_and_touches_nobody_else(index: PrefixIndex) -> None:
    """What was claimed before stays a claim, in doubt; other workers' claims stand."""
    index.doubt("w")
    assert claims(index) == (0, 8)
    assert index.claims("w", PROMPT) == b"\x01" * 8
    assert index.match(PROMPT)["other"].hit_blocks == 8
    assert index.stats("w").doubted_now == 8
    assert not index.match(PROMPT)["w"].exact
    assert index.is_doubtful("w")


def test_a_new_announcement_ends_a_doubt(index: PrefixIndex) -> None:
    """A block that is stored again is there; one removal then takes it away, whatever was counted before the loss."""
    index.apply("w", stored(0, 8))
    index.doubt("w")
    index.apply("w", stored(0, 3))
    assert claims(index) == (3, 5)
    index.apply("w", removed(2))
    assert claims(index) == (2, 0)


def test_a_removal_ends_a_doubt(index: PrefixIndex) -> None:
    """A removal of a doubted block takes the claim, all its copies with it: the other one may have gone in the loss."""
    index.apply("w", stored(0, 8))
    index.doubt("w")
    index.apply("w", removed(5))
    assert claims(index) == (0, 5)


def test_one_turnover_ends_all_doubts(index: PrefixIndex) -> None:
    """After as many stored blocks as the pool holds, what nobody confirmed is claimed no more, and hits are exact."""
    index.doubt("w")
    index.apply("w", stored(0, 19, chain=1))
    assert claims(index) == (0, 8)
    assert index.is_doubtful("w")
    index.apply("w", stored(0, 1, chain=2))
    assert claims(index) == (0, 0)
    assert not index.is_doubtful("w")
    assert index.match(PROMPT)["w"].exact
    assert not index.is_complete("w")


def test_a_pool_size_learnt_late_still_makes_hits_exact() -> None:
    """Doubts that ended by a guess leave hits inexact until one turnover of the pool, whenever its size is told."""
    index = PrefixIndex(BlockKeyHasher(seed=1))
    index.add_worker("w", block_size=BLOCK)
    index.doubt("w")
    index.apply("w", stored(0, 16, chain=1))
    assert not index.is_doubtful("w")
    index.set_capacity("w", 20)
    index.apply("w", stored(16, 3, chain=1))
    assert not index.match(PROMPT)["w"].exact
    index.apply("w", stored(0, 1))
    assert index.match(PROMPT)["w"].exact
    assert claims(index) == (1, 0)


def test_a_snapshot_keeps_how_long_a_loss_hides_blocks(index: PrefixIndex) -> None:
    """An index that goes on from a snapshot has exact hits one turnover after the loss, no sooner and no later."""
    index.doubt("w")
    index.apply("w", stored(0, 15, chain=1))
    copy = PrefixIndex(BlockKeyHasher(seed=1))
    copy.add_worker("w", block_size=BLOCK)
    copy.restore("w", index.dump_state("w"), index.dump_blocks("w"), index.planes)
    copy.apply("w", stored(15, 4, chain=1))
    assert not copy.match(PROMPT)["w"].exact
    copy.apply("w", stored(0, 1, chain=2))
    assert copy.match(PROMPT)["w"].exact


def test_another_loss_starts_the_turnover_anew(index: PrefixIndex) -> None:
    """What is stored between two losses is in doubt after the second, and lasts one turnover from there."""
    index.doubt("w")
    index.apply("w", stored(0, 15, chain=1))
    index.doubt("w")
    index.apply("w", stored(0, 15, chain=2))
    assert claims(index) == (0, 8)
    index.apply("w", stored(15, 5, chain=2))
    assert claims(index) == (0, 0)


def test_a_clear_ends_doubts(index: PrefixIndex) -> None:
    """An empty cache is wholly known."""
    index.doubt("w")
    index.apply("w", AllBlocksCleared())
    assert claims(index) == (0, 0)
    assert index.match(PROMPT)["w"].exact
    assert index.is_complete("w")


def test_a_report_confirms_and_refutes(index: PrefixIndex) -> None:
    """Cached tokens prove the first blocks and disprove the others, which are claimed no more."""
    index.doubt("w")
    sent = index.moment("w")
    assert index.heal("w", PROMPT, 12, sent, claimed_tokens=32) == Healed(3, 0, 5)
    assert claims(index) == (3, 0)
    index.apply("w", removed(1))
    assert claims(index) == (1, 0)


def test_what_was_confirmed_outlives_the_turnover(index: PrefixIndex) -> None:
    """A confirmed block stays, counted once."""
    index.doubt("w")
    index.heal("w", PROMPT, 12, index.moment("w"), claimed_tokens=32)
    index.apply("w", stored(0, 20, chain=1))
    assert claims(index) == (3, 0)
    index.apply("w", removed(2))
    assert claims(index) == (2, 0)


def test_a_report_from_before_the_loss_says_nothing(index: PrefixIndex) -> None:
    """The answer to a request sent before the loss cannot end a doubt: the removal may be among what was lost."""
    sent = index.moment("w")
    index.doubt("w")
    assert index.heal("w", PROMPT, 32, sent, claimed_tokens=32) == Healed()
    assert claims(index) == (0, 8)


class TestAdoption:
    @pytest.fixture
    def index(self) -> PrefixIndex:
        """A worker that was joined late: what it holds was never announced to us."""
        index = PrefixIndex(BlockKeyHasher(seed=1))
        index.add_worker("w", block_size=BLOCK)
        index.set_capacity("w", 20)
        index.doubt("w")
        return index

    def test_reported_blocks_are_claimed(self, index: PrefixIndex) -> None:
        """What the engine had for a prompt is claimed from then on, for others that begin alike, too."""
        assert index.heal("w", PROMPT, 16, index.moment("w")) == Healed(0, 4, 0)
        assert claims(index) == (4, 0)
        assert index.match(PROMPT[:11])["w"].hit_blocks == 2
        assert index.stats("w").reported_now == 4

    def test_removals_in_between_leave_them_in_doubt(self, index: PrefixIndex) -> None:
        """A removal since the request was sent may have been of one of them."""
        sent = index.moment("w")
        index.apply("w", removed(3))
        index.heal("w", PROMPT, 16, sent)
        assert claims(index) == (0, 4)

    def test_an_unknown_removal_puts_them_in_doubt(self, index: PrefixIndex) -> None:
        """Their names are unknown, so the removal of an unknown block may mean any of them; a report ends that."""
        index.heal("w", PROMPT, 16, index.moment("w"))
        index.apply("w", removed(3))
        assert claims(index) == (0, 4)
        index.heal("w", PROMPT, 12, index.moment("w"), claimed_tokens=16)
        assert claims(index) == (3, 0)

    def test_the_removal_of_an_orphan_puts_them_in_doubt(self, index: PrefixIndex) -> None:
        """A block that waits for its parent may be one that a report made known by content."""
        index.apply("w", stored(4, 4))
        index.heal("w", PROMPT, 32, index.moment("w"))
        assert claims(index) == (8, 0)
        index.apply("w", removed(5))
        assert claims(index) == (0, 8)

    def test_they_end_with_a_turnover_without_use(self, index: PrefixIndex) -> None:
        """A block nobody names and nobody uses is gone after one turnover; one that is used stays."""
        index.heal("w", PROMPT, 16, index.moment("w"))
        index.apply("w", stored(0, 15, chain=1))
        index.heal("w", PROMPT, 8, index.moment("w"))
        index.apply("w", stored(15, 7, chain=1))
        assert claims(index) == (2, 0)

    def test_an_event_that_names_them_takes_over(self, index: PrefixIndex) -> None:
        """Once an event names the block, its removal by that name ends the claim."""
        index.heal("w", PROMPT, 16, index.moment("w"))
        index.apply("w", stored(0, 4))
        assert index.stats("w").reported_now == 0
        index.apply("w", removed(0))
        assert claims(index) == (0, 0)

    def test_a_new_life_forgets_them(self, index: PrefixIndex) -> None:
        """Nothing of an old life is claimed."""
        index.heal("w", PROMPT, 16, index.moment("w"))
        index.purge("w")
        assert claims(index) == (0, 0)
        assert index.memory.blocks == 0

    def test_reported_content_does_not_place_orphans(self, index: PrefixIndex) -> None:
        """Equal tokens under an unknown parent may be another chain; once the parent is announced, they count."""
        index.apply("w", stored(4, 4))
        index.heal("w", PROMPT, 16, index.moment("w"))
        assert claims(index) == (4, 0)
        index.apply("w", stored(0, 4))
        assert claims(index) == (8, 0)


def test_several_media_are_not_healed() -> None:
    """A count of cached tokens does not say which medium has them."""
    index = PrefixIndex(BlockKeyHasher(seed=1))
    index.add_worker("w", block_size=BLOCK)
    index.apply("w", stored(0, 2))
    index.apply(
        "w",
        BlockStored(block_hashes=[1], parent_block_hash=None, token_ids=PROMPT[:4], block_size=BLOCK, medium="CPU"),
    )
    assert index.heal("w", PROMPT, 32, index.moment("w")) == Healed()
