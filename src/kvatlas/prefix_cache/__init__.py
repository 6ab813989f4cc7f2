"""The prefix cache inside an engine, equal to vLLM v1's operation by operation: pool, managers, coordinator, manager.

Sans-IO and single-threaded: no sockets, clocks or threads live here. Events are returned, not sent. Only the disk
tier of `connectors` touches files, through one module.
"""

from kvatlas.prefix_cache.block import Block
from kvatlas.prefix_cache.kv_cache_config import BlockSizes, KVCacheConfig, KVCacheGroup, resolve_block_sizes
from kvatlas.prefix_cache.kv_cache_manager import (
    DEFAULT_RULES,
    AllocationRules,
    BlockCopy,
    ComputedBlocks,
    KVCacheManager,
)
from kvatlas.prefix_cache.kv_cache_spec import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvatlas.prefix_cache.request import ReportMode, Request, RequestStatus
from kvatlas.prefix_cache.residency import BlockResidency, ResidencyMetrics
from kvatlas.prefix_cache.stats import PrefixCacheStats

__all__ = [
    "DEFAULT_RULES",
    "AllocationRules",
    "AttentionSpec",
    "Block",
    "BlockCopy",
    "BlockResidency",
    "BlockSizes",
    "ChunkedLocalAttentionSpec",
    "CircularBufferSpec",
    "ComputedBlocks",
    "CrossAttentionSpec",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroup",
    "KVCacheManager",
    "KVCacheSpec",
    "MLAAttentionSpec",
    "MambaMode",
    "MambaSpec",
    "PrefixCacheStats",
    "RSWASpec",
    "ReportMode",
    "Request",
    "RequestStatus",
    "ResidencyMetrics",
    "SinkFullAttentionSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "resolve_block_sizes",
]
