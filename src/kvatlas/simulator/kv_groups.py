"""The KV cache groups of a simulated model: one of full attention unless the configuration names others."""

from kvatlas.prefix_cache import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    resolve_block_sizes,
)
from kvatlas.simulator.config import EngineConfig, GroupConfig

__all__ = ["build_groups"]


def build_groups(config: EngineConfig, *, hashes: bool) -> tuple[tuple[KVCacheGroup, ...], int]:
    """Return the groups and the number of tokens a block hash covers.

    Args:
        config: the engine's.
        hashes: blocks are hashed.

    Raises:
        ConfigError: groups that cannot work together.
    """
    wanted = config.groups or (GroupConfig(kind="full_attention"),)
    groups = tuple(KVCacheGroup(_spec(group, config), is_eagle=group.is_eagle) for group in wanted)
    sizes = resolve_block_sizes(groups, prefix_match_unit=config.prefix_match_unit, hashing=hashes)
    return groups, sizes.hash_block_size


def _spec(group: GroupConfig, config: EngineConfig) -> KVCacheSpec:
    block_size = group.block_size or config.block_size
    match group.kind:
        case "full_attention":
            return FullAttentionSpec(block_size)
        case "mla_attention":
            return MLAAttentionSpec(block_size)
        case "sliding_window":
            return SlidingWindowSpec(block_size, group.window or 0)
        case "chunked_local_attention":
            return ChunkedLocalAttentionSpec(block_size, group.window or 0)
        case "mamba":
            drafts = config.speculative.num_tokens
            if config.enable_prefix_caching:
                return MambaSpec(block_size, "align", num_speculative_blocks=drafts)
            return MambaSpec(config.max_model_len, "none", num_speculative_blocks=drafts)
