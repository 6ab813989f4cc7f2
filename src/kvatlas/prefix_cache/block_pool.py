"""All blocks of one engine: who is free, what content is where, and the events that tell about it.

A block leaves the free queue when it is used and returns when nobody uses it; it keeps its content until it is handed
out for something else. So the free queue is the cache, and its order is the eviction order.
"""

from collections.abc import Iterable, Sequence

from kvatlas.errors import PrefixCacheError
from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvatlas.hashing import PublishedKeys, block_extra_keys, external_hash, published_extra_keys
from kvatlas.prefix_cache.block import Block
from kvatlas.prefix_cache.free_queue import FreeQueue
from kvatlas.prefix_cache.hash_map import BlockHashMap
from kvatlas.prefix_cache.hash_view import hashes_at_block_size
from kvatlas.prefix_cache.kv_cache_spec import KVCacheConfig
from kvatlas.prefix_cache.request import Request

__all__ = ["BlockPool"]

MEDIUM = "GPU"


class BlockPool:
    """The blocks, their free queue, the content map of each group, and the event log.

    Source: vLLM 0.32.0 BlockPool (spec/vllm.md 4).
    """

    __slots__ = ("_config", "_events", "blocks", "free_queue", "hash_maps", "null_block")

    def __init__(self, config: KVCacheConfig) -> None:
        self._config = config
        self._events: list[Event] = []
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

    def cached_block(self, digest: bytes, group_id: int) -> Block | None:
        """The block to reuse for this content: the one cached first of those still there."""
        return self.hash_maps[group_id].lookup(digest)

    def touch(self, blocks: Iterable[Block]) -> None:
        """Let one more request use each block. No event: outside, hits are invisible."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

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
            PrefixCacheError: a block already names as long a prefix.

        Source: vLLM 0.32.0 BlockPool.cache_full_blocks (spec/vllm.md 4.7).
        """
        block_size = self._config.groups[group_id].spec.block_size
        hashes = hashes_at_block_size(request.block_hashes, self._config.hash_block_size, block_size)
        hash_map = self.hash_maps[group_id]
        stored = []
        for index in span:
            block = table[index]
            if block.is_null or (mask is not None and not mask[index - span.start]):
                continue
            num_tokens = (index + 1) * block_size
            if block.digest is not None:
                if block.num_hashed_tokens >= num_tokens:
                    raise PrefixCacheError(f"{block} already names {block.num_hashed_tokens} tokens, not {num_tokens}")
                self._forget(block)
            block.digest = digest = hashes[index]
            block.num_hashed_tokens = num_tokens
            block.group_id = group_id
            hash_map.insert(digest, block)
            stored.append(index)
        if self._config.enable_events:
            parent = hashes[span.start - 1] if span.start else None
            self._publish_stored(request, hashes, stored, parent, span, group_id)

    def publish_hit(self, request: Request, num_blocks: int, group_id: int) -> None:
        """Publish the first `num_blocks` blocks of a request as stored once more (`kv_cache_report_mode=full`)."""
        if self._config.enable_events:
            block_size = self._config.groups[group_id].spec.block_size
            hashes = hashes_at_block_size(request.block_hashes, self._config.hash_block_size, block_size)
            span = range(num_blocks)
            self._publish_stored(request, hashes, span, None, span, group_id)

    def _publish_stored(
        self,
        request: Request,
        hashes: Sequence[bytes],
        stored: Sequence[int],
        parent: bytes | None,
        span: range,
        group_id: int,
    ) -> None:
        as_int = self._config.int_block_hashes
        spec = self._config.groups[group_id].spec
        self._events.append(
            BlockStored(
                block_hashes=[external_hash(hashes[index], as_int=as_int) for index in stored],
                parent_block_hash=None if parent is None else external_hash(parent, as_int=as_int),
                token_ids=request.all_token_ids[span.start * spec.block_size : span.stop * spec.block_size],
                block_size=spec.block_size,
                lora_id=request.lora_id,
                medium=MEDIUM,
                lora_name=request.lora_name,
                extra_keys=_published(request, stored, spec.block_size),
                group_idx=group_id,
                kv_cache_spec_kind=spec.kind,
                kv_cache_spec_sliding_window=spec.published_window,
                session_id=request.session_id,
            )
        )

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget the content of these blocks, in use or not; users and queue positions stay.

        Raises:
            PrefixCacheError: an id outside the pool.
        """
        for block_id in block_ids:
            if not 0 <= block_id < len(self.blocks):
                raise PrefixCacheError(f"block ids are 0..{len(self.blocks) - 1}, got {block_id}")
            block = self.blocks[block_id]
            if block.digest is not None:
                self._forget(block)

    def _forget(self, block: Block) -> None:
        digest = block.digest
        assert digest is not None  # noqa: S101 - callers look first
        block.digest = None
        block.num_hashed_tokens = 0
        if self.hash_maps[block.group_id].remove(digest, block) and self._config.enable_events:
            handle = external_hash(digest, as_int=self._config.int_block_hashes)
            self._events.append(BlockRemoved(block_hashes=[handle], medium=MEDIUM, group_idx=block.group_id))

    def reset(self) -> bool:
        """Forget all content, keeping the queue order. Refused (False, nothing changes) while any block is used."""
        if self.free_queue.num_blocks != len(self.blocks) - 1:
            return False
        self.hash_maps = tuple(BlockHashMap() for _ in self.hash_maps)
        for block in self.blocks:
            block.digest = None
            block.num_hashed_tokens = 0
        if self._config.enable_events:
            self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[Event]:
        """The events since the last call, in order of happening."""
        events, self._events = self._events, []
        return events


def _published(request: Request, indexes: Sequence[int], block_size: int) -> list[PublishedKeys | None] | None:
    """Extra keys of the listed blocks as events carry them; None when no block is listed."""
    if not indexes:
        return None
    if request.extras.is_empty:
        return [None] * len(indexes)
    starts = (index * block_size for index in indexes)
    return [published_extra_keys(block_extra_keys(request.extras, start, start + block_size)[0]) for start in starts]
