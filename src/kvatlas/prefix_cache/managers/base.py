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
from kvatlas.prefix_cache.kv_cache_config import KVCacheConfig
from kvatlas.prefix_cache.managers.boundaries import replay_boundaries
from kvatlas.prefix_cache.managers.demand import Cell, HitSource, SlotDemand
from kvatlas.prefix_cache.request import Request

__all__ = ["SingleTypeManager", "num_evictable"]


class SingleTypeManager(ABC):
    """Block tables of one group.

    Attributes:
        tables: request id -> its blocks, first token first; NULL blocks stand for positions that need no memory.
        num_cached_blocks: request id -> leading blocks already cached or skipped; its presence means "admitted before".
        use_eagle: a draft model reads this group. Set by the coordinator, which may decide it for several groups.
        block_copies: (source, destination) of blocks to be copied before the step computes; both are held until
            `KVCacheManager.release_block_copies`.

    Source: vLLM 0.32.0 SingleTypeKVCacheManager.
    """

    def __init__(self, config: KVCacheConfig, group_id: int, pool: BlockPool) -> None:
        self.group_id = group_id
        self.block_size = config.block_sizes[group_id]
        self.use_eagle = group_id in config.eagle_group_ids
        self.tables: dict[str, list[Block]] = {}
        self.num_cached_blocks: dict[str, int] = {}
        self.block_copies: list[tuple[Block, Block]] = []
        spec = config.groups[group_id].spec
        self.max_admission_blocks = spec.max_admission_blocks(config.max_in_flight_tokens, config.max_model_len)
        self._pool = pool
        self._config = config
        self._prefix_cacheable = spec.prefix_cacheable
        self._hashes_per_block = self.block_size // config.hash_block_size
        self._partial_hits: dict[str, tuple[int, Block]] = {}
        """request id -> index and block of a table's end that is shared, or cached, in part: it must be copied."""

    @abstractmethod
    def find_hit(
        self,
        source: HitSource[Cell],
        hashes: Sequence[bytes],
        max_tokens: int,
        alignment_tokens: int,
        *,
        drop_eagle: bool,
    ) -> tuple[list[Cell], int]:
        """Return the cached blocks a request can start from, and how many tokens they cover.

        Args:
            source: where to look: this group's map, or those of several groups of equal specs.
            hashes: the request's block hashes, at the hash block size.
            max_tokens: longest hit allowed.
            alignment_tokens: the hit is a multiple of this.
            drop_eagle: give up the end of the hit, for the draft model.
        """

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens no later token attends to, once this many are computed. Full attention: none."""
        del num_computed_tokens
        return 0

    def reachable_mask(self, span: range, boundaries: Sequence[int]) -> Sequence[bool] | None:
        """For each block of the span, whether a lookup can ever need it; None = all.

        Args:
            span: block indexes.
            boundaries: prefix lengths at which a later request can resume.
        """
        del span, boundaries
        return None

    def new_step_starts(self) -> None:  # noqa: B027 - most kinds have nothing to do
        """A scheduler step begins. For kinds whose rules depend on what happened in the same step."""

    def num_blocks_to_allocate(self, demand: SlotDemand, hits: Sequence[Block]) -> int:
        """Return how many blocks leave the free queue for a demand: new ones, and hit blocks that nobody uses.

        Args:
            demand: what is asked for.
            hits: blocks about to be adopted.

        Raises:
            PrefixCacheError: a request that was admitted before brings hit blocks.

        Source: vLLM 0.32.0 SingleTypeKVCacheManager.get_num_blocks_to_allocate.
        """
        required = -(-demand.slot_tokens // self.block_size)
        if demand.capped and self.max_admission_blocks is not None:
            required = min(required, self.max_admission_blocks)
        table = self.tables.get(demand.request_id)
        have = len(table) if table is not None else 0
        if demand.request_id in self.num_cached_blocks:
            if hits:
                raise PrefixCacheError(
                    f"request {demand.request_id!r} was admitted before, it cannot adopt hit blocks again"
                )
            return max(required - have, 0)
        skipped = self.num_skipped_tokens(demand.computed_tokens) // self.block_size
        new = max(required - max(skipped, len(hits) + have), 0)
        if not hits:
            return new
        if demand.local_tokens % self.block_size:
            new += 1  # the copy of the block the hit ends in
        return new + num_evictable(hits[max(0, skipped - have) :])

    def adopt_hits(self, demand: SlotDemand, hits: Sequence[Block]) -> None:
        """Start the request's table with hit blocks, which thereby leave the free queue.

        Hits that nothing attends to any more become NULL. Where the hit ends inside a block, that block is to be
        copied by the next allocation, and cached again once the copy is full.

        Raises:
            PrefixCacheError: the request holds blocks already.

        Source: vLLM 0.32.0 SingleTypeKVCacheManager.add_local_computed_blocks.
        """
        table = self.tables.setdefault(demand.request_id, [])
        if table:
            raise PrefixCacheError(f"request {demand.request_id!r} already holds blocks, it cannot adopt hit blocks")
        skipped = self.num_skipped_tokens(demand.computed_tokens) // self.block_size
        kept = hits[skipped:]
        if self._config.enable_caching:
            self._pool.touch(kept)
        table.extend([self._pool.null_block] * skipped)
        table.extend(kept)
        num_cached, rest = len(table), demand.local_tokens % self.block_size
        if kept and rest:
            num_cached = demand.local_tokens // self.block_size
            self._partial_hits[demand.request_id] = (num_cached, kept[-1])
        self.num_cached_blocks[demand.request_id] = num_cached

    def allocate_external(self, demand: SlotDemand) -> None:
        """Allocate blocks that a connector will fill; not for tokens that nothing attends to any more.

        Source: vLLM 0.32.0 SingleTypeKVCacheManager.allocate_external_computed_blocks.
        """
        external = demand.computed_tokens - demand.local_tokens
        external = min(external, demand.computed_tokens - self.num_skipped_tokens(demand.computed_tokens))
        if external > 0:
            self._extend_table(demand.request_id, demand.computed_tokens)

    def allocate_new(self, demand: SlotDemand) -> list[Block]:
        """Extend the table to hold the demanded slots; return the blocks added, the copy of a shared end first.

        Raises:
            PrefixCacheError: not enough free blocks (callers ask `num_blocks_to_allocate` first).
        """
        if demand.request_id not in self._partial_hits:
            return self._extend_table(demand.request_id, demand.slot_tokens)
        index, source = self._partial_hits.pop(demand.request_id)
        (copy,) = self._pool.get_new_blocks(1)
        self._copy_on_write(demand.request_id, index, source, copy)
        return [copy, *self._extend_table(demand.request_id, demand.slot_tokens)]

    def _extend_table(self, request_id: str, num_tokens: int) -> list[Block]:
        table = self.tables.setdefault(request_id, [])
        count = -(-num_tokens // self.block_size) - len(table)
        if count <= 0:
            return []
        blocks = self._pool.get_new_blocks(count)
        table.extend(blocks)
        return blocks

    def _copy_on_write(self, request_id: str, index: int, source: Block, copy: Block) -> None:
        """Put a private copy in the table where a shared block was.

        Both are held until the copy has run: the source by the reference the hit took, the copy by one more.
        """
        self._require_in_table(request_id, index, source)
        self.tables[request_id][index] = copy
        copy.ref_cnt += 1
        self.block_copies.append((source, copy))

    def _require_in_table(self, request_id: str, index: int, block: Block) -> None:
        if self.tables[request_id][index] is not block:
            raise PrefixCacheError(
                f"{block} was to be copied but is no longer at index {index} of the table of request {request_id!r}: "
                "allocate the step that follows a shared or cached end before anything is freed behind it"
            )

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the blocks that the first `num_tokens` tokens complete findable, as far as a lookup can need them.

        Source: vLLM 0.32.0 SingleTypeKVCacheManager.cache_blocks.
        """
        request_id = request.request_id
        cached = self.num_cached_blocks.get(request_id, 0)
        full = num_tokens // self.block_size
        if cached >= full or not self._prefix_cacheable:
            return
        span = range(cached, full)
        mask = self.reachable_mask(span, self._boundaries(request))
        self._pool.cache_full_blocks(request, self.tables[request_id], span, self.group_id, mask)
        self.num_cached_blocks[request_id] = full

    def _boundaries(self, request: Request) -> list[int]:
        """Prefix lengths at which a later request can resume: a replay of this prompt, or a prefix others share."""
        boundaries = replay_boundaries(
            request.num_prompt_tokens, self._config.scheduler_block_size, use_eagle=bool(self._config.eagle_group_ids)
        )
        if request.shared_prefix_boundary:
            boundaries.append(request.shared_prefix_boundary)
        return boundaries

    def remove_skipped(self, request_id: str, num_computed_tokens: int, num_prompt_tokens: int) -> None:
        """Free blocks of tokens that nothing attends to any more, latest first; their places become NULL.

        Source: vLLM 0.32.0 SingleTypeKVCacheManager.remove_skipped_blocks.
        """
        del num_prompt_tokens
        count = self.num_skipped_tokens(num_computed_tokens) // self.block_size
        if count > 0:
            self._free_span(request_id, 0, count)

    def _free_span(self, request_id: str, start: int, stop: int) -> None:
        """Free the blocks from `stop` back to `start`, ending at the first NULL: what is before it went earlier."""
        table = self.tables.get(request_id, [])
        null_block = self._pool.null_block
        removed = []
        for index in range(min(stop, len(table)) - 1, start - 1, -1):
            if table[index] is null_block:
                break
            removed.append(table[index])
            table[index] = null_block
        self._pool.free_blocks(removed)

    def pop_blocks(self, request_id: str) -> list[Block]:
        """Forget the request; return its blocks, still in use, first token first."""
        self.num_cached_blocks.pop(request_id, None)
        self._partial_hits.pop(request_id, None)
        return self.tables.pop(request_id, [])

    def free(self, request_id: str) -> None:
        """Let the request go of all its blocks, tail first, so that the shared start of a prompt is evicted last."""
        self._pool.free_blocks(reversed(self.pop_blocks(request_id)))


def num_evictable(blocks: Sequence[Block]) -> int:
    """Count the blocks that nobody uses: adopting them takes them out of the free queue."""
    return sum(block.ref_cnt == 0 and not block.is_null for block in blocks)
