"""What all KV cache groups do together for one request, and where their hits agree."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

from kvatlas.errors import ConfigError
from kvatlas.prefix_cache.block import Block
from kvatlas.prefix_cache.block_pool import BlockPool
from kvatlas.prefix_cache.kv_cache_config import KVCacheConfig
from kvatlas.prefix_cache.managers import HitSource, SlotDemand, make_manager
from kvatlas.prefix_cache.request import Request

__all__ = ["Coordinator", "GroupBlocks", "NoPrefixCacheCoordinator", "UnitaryCoordinator"]

GroupBlocks: TypeAlias = tuple[Sequence[Block], ...]
"""One sequence of blocks for each KV cache group."""


class Coordinator(ABC):
    """Drives one manager for each group. Subclasses say how a hit is found.

    Source: vLLM 0.32.0 KVCacheCoordinator.
    """

    def __init__(self, config: KVCacheConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.managers = tuple(make_manager(config, group_id, pool) for group_id in range(len(config.groups)))

    @abstractmethod
    def find_longest_hit(self, hashes: Sequence[bytes], max_tokens: int) -> tuple[GroupBlocks, int, int]:
        """Return (hit blocks of each group, hit tokens, tokens some group has beyond the hit).

        Args:
            hashes: block hashes at the hash block size.
            max_tokens: longest hit allowed.
        """

    def num_blocks_to_allocate(self, demand: SlotDemand, hits: GroupBlocks) -> int:
        """Return how many blocks of the free queue all groups need; see the managers' method."""
        need = 0
        for manager in self.managers:
            need += manager.num_blocks_to_allocate(demand, hits[manager.group_id])
        return need

    def adopt_computed_blocks(self, demand: SlotDemand, hits: GroupBlocks) -> None:
        """Adopt hit blocks, then allocate blocks for externally loaded tokens.

        In two passes over the groups: no group's allocation may evict a block that another is about to adopt.

        Source: vLLM 0.32.0 KVCacheCoordinator.allocate_new_computed_blocks.
        """
        if any(demand.request_id in manager.num_cached_blocks for manager in self.managers):
            return
        for manager in self.managers:
            manager.adopt_hits(demand, hits[manager.group_id])
        if demand.computed_tokens > demand.local_tokens:
            for manager in self.managers:
                manager.allocate_external(demand)

    def allocate_new_blocks(self, demand: SlotDemand) -> tuple[list[Block], ...]:
        """Extend each group's table by what is demanded; return the blocks added."""
        return tuple([manager.allocate_new(demand) for manager in self.managers])

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make complete blocks among the first `num_tokens` tokens findable, except what may be prefilled again."""
        final = max(0, num_tokens - self.config.num_reprefillable_tokens)
        for manager in self.managers:
            manager.cache_blocks(request, final)

    def remove_skipped(self, request_id: str, num_computed_tokens: int, num_prompt_tokens: int) -> None:
        """Free blocks that nothing attends to any more."""
        for manager in self.managers:
            manager.remove_skipped(request_id, num_computed_tokens, num_prompt_tokens)

    def free(self, request_id: str) -> None:
        """Let the request go of all its blocks."""
        for manager in self.managers:
            manager.free(request_id)

    def pop_blocks(self, request_id: str) -> list[Block]:
        """Forget the request; return its blocks of all groups, still in use, first token first."""
        return [block for manager in self.managers for block in manager.pop_blocks(request_id)]

    def blocks(self, request_id: str) -> GroupBlocks:
        """The request's block tables; empty for a request that holds none."""
        return tuple(manager.tables.get(request_id, ()) for manager in self.managers)

    def new_step_starts(self) -> None:
        """A scheduler step begins."""
        for manager in self.managers:
            manager.new_step_starts()


class NoPrefixCacheCoordinator(Coordinator):
    """Caching is off: nothing is ever hit.

    Source: vLLM 0.32.0 KVCacheCoordinatorNoPrefixCache.
    """

    def find_longest_hit(self, hashes: Sequence[bytes], max_tokens: int) -> tuple[GroupBlocks, int, int]:
        """Return no hit."""
        del hashes, max_tokens
        return tuple([] for _ in self.managers), 0, 0

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Do nothing."""


class UnitaryCoordinator(Coordinator):
    """One group: its hit is the hit.

    Raises:
        ConfigError: the hash block size differs from the block size.

    Source: vLLM 0.32.0 UnitaryKVCacheCoordinator.
    """

    def __init__(self, config: KVCacheConfig, pool: BlockPool) -> None:
        super().__init__(config, pool)
        (self._manager,) = self.managers
        if config.hash_block_size != self._manager.block_size:
            raise ConfigError(
                f"with one KV cache group hash_block_size ({config.hash_block_size}) must equal its block size "
                f"({self._manager.block_size})"
            )
        self._source = HitSource(pool.hash_maps[0].lookup, pool.null_block)

    def find_longest_hit(self, hashes: Sequence[bytes], max_tokens: int) -> tuple[GroupBlocks, int, int]:
        """Return the only manager's hit."""
        manager = self._manager
        blocks, hit_tokens = manager.find_hit(
            self._source, hashes, max_tokens, manager.block_size, drop_eagle=manager.use_eagle
        )
        return (blocks,), hit_tokens, 0
