"""What a scheduler calls: look a request's prefix up, give it slots, free it, and tell what happened.

One step of a request: `get_computed_blocks` (only when it has computed nothing), then `allocate_slots` for the tokens
to compute in this step, and `free` at its end or when it is preempted. `take_events` drains what to publish.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvatlas.errors import PrefixCacheError
from kvatlas.events import Event
from kvatlas.prefix_cache.block import Block
from kvatlas.prefix_cache.block_pool import BlockPool
from kvatlas.prefix_cache.coordinator import GroupBlocks
from kvatlas.prefix_cache.hybrid_coordinator import HybridCoordinator, make_coordinator
from kvatlas.prefix_cache.kv_cache_config import KVCacheConfig
from kvatlas.prefix_cache.kv_cache_spec import MambaSpec, cdiv
from kvatlas.prefix_cache.managers import SlotDemand
from kvatlas.prefix_cache.request import ReportMode, Request, RequestStatus
from kvatlas.prefix_cache.residency import ResidencyMetrics
from kvatlas.prefix_cache.stats import PrefixCacheStats

__all__ = ["DEFAULT_RULES", "AllocationRules", "BlockCopy", "ComputedBlocks", "KVCacheManager"]


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """Outcome of a lookup.

    Attributes:
        blocks: hit blocks of each group.
        hit_tokens: tokens they cover.
        shared_prefix_boundary: length of a prefix that some group has and another lacks, so that others share it; a
            scheduler stores it on the request before `allocate_slots`, to have it cached by all. 0 = none.
        diverged: some group has less than `hit_tokens`, which only a connector can make good.
    """

    blocks: GroupBlocks
    hit_tokens: int
    shared_prefix_boundary: int = 0
    diverged: bool = False


@dataclass(frozen=True, slots=True)
class AllocationRules:
    """How cautious one allocation is.

    Args:
        delay_caching: do not make blocks findable yet: an asynchronous load has still to fill them.
        full_sequence_must_fit: refuse unless the whole sequence would fit, not only this step's chunk.
        reserved_blocks: free blocks that are promised to others.
        has_scheduled_requests: something already runs in this step, so a waiting request respects the watermark.
    """

    delay_caching: bool = False
    full_sequence_must_fit: bool = False
    reserved_blocks: int = 0
    has_scheduled_requests: bool = False


DEFAULT_RULES = AllocationRules()


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block to be copied before the step computes: a hit that ended inside it shares its start, not its end."""

    source: Block
    destination: Block


