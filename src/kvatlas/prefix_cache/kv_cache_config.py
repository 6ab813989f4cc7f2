"""What a prefix cache is built from: groups of layers, pool size, and the block sizes that follow from them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kvatlas.errors import ConfigError
from kvatlas.prefix_cache.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

__all__ = ["BlockSizes", "KVCacheConfig", "KVCacheGroup", "partial_hits_enabled", "resolve_block_sizes"]


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share block tables.

    Args:
        spec: their kind.
        is_eagle: a draft model reads this group, so the last hit block is given up to recompute its hidden states.
    """

    spec: KVCacheSpec
    is_eagle: bool = False

    def block_size(self, dcp_world_size: int) -> int:
        """Tokens in a block over all ranks of decode context parallelism."""
        return self.spec.block_size * (dcp_world_size if self.spec.dcp_sharded else 1)


@dataclass(frozen=True)  # no slots: what follows from the fields is worked out once and kept
class KVCacheConfig:
    """Everything a `KVCacheManager` is built from.

    Args:
        num_blocks: pool size, the null block included: one block fewer is usable.
        groups: one entry for each KV cache group, group id = position.
        hash_block_size: tokens in a hashed block; every cacheable block size is a multiple of it. See
            `resolve_block_sizes`.
        max_model_len: longest sequence in tokens.
        enable_caching: look up, hash and keep blocks; off = plain allocation.
        enable_events: record what happens for `take_events`.
        int_block_hashes: events carry 64-bit integers (engine default) instead of raw digests.
        max_in_flight_tokens: tokens of steps that may run at a time; bounds what kinds with a window can hold.
        watermark: fraction of the pool kept free when a waiting request is admitted beside running ones.
        use_eagle: speculative decoding by a draft model; with no group flagged, all groups are.
        num_prefill_lookahead_tokens: tokens a multi-module draft model may prefill again.
        retention_interval: where sliding-window and Mamba groups keep states: 0 (engine default) = only where a
            replay of the prompt or a prefix seen shared can resume; n = also once every n tokens; None = everywhere.
        dcp_world_size: ranks of decode context parallelism.
        mamba_shared_prefix_checkpoint: Mamba groups of a draft-model setup also keep the state where a shared prefix
            ended inside a block.

    Raises:
        ConfigError: sizes that cannot work together.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    hash_block_size: int
    max_model_len: int
    enable_caching: bool = True
    enable_events: bool = True
    int_block_hashes: bool = True
    max_in_flight_tokens: int = 8192
    watermark: float = 0.0
    use_eagle: bool = False
    num_prefill_lookahead_tokens: int = 0
    retention_interval: int | None = 0
    dcp_world_size: int = 1
    mamba_shared_prefix_checkpoint: bool = False

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1 (the null block), got {self.num_blocks}")
        if not self.groups:
            raise ConfigError("a KV cache needs at least one group of layers, got none")
        for name in ("max_model_len", "hash_block_size", "dcp_world_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is a fraction of the pool in 0..1, got {self.watermark}")
        self._check_retention()
        if self.enable_caching:
            self._check_hashing()
            self._check_kinds()

    def _check_retention(self) -> None:
        """Source: vLLM 0.32.0 kv_cache_coordinator, validation of prefix_cache_retention_interval."""
        interval = self.retention_interval
        if interval is None or interval == 0:
            return
        if not any(isinstance(group.spec, SlidingWindowSpec | MambaSpec) for group in self.groups):
            raise ConfigError(
                f"retention_interval ({interval}) has no effect without a sliding-window or Mamba group: set it to 0"
            )
        if interval < 0 or interval % self.scheduler_block_size:
            raise ConfigError(
                f"retention_interval must be None, 0 or a multiple of the scheduler block size "
                f"({self.scheduler_block_size}), got {interval}"
            )

    def _check_hashing(self) -> None:
        for group_id, (group, block_size) in enumerate(zip(self.groups, self.block_sizes, strict=True)):
            if group.spec.prefix_cacheable and block_size % self.hash_block_size:
                raise ConfigError(
                    f"the block size of group {group_id} ({block_size}) must be a multiple of "
                    f"hash_block_size ({self.hash_block_size}): blocks are named by the hashes they contain"
                )
        if self.eagle_group_ids and self.scheduler_block_size < self.num_prefill_lookahead_tokens:
            raise ConfigError(
                f"num_prefill_lookahead_tokens ({self.num_prefill_lookahead_tokens}) must not exceed the scheduler "
                f"block size ({self.scheduler_block_size}): only one block is given up for the draft model"
            )

    def _check_kinds(self) -> None:
        """Refuse what makes the engine's lookup fail an assertion, which would end the engine at its first request.

        Cross attention cannot be looked up at all; chunked local attention neither with a draft model nor beside
        other block sizes; only full attention can be split over ranks of decode context parallelism.
        """
        for group_id, group in enumerate(self.groups):
            name = f"group {group_id} ({type(group.spec).__name__})"
            if isinstance(group.spec, CrossAttentionSpec):
                raise ConfigError(
                    f"{name} depends on an encoder's input and cannot be cached: set enable_caching=False"
                )
            if isinstance(group.spec, ChunkedLocalAttentionSpec):
                if group_id in self.eagle_group_ids:
                    raise ConfigError(f"{name} cannot be used with a draft model: set use_eagle=False")
                if group.spec.block_size != self.hit_alignment_tokens:
                    raise ConfigError(
                        f"{name} needs hits aligned to its block size ({group.spec.block_size}), the groups together "
                        f"align them to {self.hit_alignment_tokens}: give all groups one block size"
                    )
            splits = self.dcp_world_size > 1 and group.spec.dcp_sharded and group.spec.prefix_cacheable
            if splits and not group.spec.is_full_attention:
                raise ConfigError(f"{name} cannot be split by decode context parallelism: set dcp_sharded=False")

    @cached_property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens in a block of each group, over all ranks of decode context parallelism."""
        return tuple(group.block_size(self.dcp_world_size) for group in self.groups)

    @cached_property
    def scheduler_block_size(self) -> int:
        """Least common multiple of the groups' block sizes: where all groups end a block at once."""
        return math.lcm(*self.block_sizes)

    @cached_property
    def partial_hits(self) -> bool:
        """Hits may end inside a block, at any multiple of the hash block size."""
        several = self.enable_caching and len(self.groups) > 1
        return several and partial_hits_enabled(self.groups, self.hash_block_size, self.dcp_world_size)

    @cached_property
    def hit_alignment_tokens(self) -> int:
        """Hits are multiples of this."""
        return self.hash_block_size if self.partial_hits else self.scheduler_block_size

    @cached_property
    def eagle_group_ids(self) -> frozenset[int]:
        """Groups that give up the end of a hit: the flagged ones; with a draft model and no flag, all."""
        flagged = frozenset(i for i, group in enumerate(self.groups) if group.is_eagle)
        return flagged or (frozenset(range(len(self.groups))) if self.use_eagle else frozenset())

    @cached_property
    def num_reprefillable_tokens(self) -> int:
        """Last tokens that may be prefilled again and so are not cached yet."""
        return max(0, self.num_prefill_lookahead_tokens - 1)


