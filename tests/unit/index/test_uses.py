"""When requests used blocks, by a worker's own clock: which blocks get a time, how they age, what a hit's parts are."""

import pytest

from kvatlas.errors import IndexStateError
from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvatlas.hashing import BlockKeyHasher, RequestExtras
from kvatlas.index import USE_AGE_STARTS, IdlePart, PrefixIndex

BLOCK = 4
SYSTEM = list(range(10 * BLOCK))
QUESTION = list(range(500, 500 + 6 * BLOCK))
PROMPT = [*SYSTEM, *QUESTION, 1]


def index_with(*workers: str) -> PrefixIndex:
    """An index whose workers hold the prompt's 16 blocks."""
    index = PrefixIndex(BlockKeyHasher(3))
    for worker in workers:
        index.add_worker(worker)
        index.apply(worker, BlockStored(list(range(1, 17)), None, PROMPT[:-1], BLOCK, medium="GPU"))
    return index


def churn(index: PrefixIndex, worker: str, blocks: int) -> None:
    """Other blocks enter, and go again."""
    hashes = list(range(10_000, 10_000 + blocks))
    index.apply(worker, BlockStored(hashes, None, [7] * BLOCK * blocks, BLOCK, medium="GPU"))
    index.apply(worker, BlockRemoved(hashes, medium="GPU"))


def test_two_blocks_of_a_request_have_a_time() -> None:
    """The first block it computed and its prompt's last; what lies before begins many prompts and counts as young."""
    index = index_with("w")
    assert index.uses.idle_parts(PROMPT, {"w": 16}) == {"w": ()}
    assert index.uses.touch("w", PROMPT, fresh_blocks=10) == 16
    counts = index.uses.counts("w", 100)
    assert (counts.clock, counts.stored_blocks, counts.timed_blocks) == (32, 16, 2)
    assert sorted(counts.resident_ages) == [10, 15]
    churn(index, "w", 100)
    parts = index.uses.idle_parts(PROMPT, {"w": 16})["w"]
    assert parts == (IdlePart(10, 0), IdlePart(5, 110), IdlePart(1, 115))
    assert index.uses.age("w", 11) == 110
    assert index.uses.age("w", 12) is None
    assert index.uses.age("w", 77) is None


def test_a_later_request_renews_what_it_shares() -> None:
    """The next turn of a conversation makes its earlier blocks young, and another conversation does not."""
    index = index_with("w")
    index.uses.touch("w", PROMPT, fresh_blocks=10)
    churn(index, "w", 100)
    index.uses.touch("w", [*SYSTEM, 9, 9, 9, 9, 9], fresh_blocks=10)
    assert index.uses.idle_parts(PROMPT, {"w": 16})["w"][-1].age == 126
    index.uses.touch("w", [*PROMPT, *PROMPT], fresh_blocks=16)
    assert index.uses.idle_parts(PROMPT, {"w": 16})["w"][-1].age <= 32


def test_workers_have_clocks_of_their_own() -> None:
    """Requests and stores of one worker age nothing on another; only blocks that a worker holds are touched there."""
    index = index_with("a", "b")
    index.uses.touch("a", PROMPT)
    index.uses.touch("b", PROMPT)
    churn(index, "b", 500)
    index.apply("b", BlockRemoved([16], medium="GPU"))
    assert index.uses.idle_parts(PROMPT, {"a": 16, "b": 15}) == {
        "a": (IdlePart(15, 0), IdlePart(1, 15)),
        "b": (IdlePart(15, 500),),
    }
    assert index.uses.touch("b", PROMPT) == 15


def test_removals_end_a_time() -> None:
    """A block with a time that goes is counted by its age, others are not; a clear and a new life forget all times."""
    index = index_with("w")
    index.uses.touch("w", PROMPT, fresh_blocks=10)
    churn(index, "w", 985)
    index.apply("w", BlockRemoved([16, 15, 14], medium="GPU"))
    ((age_bin, count),) = index.uses.counts("w", 0).removals.items()
    assert count == 1
    assert USE_AGE_STARTS[age_bin] <= 1000 < USE_AGE_STARTS[age_bin + 1]
    assert index.uses.counts("w", 0).timed_blocks == 1
    index.apply("w", AllBlocksCleared())
    assert index.uses.counts("w", 0).timed_blocks == 0
    index.purge("w")
    assert index.uses.counts("w", 0).removals == {}


def test_a_loss_ends_times() -> None:
    """What is in doubt has no time: nobody knows what happened to it."""
    index = index_with("w")
    index.uses.touch("w", PROMPT)
    index.doubt("w")
    assert index.uses.counts("w", 10).resident_ages == []
    assert index.uses.touch("w", PROMPT) == 0


def test_extras_are_part_of_a_block() -> None:
    """A salted prompt touches salted blocks only."""
    index = index_with("w")
    assert index.uses.touch("w", PROMPT, extras=RequestExtras(cache_salt="x")) == 0
    assert index.uses.counts("w", 0).timed_blocks == 0


def test_stamps_are_renewed() -> None:
    """For the fleet, too, a block is young when an answer ended, however long ago it was looked up."""
    index = index_with("w")
    churn(index, "w", 6400)
    assert index.recency("w").ages([1, 16]) == [100, 100]
    index.uses.touch("w", PROMPT)
    assert index.recency("w").ages([1, 16]) == [0, 0]


def test_unknown_workers() -> None:
    """Nobody's blocks are refused by name, and a worker of unknown block size has none."""
    index = PrefixIndex(BlockKeyHasher(3))
    for call in (
        lambda: index.uses.touch("w", PROMPT),
        lambda: index.uses.idle_parts(PROMPT, {"w": 1}),
        lambda: index.uses.counts("w", 1),
        lambda: index.uses.age("w", 1),
    ):
        with pytest.raises(IndexStateError, match="no worker 'w'"):
            call()
    index.add_worker("w")
    assert index.uses.touch("w", PROMPT) == 0
    assert index.uses.idle_parts(PROMPT, {"w": 1}) == {}
