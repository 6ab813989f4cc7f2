"""The connectors one chooses from: host memory, disk, or host memory before disk."""

from pathlib import Path

from kvatlas.clock import Clock
from kvatlas.errors import ConfigError
from kvatlas.prefix_cache.connectors.disk_tier import DiskTier
from kvatlas.prefix_cache.connectors.files import BlockFiles
from kvatlas.prefix_cache.connectors.host_tier import HostTier
from kvatlas.prefix_cache.connectors.offload import OffloadConnector
from kvatlas.prefix_cache.connectors.offload_config import OffloadConfig
from kvatlas.prefix_cache.connectors.tiered import TieredStore

__all__ = ["DiskConnector", "HostMemoryConnector", "TieredConnector"]


class HostMemoryConnector(OffloadConnector):
    """KV in at most `capacity_blocks` blocks of host memory; events say "CPU", metrics "host"."""

    def __init__(self, config: OffloadConfig, clock: Clock, *, capacity_blocks: int) -> None:
        self.host = HostTier(capacity_blocks)
        super().__init__(self.host, config, clock)


class DiskConnector(OffloadConnector):
    """KV in files that survive the process; events say "STORAGE", metrics "disk". See `DiskTier` for the bound.

    Args:
        directory: made when missing; only files this connector wrote are ever touched.
        max_bytes: bound on the sum of file sizes.
        namespace: model, dtype, hash algorithm and seed: whatever gives a block hash its meaning.
        fsync: a stored block survives a power cut, too, at the price of a flush for each.
        shared: other processes use the directory too.
        announce_existing: tell of the blocks found at the start, so that onlookers know what a restart kept.

    Raises:
        ConfigError: the directory cannot be used.
    """

    def __init__(
        self,
        config: OffloadConfig,
        clock: Clock,
        *,
        directory: Path,
        max_bytes: int,
        namespace: str = "",
        fsync: bool = False,
        shared: bool = True,
        announce_existing: bool = True,
    ) -> None:
        self.disk = DiskTier(
            open_directory(directory, fsync=fsync),
            max_bytes,
            clock=clock,
            namespace=namespace,
            shared=shared,
            announce_existing=announce_existing,
        )
        super().__init__(self.disk, config, clock)


class TieredConnector(OffloadConnector):
    """Host memory before disk: written to both, read from the first that has it. Takes two tiers that are its own."""

    def __init__(self, config: OffloadConfig, clock: Clock, *, host: HostTier, disk: DiskTier) -> None:
        self.host = host
        self.disk = disk
        super().__init__(TieredStore(host, disk), config, clock)


def open_directory(directory: Path, *, fsync: bool = False) -> BlockFiles:
    """Block files under a directory, which is made when missing.

    Raises:
        ConfigError: it cannot be made or written.
    """
    try:
        return BlockFiles(directory, fsync=fsync)
    except OSError as error:
        raise ConfigError(
            f"cannot use {directory} for KV blocks: {error.strerror}; give a directory this process may write to"
        ) from error
