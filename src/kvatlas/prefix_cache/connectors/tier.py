"""What a connector asks of a place that keeps blocks, and what such a place reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["MEDIUM_CPU", "MEDIUM_STORAGE", "Tier", "TierChange", "TierStats"]

MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"


@dataclass(frozen=True, slots=True)
class TierChange:
    """Blocks that entered a tier (`stored`) or left it."""

    keys: tuple[bytes, ...]
    medium: str
    stored: bool


@dataclass(slots=True)
class TierStats:
    """What a tier did since it was made, in blocks unless said otherwise.

    Args:
        written: stored here.
        read: served.
        evicted: dropped to make room.
        refused: not stored, because no room could be made (all the rest is being read, or the block is too large).
        vanished: gone when they were to be read: somebody else removed them.
        torn: shorter than they say; corrupt: checksum, length or key is wrong; foreign: another format, version or
            namespace. All three were removed unserved.
        write_errors: not stored, because the file system refused.
        temporaries: leftovers of writers that died, removed.
    """

    written: int = 0
    read: int = 0
    evicted: int = 0
    refused: int = 0
    vanished: int = 0
    torn: int = 0
    corrupt: int = 0
    foreign: int = 0
    write_errors: int = 0
    temporaries: int = 0


class Tier(Protocol):
    """A bounded, content-addressed store of blocks. Nothing here raises for what a store does."""

    medium: str
    """What events call it."""

    @property
    def stats(self) -> TierStats:
        """Counts since the tier was made."""
        ...

    def contains(self, key: bytes) -> bool:
        """Whether a read would very probably succeed."""
        ...

    def source_of(self, key: bytes) -> str:
        """Name of the store a read would come from, as metrics call it."""
        ...

    def read(self, key: bytes) -> bytes | None:
        """The block's bytes, None when they are not there or not whole. Counts as a use."""
        ...

    def write(self, key: bytes, payload: bytes) -> bool:
        """Keep a block, evicting what was used longest ago; False when that is impossible. A known key is a use."""
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of each known key, in order."""
        ...

    def pin(self, key: bytes) -> None:
        """Protect a key from eviction until `unpin`."""
        ...

    def unpin(self, key: bytes) -> None:
        """Give one pin back."""
        ...

    def clear(self) -> None:
        """Drop everything."""
        ...

    def take_changes(self) -> list[TierChange]:
        """What entered and left since the last call, in order."""
        ...
