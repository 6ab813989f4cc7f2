"""How a connector moves blocks: when it stores, how it loads, how fast its links are."""

from dataclasses import dataclass
from enum import Enum

from kvatlas.errors import ConfigError
from kvatlas.prefix_cache.kv_cache_spec import KVCacheSpec

__all__ = ["OffloadConfig", "StoreWhen"]


class StoreWhen(Enum):
    """When blocks are written out."""

    FINISHED = "finished"
    """When their request ends; its blocks are kept until they are written."""
    FILLED = "filled"
    """With the step that computes a block's last token."""


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """What a connector needs to know besides its store.

    Args:
        specs: kind of each KV cache group, group id = position.
        hash_block_size: tokens in a hashed block.
        store_when: when blocks are written out.
        async_loads: load while the request waits; False = within the step that admits it (one group only).
        block_bytes: size of a block for the links' time.
        payload_bytes: bytes really kept for a block, made from its key and compared when read back.
        load_bytes_per_s, store_bytes_per_s: speed of the links, None = no time.
        self_describing_events: stores carry tokens and parents (vLLM's `self_describing_kv_events`).
        announce_reset: `reset_cache` sends removals; vLLM sends nothing, so onlookers believe in blocks that are gone.
        int_block_hashes: events carry 64-bit integers (engine default) instead of raw digests.

    Raises:
        ConfigError: a value that cannot work.
    """

    specs: tuple[KVCacheSpec, ...]
    hash_block_size: int
    store_when: StoreWhen = StoreWhen.FINISHED
    async_loads: bool = True
    block_bytes: int = 65_536
    payload_bytes: int = 256
    load_bytes_per_s: float | None = None
    store_bytes_per_s: float | None = None
    self_describing_events: bool = False
    announce_reset: bool = False
    int_block_hashes: bool = True

    def __post_init__(self) -> None:
        if self.block_bytes < 1 or self.payload_bytes < 1:
            raise ConfigError(
                f"block_bytes and payload_bytes must be at least 1, got {self.block_bytes} and {self.payload_bytes}"
            )
        if len(self.specs) > 1 and not self.async_loads:
            raise ConfigError(
                f"synchronous loads need a single KV cache group, got {len(self.specs)}: a block that fails to load "
                "could not be traced back to its request; set async_loads"
            )
