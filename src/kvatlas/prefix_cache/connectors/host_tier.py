"""Blocks in the memory of the host."""

from collections.abc import Sequence

from kvatlas.errors import ConfigError
from kvatlas.prefix_cache.connectors.change_log import ChangeLog
from kvatlas.prefix_cache.connectors.recency import RecencyList
from kvatlas.prefix_cache.connectors.tier import MEDIUM_CPU, TierChange, TierStats

__all__ = ["HostTier"]


class HostTier:
    """At most `capacity_blocks` blocks; the one used longest ago leaves first.

    Raises:
        ConfigError: no room for a single block.
    """

    medium = MEDIUM_CPU

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ConfigError(
                f"a host tier needs room for at least 1 block, capacity_blocks={capacity_blocks} was given"
            )
        self.capacity_blocks = capacity_blocks
        self.stats = TierStats()
        self._recency = RecencyList()
        self._payloads: dict[bytes, bytes] = {}
        self._log = ChangeLog(self.medium)

    def __len__(self) -> int:
        return len(self._recency)

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Keys, used longest ago first."""
        return tuple(self._recency)

    def contains(self, key: bytes) -> bool:
        """Whether the block is here. O(1)."""
        return key in self._payloads

    def source_of(self, key: bytes) -> str:
        """Always "host"."""
        return "host"

    def read(self, key: bytes) -> bytes | None:
        """The block's bytes. Counts as a use."""
        payload = self._payloads.get(key)
        if payload is None:
            self.stats.vanished += 1
            return None
        self._recency.touch(key)
        self.stats.read += 1
        return payload

    def write(self, key: bytes, payload: bytes) -> bool:
        """Keep a block; False when all blocks here are being read."""
        if self._recency.touch(key):
            return True
        while len(self._recency) >= self.capacity_blocks:
            victim = self._recency.next_victim()
            if victim is None:
                self.stats.refused += 1
                return False
            self._recency.remove(victim)
            del self._payloads[victim]
            self._log.removed(victim)
            self.stats.evicted += 1
        self._payloads[key] = payload
        self._recency.add(key, 1)
        self._log.stored(key)
        self.stats.written += 1
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of each known key, in order."""
        for key in keys:
            self._recency.touch(key)

    def pin(self, key: bytes) -> None:
        """Protect a key from eviction until `unpin`."""
        self._recency.pin(key)

    def unpin(self, key: bytes) -> None:
        """Give one pin back."""
        self._recency.unpin(key)

    def clear(self) -> None:
        """Drop everything."""
        for key in self._recency:
            self._log.removed(key)
        self._recency.clear()
        self._payloads.clear()

    def take_changes(self) -> list[TierChange]:
        """What entered and left since the last call, in order."""
        return self._log.take()
