"""The parts of the prefix cache alone: queue, map, view, configuration, misuse."""

import pytest

from kvatlas.errors import ConfigError, PrefixCacheError
from kvatlas.prefix_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheManager, KVCacheSpec
from kvatlas.prefix_cache.block import Block
from kvatlas.prefix_cache.block_pool import BlockPool
from kvatlas.prefix_cache.free_queue import FreeQueue
from kvatlas.prefix_cache.hash_map import BlockHashMap
from kvatlas.prefix_cache.hash_view import hashes_at_block_size
from kvatlas.prefix_cache.hybrid_coordinator import make_coordinator
from support.prefix_cache import admit, make_manager, make_request

GROUP = KVCacheGroup(FullAttentionSpec(4))


def config(**settings):
    return KVCacheConfig(
        **{"num_blocks": 5, "groups": (GROUP,), "hash_block_size": 4, "max_model_len": 100, **settings}
    )


def ids(blocks):
    return [block.block_id for block in blocks]


def test_queue_order():
    """Taken from the front, added at either end in the order given, removed from the middle."""
    blocks = [Block(i) for i in range(6)]
    queue = FreeQueue(blocks)
    assert ids(queue) == [0, 1, 2, 3, 4, 5]
    assert ids(queue.popleft_n(2)) == [0, 1]
    queue.remove(blocks[4])
    queue.append_n([blocks[1], blocks[0]])
    queue.prepend_n([blocks[4]])
    assert ids(queue) == [4, 2, 3, 5, 1, 0]
    assert queue.num_blocks == 6
    assert queue.popleft_n(0) == []
    assert ids(queue.popleft_n(6)) == [4, 2, 3, 5, 1, 0]
    assert ids(queue) == []
    queue.append_n([])
    assert queue.num_blocks == 0


def test_queue_misuse():
    """Too many blocks, or a block that is not queued, is refused and changes nothing."""
    queue = FreeQueue([Block(0)])
    with pytest.raises(PrefixCacheError, match="2 free blocks were asked for but only 1"):
        queue.popleft_n(2)
    with pytest.raises(PrefixCacheError, match="not in the free queue"):
        queue.remove(Block(9))
    assert queue.num_blocks == 1


def test_map_keeps_duplicates_in_order_of_insertion():
    """A lookup gives the oldest copy still there; removing any copy leaves the others."""
    hash_map = BlockHashMap()
    a, b, c = Block(1), Block(2), Block(3)
    for block in (a, b, c):
        hash_map.insert(b"x", block)
    hash_map.insert(b"x", a)
    assert len(hash_map) == 1
    assert hash_map.remove(b"x", b)
    assert hash_map.lookup(b"x") is a
    assert hash_map.remove(b"x", a)
    assert hash_map.lookup(b"x") is c
    assert not hash_map.remove(b"x", a)
    hash_map.insert(b"x", a)
    assert hash_map.lookup(b"x") is c
    assert hash_map.remove(b"x", c)
    assert hash_map.remove(b"x", a)
    assert hash_map.lookup(b"x") is None
    assert not hash_map.remove(b"x", a)
    assert len(hash_map) == 0
    for block in (c, b, a):
        hash_map.insert(b"x", block)
    assert hash_map.remove(b"x", c)
    assert hash_map.lookup(b"x") is b


def test_12_hashes_at_a_coarser_block_size():
    """Scenario 12: block i of 8 tokens is named by fine hash 2i + 1; 5 fine hashes make 2."""
    fine = [bytes([i]) for i in range(5)]
    assert hashes_at_block_size(fine, 4, 8) == [b"\x01", b"\x03"]
    assert hashes_at_block_size(fine, 4, 4) is fine
    with pytest.raises(PrefixCacheError, match="multiple"):
        hashes_at_block_size(fine, 4, 6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"groups": ()}, "at least one group"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"watermark": 1.0}, "watermark"),
        ({"hash_block_size": 0}, "hash_block_size"),
        ({"hash_block_size": 3}, "multiple of"),
        ({"use_eagle": True, "num_prefill_lookahead_tokens": 5}, "num_prefill_lookahead_tokens"),
    ],
)
def test_bad_configuration(settings, message):
    """Each impossible setting is named."""
    with pytest.raises(ConfigError, match=message):
        config(**settings)


