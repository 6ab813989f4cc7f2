"""What a prefix cache is made for: kinds of layers, their block sizes, the size of the pool."""

import math
from dataclasses import dataclass
from typing import ClassVar

from kvatlas.errors import ConfigError

__all__ = ["FullAttentionSpec", "KVCacheConfig", "KVCacheGroup", "KVCacheSpec"]


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """How the layers of one group keep KV. One subclass for each kind.

    Args:
        block_size: tokens in a block.
    """

    kind: ClassVar[str] = "unknown"
    """The kind's name in events (`kv_cache_spec_kind`)."""

    block_size: int

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1 token, got {self.block_size}")

    @property
    def published_window(self) -> int | None:
        """Sliding window in tokens as events carry it, None for kinds without one."""
        return None


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(KVCacheSpec):
    """Every token attends to all before it: all blocks are needed, all are cached. MLA behaves alike."""

    kind: ClassVar[str] = "full_attention"


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share block tables.

    Args:
        spec: their kind.
        is_eagle: a draft model reads this group, so the last hit block is given up to recompute its hidden states.
    """

    spec: KVCacheSpec
    is_eagle: bool = False


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """Everything a `KVCacheManager` is built from.

    Args:
        num_blocks: pool size, the null block included: one block fewer is usable.
        groups: one entry for each KV cache group, group id = position.
        hash_block_size: tokens in a hashed block; every block size is a multiple of it.
        max_model_len: longest sequence in tokens.
        enable_caching: look up, hash and keep blocks; off = plain allocation.
        enable_events: record what happens for `take_events`.
        int_block_hashes: events carry 64-bit integers (engine default) instead of raw digests.
        max_in_flight_tokens: tokens of steps that may run at a time; bounds what kinds with a window can hold.
        watermark: fraction of the pool kept free when a waiting request is admitted beside running ones.
        use_eagle: speculative decoding by a draft model; with no group flagged, all groups are.
        num_prefill_lookahead_tokens: tokens a multi-module draft model may prefill again.

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

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1 (the null block), got {self.num_blocks}")
        if not self.groups:
            raise ConfigError("a KV cache needs at least one group of layers, got none")
        if self.max_model_len < 1:
            raise ConfigError(f"max_model_len must be at least 1 token, got {self.max_model_len}")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is a fraction of the pool in 0..1, got {self.watermark}")
        if self.hash_block_size < 1:
            raise ConfigError(f"hash_block_size must be at least 1 token, got {self.hash_block_size}")
        for group_id, group in enumerate(self.groups):
            if group.spec.block_size % self.hash_block_size:
                raise ConfigError(
                    f"the block size of group {group_id} ({group.spec.block_size}) must be a multiple of "
                    f"hash_block_size ({self.hash_block_size}): blocks are named by the hashes they contain"
                )
        if (
            self.enable_caching
            and self.eagle_group_ids
            and self.scheduler_block_size < self.num_prefill_lookahead_tokens
        ):
            raise ConfigError(
                f"num_prefill_lookahead_tokens ({self.num_prefill_lookahead_tokens}) must not exceed the scheduler "
                f"block size ({self.scheduler_block_size}): only one block is given up for the draft model"
            )

    @property
    def scheduler_block_size(self) -> int:
        """Least common multiple of the groups' block sizes: where all groups end a block at once."""
        return math.lcm(*(group.spec.block_size for group in self.groups))

    @property
    def eagle_group_ids(self) -> frozenset[int]:
        """Groups that give up their last hit block."""
        if not self.use_eagle:
            return frozenset()
        flagged = frozenset(i for i, group in enumerate(self.groups) if group.is_eagle)
        return flagged or frozenset(range(len(self.groups)))

    @property
    def num_reprefillable_tokens(self) -> int:
        """Last tokens that may be prefilled again and so are not cached yet."""
        return max(0, self.num_prefill_lookahead_tokens - 1)