def partial_hits_enabled(
    groups: Sequence[KVCacheGroup], hash_block_size: int, dcp_world_size: int = 1, *, all_groups: bool = True
) -> bool:
    """Whether hits may end inside a block.

    Some group must be Mamba `align` with hashes finer than its blocks (with decode context parallelism, as fine: there
    the attention blocks are the longer ones). Every other cacheable group must be able to hit inside a block, or have
    blocks of one hash each.

    Args:
        groups: the KV cache groups.
        hash_block_size: tokens in a hashed block.
        dcp_world_size: ranks of decode context parallelism.
        all_groups: ask the other groups too; False looks at the Mamba groups only, as block sizes are resolved.

    Source: vLLM 0.32.0 kv_cache_utils.partial_hash_hits_enabled.
    """
    least = hash_block_size + (1 if dcp_world_size == 1 else 0)
    if not any(
        isinstance(group.spec, MambaSpec) and group.spec.mode == "align" and group.spec.block_size >= least
        for group in groups
    ):
        return False
    return not all_groups or all(
        not group.spec.prefix_cacheable
        or group.spec.supports_partial_hits
        or group.block_size(dcp_world_size) == hash_block_size
        for group in groups
    )


class BlockSizes(NamedTuple):
    """Where all groups end a block at once, and how many tokens one hash covers."""

    scheduler_block_size: int
    hash_block_size: int


def resolve_block_sizes(
    groups: Sequence[KVCacheGroup],
    *,
    dcp_world_size: int = 1,
    prefix_match_unit: int | None = None,
    hashing: bool = True,
) -> BlockSizes:
    """Return the block sizes an engine derives from its groups.

    One group: its block size for both. Several: the least common multiple, and the greatest common divisor of the
    cacheable groups' sizes (or `prefix_match_unit`) for hashing.

    Args:
        groups: the KV cache groups.
        dcp_world_size: ranks of decode context parallelism.
        prefix_match_unit: tokens in a hashed block, when the operator sets it.
        hashing: prefix caching or a KV connector is on.

    Raises:
        ConfigError: a `prefix_match_unit` that does not divide the block sizes, or that one group cannot use; hits
            that cannot end between compressed states.

    Source: vLLM 0.32.0 kv_cache_utils.resolve_kv_cache_block_sizes.
    """
    sizes = [group.block_size(dcp_world_size) for group in groups]
    together = math.lcm(*sizes)
    if len(groups) == 1:
        if hashing and prefix_match_unit not in {None, together}:
            raise ConfigError(
                f"prefix_match_unit ({prefix_match_unit}) must be unset or {together}: with one group hits end "
                "with a block"
            )
        return BlockSizes(together, together)
    if not hashing or any(isinstance(group.spec, MambaSpec) and group.spec.mode != "align" for group in groups):
        return BlockSizes(together, together)
    hashed = [size for group, size in zip(groups, sizes, strict=True) if group.spec.prefix_cacheable] or sizes
    unit = math.gcd(*hashed) if prefix_match_unit is None else prefix_match_unit
    if any(size % unit for size in hashed):
        raise ConfigError(f"prefix_match_unit ({unit}) must divide every cacheable block size, they are {hashed}")
    alignment = unit if partial_hits_enabled(groups, unit, dcp_world_size, all_groups=False) else together
    for group in groups:
        if group.spec.prefix_cacheable and alignment % group.spec.tokens_per_state:
            raise ConfigError(
                f"hits end on multiples of {alignment} tokens, but a {type(group.spec).__name__} stores one state for "
                f"{group.spec.tokens_per_state} tokens: choose a prefix_match_unit that is a multiple"
            )
    return BlockSizes(together, unit)
