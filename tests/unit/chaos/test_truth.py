"""What an engine truly holds, by block keys."""

import pytest

from kvatlas.chaos import KeyBook, TrueCache
from kvatlas.errors import IndexStateError
from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvatlas.hashing import BlockKeyHasher

HASHER = BlockKeyHasher(seed=1)
TOKENS = list(range(12))
KEYS = list(HASHER.chain(TOKENS, 4))


def stored(first: int, count: int) -> BlockStored:
    tokens = TOKENS[first * 4 : (first + count) * 4]
    return BlockStored(list(range(first + 1, first + count + 1)), first or None, tokens, 4, medium="GPU")


def test_events_become_contents_under_the_index_s_keys() -> None:
    """Stores, copies, removals and clears; the leading run ends at a hole."""
    truth = TrueCache(KeyBook(HASHER))
    truth.apply([stored(0, 2), stored(2, 1), stored(2, 1)])
    assert list(truth.keys) == KEYS
    assert (bytes(truth.resident), truth.leading(KEYS), truth.stored_blocks) == (b"\1\1\1", 3, 4)
    truth.apply([BlockRemoved([3])])
    assert truth.leading(KEYS) == 3
    truth.apply([BlockRemoved([3, 1])])
    assert (bytes(truth.resident), truth.leading(KEYS), truth.holds(KEYS[1])) == (b"\0\1\0", 0, True)
    truth.apply([AllBlocksCleared()])
    assert (bytes(truth.resident), len(truth)) == (b"\0\0\0", 0)


def test_pruning_keeps_what_is_held_or_claimed() -> None:
    """Positions move together with the bytes."""
    truth = TrueCache(KeyBook(HASHER))
    truth.apply([stored(0, 3), BlockRemoved([1, 2])])
    truth.prune(bytes([0, 2, 2]))
    assert (list(truth.keys), bytes(truth.resident)) == (KEYS[1:], b"\0\1")
    truth.apply([stored(0, 1), BlockRemoved([3])])
    assert (list(truth.keys), bytes(truth.resident)) == ([*KEYS[1:], KEYS[0]], b"\0\0\1")


def test_books_that_do_not_fit_the_pool_are_refused() -> None:
    """An oracle that is wrong must not judge."""
    truth = TrueCache(KeyBook(HASHER))
    truth.apply([stored(0, 2)])
    truth.verify(2)
    with pytest.raises(IndexStateError, match="2 blocks, by its pool 3"):
        truth.verify(3)
