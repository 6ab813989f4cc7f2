"""Orphans find their place where a prompt's own digests are what they wait for."""

import pytest

from kvatlas.events import BlockRemoved, BlockStored
from kvatlas.hashing import BlockKeyHasher, RequestExtras, VllmHasher, external_hash
from kvatlas.index import Healed, PrefixIndex

BLOCK = 4
PROMPT = list(range(100, 133))


def handles(algo: str = "sha256", seed: str | None = None, *, as_int: bool = True) -> list[int | bytes]:
    """What an engine calls the prompt's eight blocks."""
    digests = VllmHasher(algo, seed).hash_tokens(PROMPT, BLOCK)
    return [external_hash(digest, as_int=as_int) for digest in digests]


def tail_of(names: list[int | bytes], first: int) -> BlockStored:
    """The prompt's blocks from `first` on, under a parent that no event named."""
    return BlockStored(
        block_hashes=names[first:],
        parent_block_hash=names[first - 1],
        token_ids=PROMPT[first * BLOCK : len(names) * BLOCK],
        block_size=BLOCK,
        medium="GPU",
    )


@pytest.fixture(name="index")
def _index() -> PrefixIndex:
    index = PrefixIndex(BlockKeyHasher(seed=1))
    index.add_worker("w", block_size=BLOCK)
    return index


@pytest.mark.parametrize(
    ("algo", "seed", "as_int"),
    [("sha256", None, True), ("sha256_cbor", "0", True), ("sha256_cbor", None, False), ("xxhash_cbor", "0", True)],
)
def test_orphans_are_placed(index: PrefixIndex, algo: str, seed: str | None, *, as_int: bool) -> None:
    """Whatever common setting an engine hashes with, its orphans' parent is recognised; removals are then exact."""
    names = handles(algo, seed, as_int=as_int)
    index.apply("w", tail_of(names, 2))
    assert index.claims("w", PROMPT) == bytes(8)
    assert index.heal("w", PROMPT, 8, index.moment("w")) == Healed(adopted_blocks=2, placed_blocks=6)
    assert index.claims("w", PROMPT) == bytes([2] * 8)
    index.apply("w", BlockRemoved([names[7]], medium="GPU"))
    assert index.claims("w", PROMPT) == bytes([2] * 7 + [0])


def test_all_that_hangs_from_them_is_placed(index: PrefixIndex) -> None:
    """A run under a placed run follows, and so does what is stored there later."""
    names = handles()
    index.apply("w", tail_of(names[:6], 4))
    index.apply("w", tail_of(names[:7], 6))
    assert index.heal("w", PROMPT[:18], 0, index.moment("w")).placed_blocks == 3
    assert index.claims("w", PROMPT) == bytes([0] * 4 + [2] * 3 + [0])
    index.apply("w", tail_of(names, 7))
    assert index.claims("w", PROMPT) == bytes([0] * 4 + [2] * 4)


def test_equal_tokens_under_another_parent_are_not_placed(index: PrefixIndex) -> None:
    """Only the digest proves: a salted prompt's blocks have the same tokens and are others."""
    index.apply("w", tail_of(handles(), 2))
    salted = RequestExtras(cache_salt="tenant")
    assert index.heal("w", PROMPT, 8, index.moment("w"), extras=salted).placed_blocks == 0
    assert index.stats("w").unkeyed_now == 6


def test_unknown_ways_to_hash_are_given_up(index: PrefixIndex) -> None:
    """After sixteen prompts without a match nobody tries again, until another life."""
    names = handles("xxhash_cbor", "77")
    index.apply("w", tail_of(names, 2))
    for _ in range(16):
        assert index.heal("w", PROMPT, 8, index.moment("w")).placed_blocks == 0
    index.apply("w", tail_of(handles(), 3))
    assert index.heal("w", PROMPT, 8, index.moment("w")).placed_blocks == 0
    index.purge("w")
    index.apply("w", tail_of(handles(), 3))
    assert index.heal("w", PROMPT, 12, index.moment("w")).placed_blocks == 5
