"""Which blocks a stream of batches left resident, and where in the journal their content is written.

Copies count for each (medium, group, hash), as the index counts them. Content is not held: a block knows the place of
an event that proves it, and its parent. A block that is gone lives on as an object while a resident one hangs from it,
and no longer: Python's own reference counts prune the tree.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from kvatlas.errors import EventDecodeError
from kvatlas.events import AllBlocksCleared, BlockHandle, BlockRemoved, BlockStored, decode_batch

__all__ = ["Block", "Copies", "CopyCounting", "Place", "Residency", "is_sliceable"]

DEVICE_MEDIUM = "GPU"
# What AllBlocksCleared empties: the device's pool, and on SGLang its pinned host memory.
CLEARED_MEDIA = frozenset((DEVICE_MEDIUM, "CPU_PINNED"))

_BLOCK_BITS = 20
_EVENT_BITS = 20
_OFFSET_BITS = 40
_LOW = (1 << 20) - 1

Plane = tuple[str, int]


class CopyCounting(enum.StrEnum):
    """What a repeated store of a resident block means for one engine."""

    COUNT = "count"
    """One more physical copy (vLLM)."""
    SET = "set"
    """Nothing new (engines that re-announce what they reuse)."""


@dataclass(frozen=True, slots=True)
class Place:
    """One block of one event: the record's file and offset in it, the event's number, the block's number."""

    file: int
    offset: int
    event: int
    block: int

    def pack(self) -> int:
        """As one integer, which takes less memory."""
        return (((self.file << _OFFSET_BITS | self.offset) << _EVENT_BITS | self.event) << _BLOCK_BITS) | self.block

    @staticmethod
    def unpack(packed: int) -> "Place":
        """What `pack` made."""
        block, rest = packed & _LOW, packed >> _BLOCK_BITS
        event, rest = rest & _LOW, rest >> _EVENT_BITS
        return Place(rest >> _OFFSET_BITS, rest & ((1 << _OFFSET_BITS) - 1), event, block)


class Copies:
    """Copies of a block in one plane: how many, and the packed place of the newest event that stored one there."""

    __slots__ = ("count", "place", "plane")

    def __init__(self, plane: int, place: int) -> None:
        self.plane = plane
        self.place = place
        self.count = 1


class Block:
    """One block hash.

    Attributes:
        handle: the engine's hash.
        copies: one entry for each plane that holds it; empty once it is gone.
        content: packed place of an event that gives its tokens; None when none does.
        home: plane of that event.
        parent: the block before it, if that one was known.
        parent_handle: the engine's hash of the block before it; None at the root.
    """

    __slots__ = ("content", "copies", "handle", "home", "parent", "parent_handle")

    def __init__(self, handle: BlockHandle) -> None:
        self.handle = handle
        self.copies: list[Copies] = []
        self.content: int | None = None
        self.home = -1
        self.parent: Block | None = None
        self.parent_handle: BlockHandle | None = None

    def in_plane(self, plane: int) -> Copies | None:
        """Its copies in a plane; None without one."""
        return next((copies for copies in self.copies if copies.plane == plane), None)


def is_sliceable(event: BlockStored) -> bool:
    """Whether hash i of an event surely covers its tokens `[i * block_size, (i + 1) * block_size)`."""
    return event.block_size > 0 and len(event.token_ids) == len(event.block_hashes) * event.block_size


