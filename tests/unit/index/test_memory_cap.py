"""The index under a cap: what goes first, what is counted, and that nothing is claimed that is not so."""

import pytest

from kvatlas._native import backend_name
from kvatlas.events import BlockRemoved, BlockStored, EventBatch, encode_batch
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex

MEBIBYTE = 1 << 20
BLOCK = 4


def chain_tokens(chain: int, blocks: int) -> list[int]:
    """Token ids of one of many chains that share nothing."""
    return [chain * 1000 + i for i in range(blocks * BLOCK)]


def handles(chain: int, blocks: int) -> list[int]:
    """The engine's hashes of a chain."""
    return [chain * 1000 + i + 1 for i in range(blocks)]


def stored(chain: int, blocks: int, parent: int | None = None) -> BlockStored:
    """One whole chain."""
    return BlockStored(
        block_hashes=handles(chain, blocks),
        parent_block_hash=parent,
        token_ids=chain_tokens(chain, blocks),
        block_size=BLOCK,
        medium="GPU",
    )


def fill(index: PrefixIndex, worker: str, chains: range, blocks: int = 64) -> None:
    """Chains as an engine would announce them."""
    for chain in chains:
        index.ingest(worker, encode_batch(EventBatch(ts=1.0, events=[stored(chain, blocks)])))


@pytest.fixture
def index() -> PrefixIndex:
    """Two workers in 2 MiB."""
    index = PrefixIndex(BlockKeyHasher(seed=1), max_bytes=2 * MEBIBYTE)
    for worker in ("a", "b"):
        index.add_worker(worker, block_size=BLOCK)
    return index


def test_memory_stays_below_the_cap(index: PrefixIndex) -> None:
    """However much is stored, the cap holds, and what was given up is counted."""
    for first in range(0, 2000, 50):
        fill(index, "a", range(first, first + 50))
        assert index.memory.used_bytes <= 2 * MEBIBYTE
    assert index.memory.forgotten_blocks + index.memory.refused_blocks > 50_000
    assert index.memory.max_bytes == 2 * MEBIBYTE
    assert index.stats("a").forgotten_blocks == index.memory.forgotten_blocks


def test_the_largest_gives(index: PrefixIndex) -> None:
    """A worker with few blocks keeps them all when another one fills the index."""
    fill(index, "b", range(5))
    fill(index, "a", range(10, 1500))
    assert index.stats("b").forgotten_blocks == 0
    assert index.match([*chain_tokens(3, 64), 1])["b"].hit_blocks == 64


def test_what_is_asked_for_stays(index: PrefixIndex) -> None:
    """Blocks that prompts ask for outlive those nobody asks for."""
    fill(index, "a", range(10))
    for first in range(10, 1200, 10):
        fill(index, "a", range(first, first + 10))
        for chain in range(10):
            index.match([*chain_tokens(chain, 64), 1])
    kept = sum(index.match([*chain_tokens(chain, 64), 1])["a"].hit_blocks for chain in range(10))
    others = sum(index.match([*chain_tokens(chain, 64), 1])["a"].hit_blocks for chain in range(10, 600))
    assert index.stats("a").forgotten_blocks > 30_000
    assert kept > 600
    assert others < 64 * 590 * 0.3


def test_giving_up_ends_exactness_until_a_clear(index: PrefixIndex) -> None:
    """A worker whose blocks were given up may hold more than is claimed; once it is empty, all is known again."""
    fill(index, "a", range(1500))
    assert not index.match([*chain_tokens(1, 4), 1])["a"].exact
    assert index.match([*chain_tokens(1, 4), 1])["b"].exact
    index.purge("a")
    assert index.match([*chain_tokens(1, 4), 1])["a"].exact


def test_removals_of_what_was_given_up_do_no_harm(index: PrefixIndex) -> None:
    """The engine's removals find nothing, are counted, and leave nothing behind."""
    fill(index, "a", range(1000))
    for chain in range(1000):
        index.apply("a", BlockRemoved(block_hashes=handles(chain, 64), medium="GPU"))
    assert index.stats("a").resident_now == 0
    assert index.memory.blocks == 0
    assert index.stats("a").unknown_removals == index.memory.forgotten_blocks + index.memory.refused_blocks


def test_runs_without_parent_go_first() -> None:
    """What matches nothing is given up before what does."""
    cap = 2 * MEBIBYTE if backend_name().startswith("native") else 21 * MEBIBYTE  # Python's objects are larger
    index = PrefixIndex(BlockKeyHasher(seed=1), max_bytes=cap)
    index.add_worker("a", block_size=BLOCK)
    fill(index, "a", range(200))
    for chain in range(1000, 1700):
        index.apply("a", stored(chain, 64, parent=chain * 1000 + 999))
    stats = index.stats("a")
    assert stats.dropped_orphan_blocks > 0
    assert index.memory.used_bytes <= cap
    assert index.match([*chain_tokens(1, 64), 1])["a"].hit_blocks == 64