class KVCacheManager:
    """The engine-side prefix cache.

    Args:
        config: groups, sizes and switches.
        residency: follows the life of blocks, None = not at all.

    Raises:
        ConfigError: groups that cannot be cached together.

    Source: vLLM 0.32.0 KVCacheManager, equal to it operation by operation.
    """

    __slots__ = (
        "_coordinator", "_has_mamba", "_keeps_last_state_only", "_no_blocks", "_pool", "_stats", "_watermark_blocks",
        "config", "not_looked_up",
    )  # fmt: skip

    def __init__(self, config: KVCacheConfig, residency: ResidencyMetrics | None = None) -> None:
        self.config = config
        self._pool = BlockPool(config, residency)
        self._coordinator = make_coordinator(config, self._pool)
        self._watermark_blocks = int(config.watermark * config.num_blocks)
        self._has_mamba = any(isinstance(group.spec, MambaSpec) for group in config.groups)
        self._keeps_last_state_only = self._has_mamba and config.retention_interval == 0
        self._stats = PrefixCacheStats()
        self._no_blocks: GroupBlocks = tuple(() for _ in config.groups)
        self.not_looked_up = ComputedBlocks(self._no_blocks, 0)
        """What a lookup returns when it is switched off: such an admission is not counted in the statistics."""

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """Return the longest cached prefix the request can start from, without taking it.

        At most `num_tokens - 1` tokens: the last one must be computed to sample from, so a prompt that is cached in
        whole blocks computes its last block again. Sliding windows and chunks count as hit what is before them, though
        it is not resident.

        In report mode `full` the hit is published, at every lookup, whether or not the request is then admitted.

        Raises:
            PrefixCacheError: a full report that ends the engine; see `BlockPool.publish_hit`.

        Cost: O(blocks hit), measured 80 ns each.
        """
        if not self.config.enable_caching or request.skip_reading_prefix_cache:
            return self.not_looked_up
        blocks, hit_tokens, uncached = self._coordinator.find_longest_hit(request.block_hashes, request.num_tokens - 1)
        if hit_tokens and request.report_mode is ReportMode.FULL:
            for group_id, group_blocks in enumerate(blocks):
                if group_blocks:
                    self._pool.publish_hit(request, len(group_blocks), group_id)
        return ComputedBlocks(blocks, hit_tokens, hit_tokens + uncached if uncached else 0)

    def get_computed_blocks_for_connector(self, request: Request) -> ComputedBlocks:
        """Look up for a connector that can bring the states other groups lack: the full-attention groups' hit.

        Only Mamba models beside full attention differ from `get_computed_blocks`, and only while no group has more than
        full attention. When the result is `diverged` and the connector finds nothing, look up again without it.

        Source: vLLM 0.32.0 KVCacheManager.get_computed_blocks_for_connector.
        """
        coordinator = self._coordinator
        full_id = coordinator.full_attention_group_id if isinstance(coordinator, HybridCoordinator) else None
        if not isinstance(coordinator, HybridCoordinator) or full_id is None or not self._has_mamba:
            return self.get_computed_blocks(request)
        if request.skip_reading_prefix_cache:
            return self.not_looked_up
        hits = coordinator.find_hit_per_group(request.block_hashes, request.num_tokens - 1)
        full_hit = hits.hit_tokens[full_id]
        if max(hits.hit_tokens) > full_hit:
            return self.get_computed_blocks(request)
        return ComputedBlocks(hits.blocks, full_hit, diverged=min(hits.hit_tokens) < full_hit)

    def truncate(self, computed: ComputedBlocks, num_tokens: int) -> ComputedBlocks:
        """Return the part of a lookup's outcome that ends at `num_tokens`. A Mamba group may have less.

        Raises:
            PrefixCacheError: the end is no block end of some group, or beyond what it has.

        Source: vLLM 0.32.0 KVCacheManager.truncate_computed_blocks.
        """
        if computed is self.not_looked_up and num_tokens == 0:
            return computed  # still no lookup: statistics must not count one
        kept: list[Sequence[Block]] = []
        for group, block_size, blocks in zip(self.config.groups, self.config.block_sizes, computed.blocks, strict=True):
            count, rest = divmod(num_tokens, block_size) if group.spec.prefix_cacheable else (0, 0)
            if rest or (count > len(blocks) and not isinstance(group.spec, MambaSpec)):
                raise PrefixCacheError(
                    f"a hit of {len(blocks)} blocks of {block_size} tokens cannot be cut at {num_tokens} tokens"
                )
            kept.append(blocks[:count])
        return ComputedBlocks(tuple(kept), num_tokens, computed.shared_prefix_boundary, computed.diverged)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        new_computed_tokens: int = 0,
        computed_blocks: ComputedBlocks | None = None,
        lookahead_tokens: int = 0,
        external_tokens: int = 0,
        rules: AllocationRules = DEFAULT_RULES,
    ) -> tuple[list[int], ...] | None:
        """Give a request slots for the tokens of this step; return the new block ids of each group.

        None when they do not fit; then nothing has changed (blocks behind a window excepted). Adopted hit blocks and
        blocks for external tokens are not among the ids returned.

        Args:
            request: `num_computed_tokens` is what it had before this step.
            num_new_tokens: tokens to compute now, drafts included.
            new_computed_tokens: tokens the lookup found.
            computed_blocks: the lookup's outcome, on admission only.
            lookahead_tokens: further slots for draft tokens.
            external_tokens: tokens a connector will load after the computed ones.
            rules: how cautious to be.

        Raises:
            PrefixCacheError: nothing was asked for.

        Cost: O(blocks needed); measured 6 us for a decode step.
        Source: vLLM 0.32.0 KVCacheManager.allocate_slots.
        """
        if num_new_tokens == 0 and external_tokens == 0 and new_computed_tokens == 0:
            raise PrefixCacheError(
                f"allocate_slots for {request.request_id!r} asks for nothing: give num_new_tokens, new_computed_tokens "
                "or external_tokens above 0"
            )
        hits = computed_blocks.blocks if computed_blocks is not None else self._no_blocks
        local = request.num_computed_tokens + new_computed_tokens
        computed = min(local + external_tokens, self.config.max_model_len)
        watermark = self._watermark(request) if rules.has_scheduled_requests else 0
        if rules.full_sequence_must_fit:
            whole = self._demand(request, request.num_tokens, request.num_tokens, computed, local, capped=True)
            if not self._fits(whole, hits, watermark):
                return None
        self._coordinator.remove_skipped(
            request.request_id, max(0, computed - request.num_in_flight_tokens), request.num_prompt_tokens
        )
        main = computed + num_new_tokens
        demand = self._demand(request, main + lookahead_tokens, main, local + external_tokens, local)
        if not self._fits(demand, hits, watermark + rules.reserved_blocks):
            return None
        if external_tokens > 0 or any(hits):
            self._coordinator.adopt_computed_blocks(demand, hits)
        new_blocks = self._coordinator.allocate_new_blocks(demand)
        if not rules.delay_caching:
            # Drafts and placeholders lie beyond num_tokens: they are never cached.
            self._coordinator.cache_blocks(request, min(main, request.num_tokens))
        if computed_blocks is not None and computed_blocks is not self.not_looked_up:
            self._stats.record(request.num_tokens, new_computed_tokens, preempted=request.num_preemptions > 0)
        return tuple([[block.block_id for block in blocks] for blocks in new_blocks])

    def _fits(self, demand: SlotDemand, hits: GroupBlocks, kept_free: int) -> bool:
        """Whether the blocks a demand takes leave so many free."""
        return self._coordinator.num_blocks_to_allocate(demand, hits) + kept_free <= self._pool.num_free_blocks

    def _demand(
        self, request: Request, slots: int, main: int, computed: int, local: int, *, capped: bool = False
    ) -> SlotDemand:
        """What an allocation asks the groups for; see `SlotDemand`. No sequence outgrows the model."""
        prefill_end = 0
        if self._keeps_last_state_only:
            # Outputs that are computed again after a preemption belong to the prefill.
            prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        slots = min(slots, self.config.max_model_len)
        if capped:
            main = slots
        return SlotDemand(
            request.request_id, slots, main, computed, local, request.num_encoder_tokens, prefill_end, capped
        )

    def _watermark(self, request: Request) -> int:
        """Blocks that must stay free: only when a request is to join others that run already."""
        joins = request.status is RequestStatus.WAITING or request.status is RequestStatus.PREEMPTED
        return self._watermark_blocks if joins else 0

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make complete blocks among the request's first `num_tokens` tokens findable. For loads that finish later."""
        self._coordinator.cache_blocks(request, num_tokens)

    def remove_skipped(self, request: Request, num_computed_tokens: int) -> None:
        """Free the blocks that nothing attends to once this many tokens are computed."""
        self._coordinator.remove_skipped(request.request_id, num_computed_tokens, request.num_prompt_tokens)

    def free(self, request: Request) -> None:
        """Let the request go of its blocks; what they hold stays cached. Nothing happens for an unknown request."""
        self._coordinator.free(request.request_id)

    def pop_blocks(self, request: Request) -> list[Block]:
        """Forget the request but keep its blocks in use, for a step that still reads them. Then `free_popped`."""
        return self._coordinator.pop_blocks(request.request_id)

    def free_popped(self, blocks: Sequence[Block]) -> None:
        """Let go of blocks that `pop_blocks` returned, the last first."""
        self._pool.free_blocks(reversed(blocks))

    def take_block_copies(self) -> list[BlockCopy]:
        """Copies that must run before the next step computes, in order; their blocks are held until released."""
        copies = []
        for manager in self._coordinator.managers:
            copies += [BlockCopy(source, destination) for source, destination in manager.block_copies]
            manager.block_copies.clear()
        return copies

    def release_block_copies(self, copies: Iterable[BlockCopy]) -> None:
        """Let go of the blocks of copies that have run."""
        self._pool.free_blocks([block for copy in copies for block in (copy.source, copy.destination)])

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget the content of blocks, in use or not (their data turned out to be bad).

        The engine takes the ids as a set and its events follow the set's order; so do ours. A request that runs with
        such a block does not cache it again.

        Raises:
            PrefixCacheError: an id outside the pool.
        """
        self._pool.evict_blocks(set(block_ids))

    def reset_prefix_cache(self) -> bool:
        """Forget all content; False, and nothing changes, while any block is in use."""
        done = self._pool.reset()
        if done:
            self._stats.reset = True
        return done

    def take_events(self) -> list[Event]:
        """The events since the last call, in order; empty when events are off."""
        return self._pool.events.take()

    def new_step_starts(self) -> None:
        """Tell that a scheduler step begins."""
        self._coordinator.new_step_starts()

    def make_stats(self) -> PrefixCacheStats:
        """Return what was counted since the last call, and start anew."""
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    def estimate_cached_tokens(self, request: Request) -> int:
        """Return how long a prefix of the request the cache knows, as far as its own blocks tell.

        The least over the cacheable groups of the longest prefix that one of its blocks names.

        Cost: O(blocks of the request).
        Source: vLLM 0.32.0 KVCacheManager.estimate_cached_tokens.
        """
        known = [
            max((block.num_hashed_tokens for block in blocks), default=0)
            for group, blocks in zip(self.config.groups, self._coordinator.blocks(request.request_id), strict=True)
            if group.spec.prefix_cacheable and group.spec.kind != "cross_attention"
        ]
        return min(known, default=0)

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Block table of a request for each group, null blocks as 0; empty lists for a request that holds none."""
        return tuple([block.block_id for block in blocks] for blocks in self._coordinator.blocks(request_id))

    def computed_block_ids(self, request_id: str, num_computed_tokens: int) -> tuple[list[int], ...]:
        """Block table up to the computed tokens; whole for kinds whose blocks do not stand for tokens.

        Source: vLLM 0.32.0 KVCacheManager.get_block_ids_for_computed_tokens.
        """
        tables = []
        for group, ids in zip(self.config.groups, self.block_ids(request_id), strict=True):
            whole = isinstance(group.spec, MambaSpec) or group.spec.kind == "cross_attention"
            tables.append(ids if whole else ids[: cdiv(num_computed_tokens, group.spec.block_size)])
        return tuple(tables)

    def free_block_ids(self) -> list[int]:
        """Ids in the free queue, next to be evicted first. O(free blocks)."""
        return [block.block_id for block in self._pool.free_queue]

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody uses."""
        return self._pool.num_free_blocks

    @property
    def num_cached_keys(self) -> int:
        """Distinct (digest, group) pairs that can be hit."""
        return self._pool.num_cached_keys

    @property
    def usage(self) -> float:
        """Used fraction of the pool, 0..1; cached blocks that nobody uses count as free."""
        return self._pool.usage
