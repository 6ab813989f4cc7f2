"""What the Python core of the index remembers of one worker, and the shape of a batch that only the extension reads."""

from dataclasses import dataclass, field
from typing import Protocol

from kvatlas._native.arguments import AGE_BINS, USE_BINS

__all__ = ["Column", "Entry", "NativeBatch", "print_of"]


def print_of(block_key: int) -> int:
    """The 32 bits that a block goes by where its uses are noted; never 0."""
    return block_key & 0xFFFFFFFF or 1


class NativeBatch(Protocol):
    """A batch that the extension reads from its bytes."""

    @property
    def rank(self) -> int | None: ...
    @property
    def event_count(self) -> int: ...
    @property
    def position(self) -> int: ...


@dataclass(slots=True)
class Entry:
    """One handle of one worker: its block key once known, its copies per plane, and whether somebody waits for it."""

    block_key: int | None = None
    copies: dict[int, int] = field(default_factory=dict)
    waited: bool = False
    in_doubt: bool = False


@dataclass(slots=True)
class Column:
    name: str
    root_key: int
    counting: bool
    entries: dict[int, Entry] = field(default_factory=dict)
    stored: int = 0
    removed: int = 0
    unknown_removals: int = 0
    unpaired: int = 0
    """Here and `refused`: as a dump says; nothing counts them in this backend."""
    refused: int = 0
    forgotten: int = 0
    resident: int = 0
    unkeyed: int = 0
    doubted: int = 0
    reported: dict[int, int] = field(default_factory=dict)
    """Block keys that the engine reported and no event named -> `stored` at that time."""
    unsure: bool = False
    """Whether all of `reported` is in doubt."""
    removal_ages: list[int] = field(default_factory=lambda: [0] * AGE_BINS)
    """Removals by age in stamps: bin 0 for 0, bin i for 2^(i-1) to 2^i - 1."""
    uses: dict[int, int] = field(default_factory=dict)
    """Prints of blocks -> when a request last used them, by `stored + used`; see `c/uses.h`."""
    used: int = 0
    use_ages: list[int] = field(default_factory=lambda: [0] * USE_BINS)
    """Removals of blocks in `uses` by the code of their age."""

    @property
    def clock(self) -> int:
        return self.stored + self.used
