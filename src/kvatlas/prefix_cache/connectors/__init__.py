"""KV outside the device: host memory, disk, and the connector that moves blocks between them and the device.

The one corner of the prefix cache that touches the outside world: `files.py` reads and writes files. No threads, no
sockets, no clock of its own: time is passed in. Must not live here: anything a scheduler decides.
"""

from kvatlas.prefix_cache.connectors.block_file import Damage, decode_block, encode_block, namespace_digest
from kvatlas.prefix_cache.connectors.disk_tier import DiskTier
from kvatlas.prefix_cache.connectors.files import BlockFiles
from kvatlas.prefix_cache.connectors.host_tier import HostTier
from kvatlas.prefix_cache.connectors.kinds import DiskConnector, HostMemoryConnector, TieredConnector, open_directory
from kvatlas.prefix_cache.connectors.offload import OffloadConnector
from kvatlas.prefix_cache.connectors.offload_config import OffloadConfig, StoreWhen
from kvatlas.prefix_cache.connectors.payload import synthetic_payload
from kvatlas.prefix_cache.connectors.tier import MEDIUM_CPU, MEDIUM_STORAGE, Tier, TierChange, TierStats
from kvatlas.prefix_cache.connectors.tiered import TieredStore

__all__ = [
    "MEDIUM_CPU",
    "MEDIUM_STORAGE",
    "BlockFiles",
    "Damage",
    "DiskConnector",
    "DiskTier",
    "HostMemoryConnector",
    "HostTier",
    "OffloadConfig",
    "OffloadConnector",
    "StoreWhen",
    "Tier",
    "TierChange",
    "TierStats",
    "TieredConnector",
    "TieredStore",
    "decode_block",
    "encode_block",
    "namespace_digest",
    "open_directory",
    "synthetic_payload",
]
