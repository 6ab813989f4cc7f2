"""The prefix cache inside an engine, equal to vLLM v1's operation by operation: pool, managers, coordinator, manager.

Sans-IO and single-threaded: no sockets, clocks or threads live here. Events are returned, not sent.
"""

from kvatlas.prefix_cache.block import Block
from kvatlas.prefix_cache.kv_cache_manager import DEFAULT_RULES, AllocationRules, ComputedBlocks, KVCacheManager
from kvatlas.prefix_cache.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheSpec
from kvatlas.prefix_cache.request import ReportMode, Request, RequestStatus
from kvatlas.prefix_cache.stats import PrefixCacheStats

__all__ = [
    "DEFAULT_RULES",
    "AllocationRules",
    "Block",
    "ComputedBlocks",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroup",
    "KVCacheManager",
    "KVCacheSpec",
    "PrefixCacheStats",
    "ReportMode",
    "Request",
    "RequestStatus",
]
