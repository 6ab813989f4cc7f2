"""What a scheduler calls: look a request's prefix up, give it slots, free it, and tell what happened.

One step of a request: `get_computed_blocks` (only when it has computed nothing), then `allocate_slots` for the tokens
to compute in this step, and `free` at its end or when it is preempted. `take_events` drains what to publish.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvatlas.errors import PrefixCacheError
from kvatlas.events import Event
from kvatlas.prefix_cache.block_pool import BlockPool
from kvatlas.prefix_cache.coordinator import GroupBlocks, make_coordinator
from kvatlas.prefix_cache.kv_cache_spec import KVCacheConfig
from kvatlas.prefix_cache.request import ReportMode, Request, RequestStatus
from kvatlas.prefix_cache.stats import PrefixCacheStats

__all__ = ["DEFAULT_RULES", "AllocationRules", "ComputedBlocks", "KVCacheManager"]


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """Outcome of a lookup: hit blocks of each group, the tokens they cover, and a shared prefix worth caching at."""

    blocks: GroupBlocks
    hit_tokens: int
    shared_prefix_boundary: int = 0


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


class KVCacheManager:
    """The engine-side prefix cache.

    Source: vLLM 0.32.0 KVCacheManager (spec/vllm.md 7), equal to it operation by operation.
    """

    __slots__ = ("_coordinator", "_no_blocks", "_pool", "_stats", "_watermark_blocks", "config", "not_looked_up")

    def __init__(self, config: KVCacheConfig) -> None:
        self.config = config
        self._pool = BlockPool(config)
        self._coordinator = make_coordinator(config, self._pool)
        self._watermark_blocks = int(config.watermark * config.num_blocks)
        self._stats = PrefixCacheStats()
        self._no_blocks: GroupBlocks = tuple(() for _ in config.groups)
        self.not_looked_up = ComputedBlocks(self._no_blocks, 0)
        """What a lookup returns when it is switched off: such an admission is not counted in the statistics."""

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """Return the longest cached prefix the request can start from, without taking it.

        At most `num_tokens - 1` tokens: the last one must be computed to sample from, so a prompt that is cached in
        whole blocks computes its last block again.

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

        Cost: O(blocks needed); measured 8 us for a decode step with its sampled token.
        """
        if num_new_tokens == 0 and external_tokens == 0 and new_computed_tokens == 0:
            raise PrefixCacheError(
                f"allocate_slots for {request.request_id!r} asks for nothing: give num_new_tokens, new_computed_tokens "
                "or external_tokens above 0"
            )
        request_id = request.request_id
        hits = computed_blocks.blocks if computed_blocks is not None else self._no_blocks
        max_len = self.config.max_model_len
        num_computed = min(request.num_computed_tokens + new_computed_tokens + external_tokens, max_len)
        watermark = self._watermark(request, rules)
        if rules.full_sequence_must_fit:
            whole = min(request.num_tokens, max_len)
            needed = self._coordinator.num_blocks_to_allocate(request_id, whole, hits, num_computed, capped=True)
            if needed + watermark > self._pool.num_free_blocks:
                return None
        self._coordinator.remove_skipped(request_id, max(0, num_computed - request.num_in_flight_tokens))
        num_slots = min(num_computed + num_new_tokens + lookahead_tokens, max_len)
        needed = self._coordinator.num_blocks_to_allocate(request_id, num_slots, hits, num_computed)
        if needed + watermark > self._pool.num_free_blocks - rules.reserved_blocks:
            return None
        if any(hits) or external_tokens > 0:
            self._coordinator.adopt_computed_blocks(request_id, hits, num_computed, external_tokens)
        new_blocks = self._coordinator.allocate_new_blocks(request_id, num_slots)
        if not rules.delay_caching:
            # Drafts and placeholders lie beyond num_tokens: they are never cached.
            self.cache_blocks(request, min(num_computed + num_new_tokens, request.num_tokens))
        if computed_blocks is not None and computed_blocks is not self.not_looked_up:
            self._stats.record(request.num_tokens, new_computed_tokens, preempted=request.num_preemptions > 0)
        return tuple([[block.block_id for block in blocks] for blocks in new_blocks])

    def _watermark(self, request: Request, rules: AllocationRules) -> int:
        """Blocks that must stay free: only when a request is to join others that run already."""
        if not rules.has_scheduled_requests:
            return 0
        joins = request.status is RequestStatus.WAITING or request.status is RequestStatus.PREEMPTED
        return self._watermark_blocks if joins else 0

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make complete blocks among the request's first `num_tokens` tokens findable. For loads that finish later."""
        self._coordinator.cache_blocks(request, num_tokens)

    def free(self, request: Request) -> None:
        """Let the request go of its blocks; what they hold stays cached. Nothing happens for an unknown request."""
        self._coordinator.free(request.request_id)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget the content of blocks, in use or not (their data turned out to be bad).

        The engine takes the ids as a set and its events follow the set's order; so do ours.

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
        return self._pool.take_events()

    def new_step_starts(self) -> None:
        """Tell that a scheduler step begins."""
        self._coordinator.new_step_starts()

    def make_stats(self) -> PrefixCacheStats:
        """Return what was counted since the last call, and start anew."""
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Block table of a request for each group, null blocks as 0; empty lists for a request that holds none."""
        return tuple([block.block_id for block in blocks] for blocks in self._coordinator.blocks(request_id))

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