class Residency:
    """What is resident after the batches applied so far.

    Args:
        counting: what a repeated store means.
    """

    def __init__(self, counting: CopyCounting = CopyCounting.COUNT) -> None:
        self.blocks: dict[BlockHandle, Block] = {}
        self.planes: dict[Plane, int] = {}
        self.profiles: dict[tuple[object, ...], int] = {}
        """Kinds of store events seen, each with the packed place of its first: they tell which groups there are."""
        self.is_lossy = False
        """Whether something may be missing: batches or events that are lost, or could not be read."""
        self.rank: int | None = None
        """Data-parallel rank of the batches."""
        self.ts = 0.0
        """Timestamp of the newest batch."""
        self._counting = counting
        self._waiting: dict[BlockHandle, dict[BlockHandle, Block]] = {}

    def apply(self, payload: bytes, file: int, offset: int) -> None:
        """Apply one batch, written at `offset` of `file`. What cannot be read makes the state lossy."""
        try:
            decoded = decode_batch(payload)
        except EventDecodeError:
            self.is_lossy = True
            return
        batch = decoded.batch
        self.ts = batch.ts
        if batch.data_parallel_rank is not None:
            if self.rank is None:
                self.rank = batch.data_parallel_rank
            if batch.data_parallel_rank != self.rank:
                self.is_lossy = True
                return
        for number, event in enumerate(batch.events):
            match event:
                case BlockStored():
                    self._store(event, Place(file, offset, number, 0).pack())
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self._clear()
        if decoded.malformed:
            self.is_lossy = True

    def lost(self) -> None:
        """Batches are missing here."""
        self.is_lossy = True

    def plane_of(self, event: BlockStored | BlockRemoved) -> int:
        """Number of the (medium, group) of an event."""
        medium = event.medium.upper() if event.medium else DEVICE_MEDIUM
        return self.planes.setdefault((medium, event.group_idx or 0), len(self.planes))

    def resident(self) -> Iterator[Block]:
        """Blocks with a copy somewhere, in the order they came."""
        yield from self.blocks.values()

    def _store(self, event: BlockStored, place: int) -> None:
        plane = self.plane_of(event)
        kind, window = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
        profile = (event.medium, event.group_idx, kind, window, event.block_size, bool(event.block_hashes))
        self.profiles.setdefault(profile, place)
        sliceable = is_sliceable(event)
        parent_handle = event.parent_block_hash
        parent = None if parent_handle is None else self.blocks.get(parent_handle)
        for number, handle in enumerate(event.block_hashes):
            block = self.blocks.get(handle)
            if block is None:
                block = self.blocks[handle] = Block(handle)
            copies = block.in_plane(plane)
            if copies is None:
                block.copies.append(Copies(plane, place + number))
            else:
                copies.place = place + number
                if self._counting is CopyCounting.COUNT:
                    copies.count += 1
            if sliceable:
                if block.content is None or block.in_plane(block.home) is None:
                    self._tell(block, plane, place + number, parent, parent_handle)
                parent, parent_handle = block, handle

    def _tell(
        self, block: Block, plane: int, place: int, parent: Block | None, parent_handle: BlockHandle | None
    ) -> None:
        """A block's content is known now. Blocks that waited for it hang from it."""
        first = block.content is None
        block.content, block.home = place, plane
        block.parent_handle = parent_handle
        block.parent = parent if parent is not block else None
        if parent is None and parent_handle is not None:
            self._waiting.setdefault(parent_handle, {})[block.handle] = block
        if first:
            for child in self._waiting.pop(block.handle, {}).values():
                if child.parent is None and child is not block:
                    child.parent = block

    def _remove(self, event: BlockRemoved) -> None:
        plane = self.plane_of(event)
        for handle in event.block_hashes:
            block = self.blocks.get(handle)
            copies = block.in_plane(plane) if block is not None else None
            if block is None or copies is None:
                continue
            copies.count -= 1
            if not copies.count:
                block.copies.remove(copies)
                if not block.copies:
                    self._drop(block)

    def _clear(self) -> None:
        cleared = {number for (medium, _), number in self.planes.items() if medium in CLEARED_MEDIA}
        for block in list(self.blocks.values()):
            block.copies = [copies for copies in block.copies if copies.plane not in cleared]
            if not block.copies:
                self._drop(block)
        if not self.blocks:
            self.is_lossy = False

    def _drop(self, block: Block) -> None:
        del self.blocks[block.handle]
        handle = block.parent_handle
        if block.parent is None and handle is not None and (waiting := self._waiting.get(handle)) is not None:
            waiting.pop(block.handle, None)
            if not waiting:
                del self._waiting[handle]
