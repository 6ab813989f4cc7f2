"""Blocks that can be hit at a prefix that ends inside them: names beside names, promotion, copies."""

import pytest

from kvatlas.errors import PrefixCacheError
from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvatlas.hashing import RequestExtras, hash64
from kvatlas.prefix_cache import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from support.prefix_cache_groups import Cache

PROMPT = list(range(100, 116))


@pytest.fixture
def cache():
    """Blocks of 8 tokens, hashes of 2."""
    return Cache(FullAttentionSpec(8), MambaSpec(8), hash_block_size=2, num_blocks=8)


@pytest.fixture
def pool(cache):
    return cache.manager._pool


def test_a_name_of_its_own(cache, pool):
    """A blank block takes the prefix as its name; the event speaks of one hashed block."""
    request = cache.request("a", PROMPT, extras=RequestExtras(cache_salt="x"))
    (block,) = pool.get_new_blocks(1)
    assert pool.cache_partial_block(request, block, 6, 0) == request.block_hashes[2]
    (event,) = pool.events.take()
    assert (event.block_size, event.token_ids, event.extra_keys) == (2, PROMPT[4:6], [None])
    assert event.block_hashes == [hash64(request.block_hashes[2])]
    assert event.parent_block_hash == hash64(request.block_hashes[1])
    assert pool.cache_partial_block(request, block, 6, 0) == request.block_hashes[2]
    assert pool.events.take() == []
    assert pool.hash_maps[0].lookup(request.block_hashes[2]) is block


def test_the_first_hashed_block_has_no_parent(cache, pool):
    """A prefix of one hashed block starts the chain, salt and all."""
    request = cache.request("a", PROMPT, extras=RequestExtras(cache_salt="x"))
    pool.cache_partial_block(request, pool.get_new_blocks(1)[0], 2, 0)
    (event,) = pool.events.take()
    assert (event.parent_block_hash, event.extra_keys) == (None, [("x",)])


def test_a_longer_prefix_replaces_a_shorter_one(cache, pool):
    """What the block held at a shorter prefix is gone once it holds a longer one."""
    request = cache.request("a", PROMPT)
    (block,) = pool.get_new_blocks(1)
    pool.cache_partial_block(request, block, 2, 0)
    pool.cache_partial_block(request, block, 4, 0)
    assert [type(event) for event in pool.events.take()] == [BlockStored, BlockRemoved, BlockStored]
    assert pool.digests(block) == [request.block_hashes[1]]


def test_shorter_prefixes_stand_beside(cache, pool):
    """A full block can be found by a shorter prefix as well; both names go when it does, one removal each."""
    request = cache.request("a", PROMPT)
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks(request, [block], range(1), 0)
    pool.cache_partial_block(request, block, 4, 0)
    pool.cache_partial_block(request, block, 6, 0)
    assert pool.num_cached_keys == 3
    assert pool.cache_partial_block(request, block, 4, 0) == request.block_hashes[1]
    pool.events.take()
    pool.evict(block)
    removals = [event.block_hashes for event in pool.events.take()]
    assert removals == [[hash64(request.block_hashes[index])] for index in (3, 1, 2)]
    assert (pool.num_cached_keys, pool.digests(block)) == (0, [])
    pool.cache_full_blocks(request, [block], range(1), 0)
    assert pool.digests(block) == [request.block_hashes[3]]


def test_promotion_to_a_full_block(cache, pool):
    """A block that fills up is known as full from then on, and by nothing else."""
    request = cache.request("a", PROMPT)
    (block,) = pool.get_new_blocks(1)
    pool.cache_partial_block(request, block, 4, 0)
    pool.events.take()
    pool.cache_full_blocks(request, [block], range(1), 0)
    removal, store = pool.events.take()
    assert removal.block_hashes == [hash64(request.block_hashes[1])]
    assert store.block_hashes == [hash64(request.block_hashes[3])]
    assert pool.num_cached_keys == 1


def test_replacing_what_a_block_holds(cache, pool):
    """Content that was overwritten is forgotten first, even where the new name equals the old one."""
    request = cache.request("a", PROMPT)
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks(request, [block], range(1), 1)
    pool.events.take()
    pool.cache_partial_block(request, block, 8, 1, replace=True)
    pool.cache_partial_block(request, block, 6, 1, replace=True)
    assert [type(event) for event in pool.events.take()] == [BlockRemoved, BlockStored] * 2
    assert (block.num_hashed_tokens, pool.digests(block)) == (6, [request.block_hashes[2]])


def test_names_move_with_the_content(cache, pool):
    """All names of a block go over to its copy, without events; the copy must be blank."""
    request = cache.request("a", PROMPT)
    block, copy = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, [block], range(1), 0)
    pool.cache_partial_block(request, block, 6, 0)
    pool.events.take()
    pool.move_digests(block, copy)
    assert pool.events.take() == []
    assert (block.digest, pool.digests(copy)) == (None, [request.block_hashes[3], request.block_hashes[2]])
    assert copy.num_hashed_tokens == 8
    assert pool.is_writable(block)
    assert not pool.is_writable(copy)
    pool.cache_full_blocks(cache.request("b", range(8)), [block], range(1), 0)
    with pytest.raises(PrefixCacheError, match="holds content of its own"):
        pool.move_digests(copy, block)


def test_a_reset_forgets_all_names(cache, pool):
    """After a reset no name of any block is left."""
    request = cache.request("a", PROMPT)
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(request, blocks, range(1), 0)
    pool.cache_partial_block(request, blocks[0], 6, 0)
    pool.free_blocks(blocks)
    pool.events.take()
    assert pool.reset()
    assert pool.events.take() == [AllBlocksCleared()]
    assert pool.num_cached_keys == 0
    assert pool.get_new_blocks(7) is not None
    assert pool.events.take() == []


def test_what_cannot_be_named(cache, pool):
    """The null block, prefixes between hashes, and tokens that are not hashed."""
    request = cache.request("a", PROMPT)
    (block,) = pool.get_new_blocks(1)
    assert pool.cache_partial_block(request, pool.null_block, 4, 0) is None
    for num_tokens in (0, 3, 18):
        with pytest.raises(PrefixCacheError, match=f"a prefix of {num_tokens} tokens"):
            pool.cache_partial_block(request, block, num_tokens, 0)
    with pytest.raises(PrefixCacheError, match="give the request a hasher"):
        pool.cache_full_blocks(request, [block] * 3, range(3), 0)


def test_prompt_tails_of_full_attention():
    """The block in which a prompt ends is found by all of the prompt's hashes but what a resend computes again."""
    for length, hit in ((15, 14), (16, 14), (17, 16), (12, 10), (2, 0), (3, 2)):
        cache = Cache(FullAttentionSpec(8), MambaSpec(8), hash_block_size=2, retention_interval=None)
        prompt = [*PROMPT, 1]
        request = cache.request("a", prompt[:length])
        ends = [end for end in (8, 16) if end < length] + [end for end in ((length - 1) // 2 * 2,) if end]
        cache.admit(request, *sorted({*ends, length}))
        cache.manager.new_step_starts()
        assert cache.look_up(prompt[:length])[0] == hit, length


def test_tail_beside_a_window_is_published_once():
    """The tail is named again at every step and published the first time only."""
    cache = Cache(FullAttentionSpec(8), SlidingWindowSpec(4, 8))
    request = cache.run("a", PROMPT[:15])
    cache.decode(request, *range(4))
    tails = [
        event for event in cache.manager.take_events() if getattr(event, "block_size", 0) == 4 and event.group_idx == 0
    ]
    assert [event.token_ids for event in tails] == [PROMPT[8:12]]
