"""Where a chunk of a prefill must end, beside the token budget: Mamba layers leave a state at the end of a chunk only.

So that a state can be shared, some chunk has to end where others can resume: on block boundaries, at the last such
place of the prompt, and where a prefix ends that others share. Models without Mamba layers end chunks anywhere.
"""

from dataclasses import dataclass

from kvatlas.prefix_cache import KVCacheConfig, MambaSpec
from kvatlas.simulator.limits import SchedulerLimits
from kvatlas.simulator.request import EngineRequest

__all__ = ["ChunkRule", "chunk_rule"]


@dataclass(frozen=True, slots=True)
class ChunkRule:
    """What the cuts of a model with Mamba layers depend on.

    Args:
        block_size: tokens between states kept in blocks.
        hash_block_size: tokens between places where a hit may end, when hits may end inside a block.
        gives_up: a draft model gives one hashed block of each hit up.
        partial_hits: hits may end inside a block.
        most_tokens: longest chunk of a step.
    """

    block_size: int
    hash_block_size: int
    gives_up: bool
    partial_hits: bool
    most_tokens: int

    def next_tokens(self, request: EngineRequest, num_computed: int, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens after the computed ones are computed in this step; 0 = none.

        Args:
            request: whose.
            num_computed: tokens computed, hit or loaded before the chunk.
            num_tokens: what the budget leaves.

        Source: vLLM 0.32.0 Scheduler._mamba_block_aligned_split.
        """
        inner = request.request
        prefill_end = max(inner.num_prompt_tokens, inner.num_tokens - 1)  # outputs are replayed after a preemption
        if num_computed >= prefill_end or num_tokens <= 0:
            return num_tokens
        end = num_computed + num_tokens
        if end < prefill_end:
            end = self._aligned_end(num_computed, end)
        stops = self._stops(request, num_computed, end)
        return max(min([stop for stop in stops if num_computed < stop < end], default=end) - num_computed, 0)

    def _aligned_end(self, start: int, end: int) -> int:
        """A chunk that is not the last ends on a block boundary; inside the block if a block is too large for one."""
        aligned = end // self.block_size * self.block_size
        return aligned if aligned > start or self.block_size <= self.most_tokens else end

    def _stops(self, request: EngineRequest, start: int, end: int) -> list[int]:
        """Places a chunk must not run over; 0 and places outside the chunk do not count."""
        inner = request.request
        last_block_end = self._resumable(inner.num_tokens, self.block_size)
        stops = [last_block_end]
        if start % self.block_size:
            stops.append((start // self.block_size + 1) * self.block_size)
        if self.partial_hits:
            tail = self._resumable(inner.num_prompt_tokens, self.hash_block_size)
            if last_block_end < tail < inner.num_prompt_tokens:
                stops.append(tail)
        shared = inner.shared_prefix_boundary
        if start < shared < end:
            stops.append(start + (shared - start) // self.block_size * self.block_size)
        return stops

    def _resumable(self, num_tokens: int, unit: int) -> int:
        """The longest multiple of `unit` that a resend of as many tokens can start from."""
        limit = num_tokens if self.gives_up else num_tokens - 1
        return max(0, limit // unit * unit - (unit if self.gives_up else 0))


def chunk_rule(config: KVCacheConfig, limits: SchedulerLimits) -> ChunkRule | None:
    """The rule for a model; None = chunks end anywhere."""
    specs = [group.spec for group in config.groups]
    mamba = next((spec for spec in specs if isinstance(spec, MambaSpec) and spec.mode == "align"), None)
    if mamba is None:
        return None
    return ChunkRule(
        block_size=mamba.block_size,
        hash_block_size=config.hash_block_size,
        gives_up=config.use_eagle,
        partial_hits=config.partial_hits and config.hash_block_size < config.scheduler_block_size,
        most_tokens=min(limits.max_num_batched_tokens, limits.long_prefill_tokens or limits.max_num_batched_tokens),
    )
