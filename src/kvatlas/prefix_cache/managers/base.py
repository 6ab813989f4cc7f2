"""The rules every kind of layer shares: tables, reference counts, what an allocation needs, what becomes cached.

A manager serves one KV cache group. Kinds differ in three questions, which subclasses answer: which cached blocks make
a hit (`find_hit`), which tokens are no longer needed (`num_skipped_tokens`), and which blocks can ever be hit
(`reachable_mask`). All managers share one pool.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvatlas.errors import PrefixCacheError
from kvatlas.prefix_cache.block import Block
from kvatlas.prefix_cache.block_pool import BlockPool
from kvatlas.prefix_cache.kv_cache_spec import KVCacheConfig
from kvatlas.prefix_cache.request import Request

__all__ = ["SingleTypeManager", "cdiv"]


def cdiv(dividend: int, divisor: int) -> int:
    """Quotient rounded up: blocks that hold `dividend` tokens."""
    return -(-dividend // divisor)


class SingleTypeManager(ABC):
    """Block tables of one group.

    Attributes:
        tables: request id -> its blocks, first token first; NULL blocks stand for positions that need no memory.
        num_cached_blocks: request id -> leading blocks already cached or skipped; its presence means "admitted before".

    Source: vLLM 0.32.0 SingleTypeKVCacheManager (spec/vllm.md 5.1).
    """

    max_admission_blocks: int | None = None
    """Most blocks a request can hold at a time, for kinds that free behind a window; None = its whole length."""

    def __init__(self, config: KVCacheConfig, group_id: int, pool: BlockPool) -> None:
        self.group_id = group_id
        self.spec = config.groups[group_id].spec
        self.block_size = self.spec.block_size
        self.use_eagle = group_id in config.eagle_group_ids
        self.tables: dict[str, list[Block]] = {}
        self.num_cached_blocks: dict[str, int] = {}
        self._pool = pool
        self._enable_caching = config.enable_caching

    @abstractmethod
    def find_hit(
        self, hashes: Sequence[bytes], max_tokens: int, alignment_tokens: int, *, drop_eagle: bool
    ) -> tuple[list[Block], int]:
        """Return the cached blocks a request can start from, and how many tokens they cover.

        Args:
            hashes: the request's block hashes at this group's block size.
            max_tokens: longest hit allowed.
            alignment_tokens: the hit is a multiple of this.
            drop_eagle: give up the last block, for the draft model.

        Cost: O(blocks hit) for full attention.
        """

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens no later token attends to, once this many are computed. Full attention: none."""
        del num_computed_tokens
        return 0

    def reachable_mask(self, request: Request, span: range) -> Sequence[bool] | None:
        """For each block of the span, whether a lookup can ever end at it; None = all."""
        del request, span
        return None

    def new_step_starts(self) -> None:  # noqa: B027 - most kinds have nothing to do
        """A scheduler step begins. For kinds whose rules depend on what happened in the same step."""

    def num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, hits: Sequence[Block], computed_tokens: int, *, capped: bool = False
    ) -> int:
        """Return how many blocks leave the free queue if `num_tokens` get slots: new ones and free hit blocks.

        Args:
            request_id: the request.
            num_tokens: tokens that need a slot, counted from the start of the sequence.
            hits: blocks about to be adopted.
            computed_tokens: tokens computed or loaded so far, `hits` included.
            capped: count at most `max_admission_blocks`.
        """
        required = cdiv(num_tokens, self.block_size)
        if capped and self.max_admission_blocks is not None:
            required = min(required, self.max_admission_blocks)
        table = self.tables.get(request_id)
        have = len(table) if table is not None else 0
        if request_id in self.num_cached_blocks:
            if hits:
                raise PrefixCacheError(f"request {request_id!r} was admitted before, it cannot adopt hit blocks again")
            return max(required - have, 0)
        skipped = self.num_skipped_tokens(computed_tokens) // self.block_size
        new = max(required - max(skipped, len(hits) + have), 0)
        if not hits:
            return new
        return new + sum(block.ref_cnt == 0 and not block.is_null for block in hits[max(0, skipped - have) :])

    def adopt_hits(self, request_id: str, hits: Sequence[Block], computed_tokens: int) -> None:
        """Start the request's table with hit blocks, which thereby leave the free queue.

        Hits that nothing attends to any more become NULL.
        """
        table = self.tables.setdefault(request_id, [])
        if table:
            raise PrefixCacheError(f"request {request_id!r} already holds blocks, it cannot adopt hit blocks")
        skipped = self.num_skipped_tokens(computed_tokens) // self.block_size
        kept = hits[skipped:]
        if self._enable_caching:
            self._pool.touch(kept)
        table.extend([self._pool.null_block] * skipped)
        table.extend(kept)
        self.num_cached_blocks[request_id] = len(table)

    def allocate_external(self, request_id: str, computed_tokens: int, external_tokens: int) -> None:
        """Allocate blocks that a connector will fill with `external_tokens`, the last of `computed_tokens`."""
        skipped = self.num_skipped_tokens(computed_tokens)
        if skipped:
            external_tokens = min(computed_tokens - skipped, external_tokens)
        if external_tokens > 0:
            self.allocate_new(request_id, computed_tokens)

    def allocate_new(self, request_id: str, num_tokens: int) -> list[Block]:
        """Extend the table to hold `num_tokens`; return the blocks added.

        Raises:
            PrefixCacheError: not enough free blocks (callers ask `num_blocks_to_allocate` first).
        """
        table = self.tables.setdefault(request_id, [])
        count = cdiv(num_tokens, self.block_size) - len(table)
        if count <= 0:
            return []
        blocks = self._pool.get_new_blocks(count)
        table.extend(blocks)
        return blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the blocks that the first `num_tokens` tokens complete findable."""
        request_id = request.request_id
        cached = self.num_cached_blocks.get(request_id, 0)
        full = num_tokens // self.block_size
        if cached >= full:
            return
        span = range(cached, full)
        mask = self.reachable_mask(request, span)
        self._pool.cache_full_blocks(request, self.tables[request_id], span, self.group_id, mask)
        self.num_cached_blocks[request_id] = full

    def remove_skipped(self, request_id: str, num_computed_tokens: int) -> None:
        """Free blocks of tokens that nothing attends to any more, latest first; their places become NULL."""
        count = self.num_skipped_tokens(num_computed_tokens) // self.block_size
        if count == 0:
            return
        table = self.tables.get(request_id, [])
        null_block = self._pool.null_block
        removed = []
        for index in range(min(count, len(table)) - 1, -1, -1):
            if table[index] is null_block:
                break
            removed.append(table[index])
            table[index] = null_block
        self._pool.free_blocks(removed)

    def free(self, request_id: str) -> None:
        """Let the request go of all its blocks, tail first, so that the shared start of a prompt is evicted last."""
        self.num_cached_blocks.pop(request_id, None)
        self._pool.free_blocks(reversed(self.tables.pop(request_id, [])))