def test_unsupported_configuration():
    """Kinds, group counts and hash sizes that have no rules are refused when the cache is built."""
    with pytest.raises(ConfigError, match="block_size"):
        FullAttentionSpec(0)
    for settings, message in [
        ({"hash_block_size": 2}, "must equal its block size"),
        ({"groups": (KVCacheGroup(KVCacheSpec(4)),)}, "supported kinds"),
    ]:
        bad = config(**settings)
        with pytest.raises(ConfigError, match=message):
            make_coordinator(bad, BlockPool(bad))


def test_eagle_groups():
    """Without a flag all groups give up a block, with one only that group."""
    flagged = KVCacheGroup(FullAttentionSpec(8), is_eagle=True)
    assert config().eagle_group_ids == frozenset()
    assert config(use_eagle=True, groups=(GROUP, GROUP)).eagle_group_ids == {0, 1}
    both = config(use_eagle=True, groups=(GROUP, flagged), num_prefill_lookahead_tokens=3)
    assert both.eagle_group_ids == {1}
    assert (both.scheduler_block_size, both.num_reprefillable_tokens) == (8, 2)


def test_without_caching_several_groups_allocate():
    """With caching off each group allocates for itself from one pool."""
    manager = KVCacheManager(config(groups=(GROUP, KVCacheGroup(FullAttentionSpec(8))), enable_caching=False))
    request = make_request("a", range(8), hasher=None)
    assert manager.allocate_slots(request, 8) == ([1, 2], [3])
    assert manager.block_ids("a") == ([1, 2], [3])
    manager.free(request)
    assert manager.num_free_blocks == 4


def test_reprefillable_tokens_are_not_cached():
    """A multi-module draft model prefills its last tokens again: they are cached later."""
    manager = make_manager(use_eagle=True, num_prefill_lookahead_tokens=3)
    admit(manager, make_request("a", range(9)))
    assert manager.num_cached_keys == 1


def test_double_free_is_refused():
    """A block nobody uses cannot be let go of."""
    pool = BlockPool(config())
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(PrefixCacheError, match="freed twice"):
        pool.free_blocks(blocks)
    pool.free_blocks([pool.null_block])
    pool.touch([pool.null_block])
    assert pool.num_free_blocks == 4


def test_pool_misuse():
    """Ids outside the pool and a second hash for the same prefix are refused."""
    pool = BlockPool(config())
    with pytest.raises(PrefixCacheError, match=r"0\.\.4"):
        pool.evict_blocks([5])
    request = make_request("a", range(4))
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(request, blocks, range(1), 0)
    assert pool.hash_maps[0].lookup(request.block_hashes[0]) is blocks[0]
    with pytest.raises(PrefixCacheError, match="already names 4 tokens"):
        pool.cache_full_blocks(request, blocks, range(1), 0)


def test_masked_blocks_are_not_hashed_but_the_range_is_told():
    """All blocks masked: an event without hashes or extra keys, with all tokens of the range."""
    pool = BlockPool(config())
    request = make_request("a", range(8))
    table = [pool.null_block, *pool.get_new_blocks(1)]
    pool.cache_full_blocks(request, table, range(2), 0, [True, False])
    (event,) = pool.events.take()
    assert (event.block_hashes, event.extra_keys, event.token_ids) == ([], None, list(range(8)))
    assert pool.num_cached_keys == 0


def test_hits_can_be_adopted_once():
    """A request that holds blocks cannot adopt hit blocks again."""
    manager = make_manager()
    admit(manager, make_request("a", range(9)))
    request = make_request("b", range(9))
    found = manager.get_computed_blocks(request)
    admit(manager, request)
    with pytest.raises(PrefixCacheError, match="admitted before"):
        manager.allocate_slots(request, 1, new_computed_tokens=8, computed_blocks=found)


def test_unknown_requests():
    """Freeing a request that holds nothing does nothing; its table is empty."""
    manager = make_manager()
    manager.free(make_request("a", range(9)))
    assert manager.block_ids("a") == ([],)
    assert manager.num_free_blocks == 10


def test_reprs_are_readable():
    """Blocks and requests print what a debugging reader wants."""
    block = Block(3)
    assert repr(block) == "Block(3, ref_cnt=0, digest=None)"
    block.digest = b"\xab" * 32
    assert "abababab" in repr(block)
    assert repr(make_request("a", range(9))) == "Request('a', 0/9 tokens, WAITING)"
