"""The KV connector of a simulated engine: host memory, disk, or host memory before disk."""

from pathlib import Path

from kvatlas.clock import Clock
from kvatlas.errors import ConfigError
from kvatlas.prefix_cache.connector import KVConnector
from kvatlas.prefix_cache.connectors import (
    DiskConnector,
    DiskTier,
    HostMemoryConnector,
    HostTier,
    OffloadConfig,
    StoreWhen,
    TieredConnector,
    open_directory,
)
from kvatlas.simulator.config import ConnectorConfig, EngineConfig
from kvatlas.simulator.kv_groups import build_groups

__all__ = ["build_connector"]


def build_connector(config: EngineConfig, clock: Clock) -> KVConnector | None:
    """The connector an engine is configured with, None when it has none.

    Engines that are given the same directory share what is in it.

    Args:
        config: the engine's.
        clock: the one that drives the engine. Transfers take place in it, as slow as the engine's own time.

    Raises:
        ConfigError: the directory cannot be used, or sizes that cannot work.
    """
    wanted = config.connector
    if wanted is None:
        return None
    offload = _offload_config(config, wanted)
    if wanted.kind == "host":
        return HostMemoryConnector(offload, clock, capacity_blocks=wanted.host_blocks)
    if wanted.directory is None:
        raise ConfigError(f"a connector of kind {wanted.kind} keeps blocks in files: give it a directory")
    directory = Path(wanted.directory)
    namespace = f"{config.model}/{config.hash_algo}/{config.hash_seed}/{config.block_size}"
    if wanted.kind == "disk":
        return DiskConnector(offload, clock, directory=directory, max_bytes=wanted.disk_bytes, namespace=namespace)
    disk = DiskTier(open_directory(directory), wanted.disk_bytes, clock=clock, namespace=namespace)
    return TieredConnector(offload, clock, host=HostTier(wanted.host_blocks), disk=disk)


def _offload_config(config: EngineConfig, wanted: ConnectorConfig) -> OffloadConfig:
    groups, hash_block_size = build_groups(config, hashes=True)
    return OffloadConfig(
        specs=tuple(group.spec for group in groups),
        hash_block_size=hash_block_size,
        store_when=StoreWhen(wanted.store_when),
        async_loads=wanted.async_loads,
        block_bytes=wanted.block_bytes,
        payload_bytes=wanted.payload_bytes,
        load_bytes_per_s=_real_speed(wanted.load_bytes_per_s, config.latency.time_scale),
        store_bytes_per_s=_real_speed(wanted.store_bytes_per_s, config.latency.time_scale),
        self_describing_events=wanted.self_describing_events,
        int_block_hashes=config.events.int_block_hashes,
    )


def _real_speed(simulated: float | None, time_scale: float) -> float | None:
    """Bytes a real second: the link is slowed and sped up like everything else. None = it takes no time."""
    return None if simulated is None or time_scale == 0 else simulated / time_scale
