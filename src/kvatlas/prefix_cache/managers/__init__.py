"""One manager for each kind of layer; what kinds have in common is in `base`."""

from kvatlas.errors import ConfigError
from kvatlas.prefix_cache.block_pool import BlockPool
from kvatlas.prefix_cache.kv_cache_config import KVCacheConfig
from kvatlas.prefix_cache.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvatlas.prefix_cache.managers.base import SingleTypeManager
from kvatlas.prefix_cache.managers.chunked_local import ChunkedLocalAttentionManager
from kvatlas.prefix_cache.managers.demand import Cell, HitSource, SlotDemand
from kvatlas.prefix_cache.managers.full_attention import FullAttentionManager, RSWAManager
from kvatlas.prefix_cache.managers.mamba import MambaManager
from kvatlas.prefix_cache.managers.sliding_window import SlidingWindowManager
from kvatlas.prefix_cache.managers.uncached import CircularBufferManager, CrossAttentionManager

__all__ = [
    "Cell",
    "ChunkedLocalAttentionManager",
    "CircularBufferManager",
    "CrossAttentionManager",
    "FullAttentionManager",
    "HitSource",
    "MambaManager",
    "RSWAManager",
    "SingleTypeManager",
    "SlidingWindowManager",
    "SlotDemand",
    "make_manager",
]

_MANAGERS: dict[type[KVCacheSpec], type[SingleTypeManager]] = {
    ChunkedLocalAttentionSpec: ChunkedLocalAttentionManager,
    CircularBufferSpec: CircularBufferManager,
    CrossAttentionSpec: CrossAttentionManager,
    FullAttentionSpec: FullAttentionManager,
    MLAAttentionSpec: FullAttentionManager,
    MambaSpec: MambaManager,
    RSWASpec: RSWAManager,
    SinkFullAttentionSpec: FullAttentionManager,
    SlidingWindowMLASpec: SlidingWindowManager,
    SlidingWindowSpec: SlidingWindowManager,
}


def make_manager(config: KVCacheConfig, group_id: int, pool: BlockPool) -> SingleTypeManager:
    """Return the manager for the kind of layers in a group.

    Raises:
        ConfigError: a kind without a manager.
    """
    spec_type = type(config.groups[group_id].spec)
    manager = _MANAGERS.get(spec_type)
    if manager is None:
        known = ", ".join(sorted(spec.__name__ for spec in _MANAGERS))
        raise ConfigError(f"group {group_id} is of kind {spec_type.__name__}, supported kinds are {known}")
    return manager(config, group_id, pool)
