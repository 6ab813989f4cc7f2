"""All blocks of one engine: who is free, what content is where, and the events that tell about it.

A block leaves the free queue when it is used and returns when nobody uses it; it keeps its content until it is handed
out for something else. So the free queue is the cache, and its order is the eviction order.
"""

from collections.abc import Iterable, Sequence
from itertools import compress

from kvatlas.errors import PrefixCacheError
from kvatlas.prefix_cache.block import Block
from kvatlas.prefix_cache.event_log import EventLog
from kvatlas.prefix_cache.free_queue import FreeQueue
from kvatlas.prefix_cache.hash_map import BlockHashMap
from kvatlas.prefix_cache.kv_cache_config import KVCacheConfig
from kvatlas.prefix_cache.request import Request
from kvatlas.prefix_cache.residency import ResidencyMetrics

__all__ = ["BlockPool"]


class BlockPool:
    """The blocks, their free queue, the content map of each group, and the event log.

    A block names its longest content itself (`Block.digest`). A block that can also be hit at a shorter prefix has
    further digests in a side table.

    Source: vLLM 0.32.0 BlockPool.
    """

    __slots__ = ("_config", "_more_digests", "_residency", "blocks", "events", "free_queue", "hash_maps", "null_block")

    def __init__(self, config: KVCacheConfig, residency: ResidencyMetrics | None = None) -> None:
        self._config = config
        self._residency = residency
        self._more_digests: dict[int, list[bytes]] = {}
        self.events = EventLog(config)
        self.blocks = [Block(block_id) for block_id in range(config.num_blocks)]
        self.free_queue = FreeQueue(self.blocks)
        self.hash_maps = tuple(BlockHashMap() for _ in config.groups)
        self.null_block = self.free_queue.popleft_n(1)[0]
        self.null_block.is_null = True

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody uses, cached or not."""
        return self.free_queue.num_blocks

    @property
    def num_cached_keys(self) -> int:
        """Distinct (digest, group) pairs that can be hit."""
        return sum(map(len, self.hash_maps))

    @property
    def usage(self) -> float:
        """Used fraction of the usable blocks; cached blocks that nobody uses count as free."""
        usable = len(self.blocks) - 1
        return 1.0 - self.free_queue.num_blocks / usable if usable else 0.0

    def digests(self, block: Block) -> list[bytes]:
        """Everything a block can be hit by, its longest content first."""
        if block.digest is None:
            return []
        return [block.digest, *self._more_digests.get(block.block_id, ())]

    def is_writable(self, block: Block) -> bool:
        """Whether its only user may change what it holds: nobody else uses it or can find it."""
        return not block.is_null and block.ref_cnt == 1 and block.digest is None

    def touch(self, blocks: Iterable[Block]) -> None:
        """Let one more request use each block. No event: outside, hits are invisible."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1
            if self._residency is not None:
                self._residency.accessed(block.block_id)

    def get_new_blocks(self, count: int) -> list[Block]:
        """Hand out the blocks at the front of the queue; content they held is forgotten, one event for each.

        Raises:
            PrefixCacheError: fewer blocks are free.
        """
        blocks = self.free_queue.popleft_n(count)
        for block in blocks:
            if block.digest is not None:
                self._forget(block)
            block.ref_cnt = 1
        if self._residency is not None:
            for block in blocks:
                if self._config.enable_caching:
                    self._residency.evicted(block.block_id)
                self._residency.allocated(block.block_id)
        return blocks

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        """Let one request go of each block; the first given is the first to be evicted.

        Blocks without content go to the front of the queue, where they are reused before anything is evicted; blocks
        with content to the end.

        Raises:
            PrefixCacheError: a block is freed more often than it is used.
        """
        blank: list[Block] = []
        cached: list[Block] = []
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt <= 0:
                raise PrefixCacheError(f"{block} is freed twice: nobody uses it")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (blank if block.digest is None else cached).append(block)
        self.free_queue.prepend_n(blank)
        self.free_queue.append_n(cached)

    def cache_full_blocks(
        self, request: Request, table: Sequence[Block], span: range, group_id: int, mask: Sequence[bool] | None = None
    ) -> None:
        """Give complete blocks their digests, so that later requests find them, and publish one BlockStored.

        The event is published even when every block is masked: it then lists no hashes but all tokens of the span.

        Args:
            request: whose tokens fill the blocks.
            table: the request's blocks in this group.
            span: block indexes to cache; a step of 1.
            group_id: the KV cache group.
            mask: for each index of the span, whether its block can ever be hit; None = all.

        Raises:
            PrefixCacheError: a block already names as long a prefix, or the tokens are not hashed yet.

        Source: vLLM 0.32.0 BlockPool.cache_full_blocks.
        """
        block_size = self._config.block_sizes[group_id]
        factor = block_size // self._config.hash_block_size
        hashes = request.block_hashes
        if span.stop * factor > len(hashes):
            raise PrefixCacheError(
                f"{request} has hashes of {len(hashes)} blocks; {span.stop * factor} are needed to cache {span.stop} "
                f"blocks of {block_size} tokens: give the request a hasher, and cache what it has only"
            )
        digests = hashes[(span.start + 1) * factor - 1 : span.stop * factor : factor]
        ends = range((span.start + 1) * block_size, (span.stop + 1) * block_size, block_size)
        candidates: Iterable[tuple[int, Block, bytes]] = zip(ends, table[span.start : span.stop], digests, strict=False)
        if mask is not None:
            candidates = compress(candidates, mask)
        insert = self.hash_maps[group_id].insert
        stored = []
        for end, block, digest in candidates:
            if block.is_null:
                continue
            if block.digest is not None:
                if block.num_hashed_tokens >= end:
                    raise PrefixCacheError(f"{block} already names {block.num_hashed_tokens} tokens, not {end}")
                self._forget(block)
            block.digest = digest
            block.num_hashed_tokens = end
            block.group_id = group_id
            insert(digest, block)
            stored.append((end - block_size, digest))
        parent = hashes[span.start * factor - 1] if span.start else None
        tokens = range(span.start * block_size, span.stop * block_size)
        self.events.stored(request, stored, parent, tokens, block_size, group_id)

    def cache_partial_block(
        self, request: Request, block: Block, num_tokens: int, group_id: int, *, replace: bool = False
    ) -> bytes | None:
        """Let a block be hit by a prefix that ends inside it; publish one BlockStored, of one *hashed* block.

        Content of a shorter prefix is forgotten; beside that of a longer one the new digest goes to the side table.

        Args:
            request: whose tokens these are.
            block: holds the end of the prefix.
            num_tokens: length of the prefix, a multiple of the hash block size.
            group_id: the KV cache group.
            replace: the block's content has changed, so all it was known by is forgotten first.

        Returns:
            The digest, None for the null block.

        Raises:
            PrefixCacheError: the prefix does not end with a hashed block.

        Source: vLLM 0.32.0 BlockPool.cache_partial_block.
        """
        if block.is_null:
            return None
        hash_block_size = self._config.hash_block_size
        count, rest = divmod(num_tokens, hash_block_size)
        if rest or not 0 < count <= len(request.block_hashes):
            raise PrefixCacheError(
                f"a prefix of {num_tokens} tokens does not end with one of the {len(request.block_hashes)} hashed "
                f"blocks of {hash_block_size} tokens of {request}"
            )
        digest = request.block_hashes[count - 1]
        known = digest in self.digests(block)
        if replace or (not known and block.digest is not None and block.num_hashed_tokens < num_tokens):
            self._forget(block)
            known = False
        if not known:
            self._name(block, digest, num_tokens, group_id)
            parent = request.block_hashes[count - 2] if count > 1 else None
            tokens = range(num_tokens - hash_block_size, num_tokens)
            self.events.stored(request, [(tokens.start, digest)], parent, tokens, hash_block_size, group_id)
        return digest

    def _name(self, block: Block, digest: bytes, num_tokens: int, group_id: int) -> None:
        """Let a block be found by one more digest."""
        if block.digest is None:
            block.digest = digest
            block.num_hashed_tokens = num_tokens
            block.group_id = group_id
        else:
            self._more_digests.setdefault(block.block_id, []).append(digest)
        self.hash_maps[group_id].insert(digest, block)

    def _forget(self, block: Block) -> None:
        """Take a block out of the map under all its digests, one event for each."""
        for digest in self._take_digests(block):
            self.events.removed(digest, block.group_id)

    def _take_digests(self, block: Block) -> list[bytes]:
        """Take a block out of the map; return the digests it was found by."""
        digests = self.digests(block)
        remove = self.hash_maps[block.group_id].remove
        self._more_digests.pop(block.block_id, None)
        block.digest = None
        block.num_hashed_tokens = 0
        return [digest for digest in digests if remove(digest, block)]

    def move_digests(self, source: Block, destination: Block) -> None:
        """Let `destination`, which will hold a copy, be found instead of `source`. No event: the content stays cached.

        Raises:
            PrefixCacheError: the destination is known by something already.

        Source: vLLM 0.32.0 BlockPool.move_block_hashes.
        """
        if destination.digest is not None:
            raise PrefixCacheError(f"{destination} holds content of its own, it cannot take over that of {source}")
        num_tokens = source.num_hashed_tokens
        for digest in self._take_digests(source):
            self._name(destination, digest, num_tokens, source.group_id)

    def publish_hit(self, request: Request, num_blocks: int, group_id: int) -> None:
        """Publish the first `num_blocks` blocks of a request as stored once more (`kv_cache_report_mode=full`).

        All of them, also those a sliding window has dropped and that are not resident.

        Raises:
            PrefixCacheError: where the engine dies of the report: its block size is not multiplied by the ranks of
                decode context parallelism, and a hit that ends inside a block has no hash for the whole block.

        Source: vLLM 0.32.0 BlockPool.emit_cached_block_events.
        """
        if not self._config.enable_events:
            return
        block_size = self._config.groups[group_id].spec.block_size
        factor, rest = divmod(block_size, self._config.hash_block_size)
        if rest or num_blocks * factor > len(request.block_hashes):
            raise PrefixCacheError(
                f"kv_cache_report_mode=full ends a vLLM 0.32.0 engine here: {num_blocks} blocks of {block_size} tokens "
                f"(group {group_id}) cannot be named by {len(request.block_hashes)} hashes of "
                f"{self._config.hash_block_size} tokens: report incrementally"
            )
        digests = request.block_hashes[factor - 1 : num_blocks * factor : factor]
        tokens = range(num_blocks * block_size)
        blocks = list(zip(tokens[::block_size], digests, strict=True))
        self.events.stored(request, blocks, None, tokens, block_size, group_id)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget the content of these blocks, in use or not; users and queue positions stay.

        Raises:
            PrefixCacheError: an id outside the pool.
        """
        for block_id in block_ids:
            if not 0 <= block_id < len(self.blocks):
                raise PrefixCacheError(f"block ids are 0..{len(self.blocks) - 1}, got {block_id}")
            self.evict(self.blocks[block_id])

    def evict(self, block: Block) -> None:
        """Forget the content of one block."""
        if self._residency is not None:
            self._residency.evicted(block.block_id)
        if block.digest is not None:
            self._forget(block)

    def reset(self) -> bool:
        """Forget all content, keeping the queue order. Refused (False, nothing changes) while any block is used."""
        if self.free_queue.num_blocks != len(self.blocks) - 1:
            return False
        for hash_map in self.hash_maps:
            hash_map.clear()
        self._more_digests.clear()
        for block in self.blocks:
            block.digest = None
            block.num_hashed_tokens = 0
        if self._residency is not None:
            self._residency.reset()
        self.events.cleared()
        return True
