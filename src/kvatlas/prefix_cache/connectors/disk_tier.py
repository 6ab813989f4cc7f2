"""Blocks in files of one directory, which may survive this process and be shared with others."""

from collections.abc import Sequence

from kvatlas.clock import Clock
from kvatlas.errors import ConfigError
from kvatlas.prefix_cache.connectors.block_file import (
    HEADER_BYTES,
    Damage,
    check_size,
    decode_block,
    encode_block,
    namespace_digest,
)
from kvatlas.prefix_cache.connectors.change_log import ChangeLog
from kvatlas.prefix_cache.connectors.files import BlockFiles
from kvatlas.prefix_cache.connectors.recency import RecencyList
from kvatlas.prefix_cache.connectors.tier import MEDIUM_STORAGE, TierChange, TierStats

__all__ = ["DiskTier"]

_NS = 1_000_000_000
_REFRESH_SHARE = 16


class DiskTier:
    """At most `max_bytes` of block files; the one used longest ago leaves first.

    The order of use is the order of the files' modification times, so it survives a restart and is shared. A process
    alone never exceeds `max_bytes`, temporaries included. Processes that share a directory look at it again after
    each sixteenth of the bound they write, so together they exceed it by at most that much each.

    A file under a block's name that is not exactly what was written for it (cut, changed, of another version or
    namespace) is removed and counted, never served. Files under other names are left alone.

    Args:
        files: the directory.
        max_bytes: bound on the sum of file sizes.
        clock: stamps uses.
        namespace: whatever gives block hashes their meaning (model, dtype, hash seed): blocks never cross it.
        shared: other processes use the directory too: each block looked up then costs a stat().
        announce_existing: report the files found at the start as stored, for onlookers that start anew with us.

    Raises:
        ConfigError: the bound is too small for any block.
        OSError: the directory cannot be read.
    """

    medium = MEDIUM_STORAGE

    def __init__(
        self,
        files: BlockFiles,
        max_bytes: int,
        *,
        clock: Clock,
        namespace: str = "",
        shared: bool = True,
        announce_existing: bool = True,
    ) -> None:
        if max_bytes <= HEADER_BYTES:
            raise ConfigError(
                f"a disk tier needs room for a block: max_bytes must be far above {HEADER_BYTES}, got {max_bytes}"
            )
        self.max_bytes = max_bytes
        self.stats = TierStats()
        self._files = files
        self._clock = clock
        self._namespace = namespace_digest(namespace)
        self._shared = shared
        self._recency = RecencyList()
        self._log = ChangeLog(self.medium)
        self._last_used_ns = 0
        self._written_since_refresh = 0
        self.refresh()
        self._make_room(0)
        if not announce_existing:
            self._log.take()

    def __len__(self) -> int:
        return len(self._recency)

    @property
    def total_bytes(self) -> int:
        """Sum of the sizes of the known files."""
        return self._recency.total

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Keys of the known files, used longest ago first."""
        return tuple(self._recency)

    def refresh(self) -> None:
        """Make the index equal to the directory. O(files): a stat() each, and a short read of files not seen before."""
        self._written_since_refresh = 0
        self.stats.temporaries += self._files.remove_dead_temporaries()
        known = set(self._recency)
        self._recency.clear()
        for info in self._files.scan():
            if info.key in known or self._is_plausible(info.key, info.size):
                self._last_used_ns = max(self._last_used_ns, info.used_ns)
                self._recency.add(info.key, info.size)
                if info.key not in known:
                    self._log.stored(info.key)
        for key in known:
            if key not in self._recency:
                self._log.removed(key)

    def contains(self, key: bytes) -> bool:
        """Whether the block is in the index; with `shared`, whether its file is there now."""
        if not self._shared:
            return key in self._recency
        size = self._files.size_of(key)
        if size is None:
            self._forget(key)
            return False
        if key not in self._recency and self._is_plausible(key, size):
            self._recency.add(key, size)
            self._log.stored(key)
        return key in self._recency

    def source_of(self, key: bytes) -> str:
        """Always "disk"."""
        return "disk"

    def read(self, key: bytes) -> bytes | None:
        """The block's bytes if its file is whole. Counts as a use."""
        try:
            data = self._files.read(key)
        except OSError:
            data = None
        if data is None:
            self.stats.vanished += 1
            self._forget(key)
            return None
        payload = decode_block(data, key, self._namespace)
        if isinstance(payload, Damage):
            self._discard(key, payload)
            return None
        self.stats.read += 1
        self._use(key)
        return payload

    def write(self, key: bytes, payload: bytes) -> bool:
        """Keep a block; False when it is too large, all files are being read, or the file system refuses."""
        if self.contains(key):
            self._use(key)
            return True
        size = HEADER_BYTES + len(key) + len(payload)
        if not self._make_room(size):
            self.stats.refused += 1
            return False
        try:
            self._files.write(key, encode_block(key, payload, self._namespace), self._next_ns())
        except OSError:
            self.stats.write_errors += 1
            return False
        self._recency.add(key, size)
        self._log.stored(key)
        self.stats.written += 1
        self._written_since_refresh += size
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of each known key, in order."""
        for key in keys:
            if key in self._recency:
                self._use(key)

    def pin(self, key: bytes) -> None:
        """Protect a key from eviction by this process until `unpin`."""
        self._recency.pin(key)

    def unpin(self, key: bytes) -> None:
        """Give one pin back."""
        self._recency.unpin(key)

    def clear(self) -> None:
        """Remove every block file, those of other processes too."""
        self.refresh()
        for key in tuple(self._recency):
            self._files.remove(key)
            self._forget(key)

    def take_changes(self) -> list[TierChange]:
        """What entered and left since the last call, in order; what others did as far as it was noticed."""
        return self._log.take()

    def _make_room(self, size: int) -> bool:
        if size > self.max_bytes:
            return False
        if self._shared and self._written_since_refresh * _REFRESH_SHARE > self.max_bytes:
            self.refresh()
        while self._recency.total + size > self.max_bytes:
            victim = self._recency.next_victim()
            if victim is None:
                return False
            self._files.remove(victim)
            self._forget(victim)
            self.stats.evicted += 1
        return True

    def _is_plausible(self, key: bytes, size: int) -> bool:
        """Whether a file not seen before may be indexed; a bad one is removed. Its checksum is looked at when read."""
        try:
            head = self._files.read_head(key)
        except OSError:
            return False
        if head is None:
            return False  # evicted by another process since its name was seen
        damage = check_size(head, size, self._namespace)
        if damage is not None:
            self._discard(key, damage)
        return damage is None

    def _discard(self, key: bytes, damage: Damage) -> None:
        match damage:
            case Damage.TORN:
                self.stats.torn += 1
            case Damage.CORRUPT:
                self.stats.corrupt += 1
            case Damage.FOREIGN:
                self.stats.foreign += 1
        self._files.remove(key)
        self._forget(key)

    def _forget(self, key: bytes) -> None:
        if self._recency.remove(key):
            self._log.removed(key)

    def _use(self, key: bytes) -> None:
        if self._recency.touch(key):
            self._files.mark_used(key, self._next_ns())

    def _next_ns(self) -> int:
        """Now, but later than any use before, so that order survives coarse or backward clocks."""
        self._last_used_ns = max(self._last_used_ns + 1, int(self._clock.wall_s() * _NS))
        return self._last_used_ns
