"""One worker's column: its engine hashes, what they mean, and how many copies of each it holds.

An engine names blocks by hashes of its own. They are opaque handles here: a handle gets a block key when some event
gives its tokens and its parent's key is known, whatever group that event came from, because the groups of one worker
share handles. Until then its residency is counted but matches nothing:

* a store whose parent is unknown waits in the orphan pool under that parent's handle, and joins when the parent
  appears; it is never attached to the root;
* a store whose token span is longer than its hashes (sliding-window groups skip blocks) proves no pair of hash and
  tokens.

Copies count: vLLM announces every physical copy and every loss of one, so a block is gone when its count is zero.
"""

import enum
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvatlas.errors import HashingError
from kvatlas.events import BlockHandle, BlockRemoved, BlockStored, plain_token_ids
from kvatlas.hashing import NO_BLOCK_EXTRAS, BlockExtras, BlockKeyHasher
from kvatlas.index.flat_index import FlatIndex, Plane
from kvatlas.index.match import FULL_KINDS, WINDOW_KINDS

__all__ = ["ColumnStats", "CopyMode", "WorkerColumn"]

DEFAULT_MEDIUM = "GPU"
_CLEARED_MEDIA = (DEFAULT_MEDIUM, "CPU_PINNED")
_U64 = (1 << 64) - 1


class CopyMode(enum.StrEnum):
    """What a repeated store of a resident block means for one engine."""

    COUNT = "count"
    """One more physical copy (vLLM's default, `kv_cache_report_mode=incremental`)."""
    SET = "set"
    """Nothing new (engines that re-announce what they reuse)."""


@dataclass(slots=True)
class ColumnStats:
    """What one worker's events amounted to, since the worker was added. Counters only grow; `*_now` are levels."""

    stored_blocks: int = 0
    removed_blocks: int = 0
    cleared: int = 0
    unknown_removals: int = 0
    """Removals of handles never seen: harmless, and a sign of batches missed before."""
    orphaned_blocks: int = 0
    dropped_orphan_blocks: int = 0
    unpaired_blocks: int = 0
    """Hashes whose content the event does not prove (masked spans, bigrams, extra keys of no known form)."""
    resident_now: int = 0
    unkeyed_now: int = 0
    """Resident blocks whose content is not known: they match nothing, so a hit may be longer than claimed."""
    orphans_now: int = 0


@dataclass(slots=True)
class _Handle:
    """One engine hash of one worker: its block key once known, and its copies per plane."""

    block_key: int | None
    copies: dict[Plane, int]


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive blocks of one store event whose parent is not known yet."""

    handles: tuple[BlockHandle, ...]
    token_ids: Sequence[int]
    extras: tuple[BlockExtras, ...]
    block_size: int


class WorkerColumn:
    """The books of one worker. Writes its residency into the shared flat index.

    Args:
        bit: this worker's bit in the flat index.
        block_size: tokens per block as configured; what the worker's own stores prove counts more.
        max_orphan_blocks: blocks that may wait for an unknown parent; beyond it the oldest wait is dropped and counted.
    """

    __slots__ = (
        "_handles",
        "_hasher",
        "_index",
        "_max_orphan_blocks",
        "_mode",
        "_orphans",
        "_root_key",
        "bit",
        "configured_block_size",
        "groups",
        "learnt_block_size",
        "only_full",
        "other_media",
        "stated_block_size",
        "stats",
    )

    def __init__(
        self,
        bit: int,
        index: FlatIndex,
        hasher: BlockKeyHasher,
        *,
        block_size: int | None,
        mode: CopyMode,
        max_orphan_blocks: int,
    ) -> None:
        self.bit = bit
        self.configured_block_size = block_size
        self.stated_block_size: int | None = None
        """As the engine's metrics say; unscaled under decode context parallelism, so stores count more."""
        self.learnt_block_size: int | None = None
        self.groups: dict[int, tuple[str, int | None]] = {}
        self.only_full = True
        """Whether the worker has one group only, of full attention: its hit is then a plain prefix."""
        self.other_media: set[str] = set()
        self.stats = ColumnStats()
        self._index = index
        self._hasher = hasher
        self._root_key = hasher.root_key()
        self._mode = mode
        self._max_orphan_blocks = max_orphan_blocks
        self._handles: dict[BlockHandle, _Handle] = {}
        self._orphans: OrderedDict[BlockHandle, list[_Run]] = OrderedDict()

    def store(self, event: BlockStored) -> None:
        """Apply one BlockStored. Cost: O(blocks)."""
        handles = tuple(normal_handle(handle) for handle in event.block_hashes)
        group = event.group_idx or 0
        plane = (normal_medium(event.medium), group)
        self._learn_group(plane, event)
        for handle in handles:
            self._add_copy(handle, plane)
        self.stats.stored_blocks += len(handles)
        if not handles:
            return
        size = event.block_size
        token_ids = _provable_token_ids(event)
        extras = _extras_per_block(event)
        if token_ids is None or extras is None:
            self.stats.unpaired_blocks += len(handles)
            return
        if plane[0] == DEFAULT_MEDIUM and self.learnt_block_size is None:
            self.learnt_block_size = size
        run = _Run(handles, token_ids, extras, size)
        if event.parent_block_hash is None:
            self._join(run, self._root_key)
            return
        parent = normal_handle(event.parent_block_hash)
        known = self._handles.get(parent)
        if known is not None and known.block_key is not None:
            self._join(run, known.block_key)
        else:
            self._wait_for(parent, run)

    def remove(self, event: BlockRemoved) -> None:
        """Apply one BlockRemoved: one copy less of each listed block, never below none. Cost: O(blocks)."""
        plane = (normal_medium(event.medium), event.group_idx or 0)
        for raw in event.block_hashes:
            handle = normal_handle(raw)
            entry = self._handles.get(handle)
            copies = entry.copies.get(plane, 0) if entry else 0
            if entry is None or not copies:
                self.stats.unknown_removals += 1
                continue
            self.stats.removed_blocks += 1
            if copies > 1:
                entry.copies[plane] = copies - 1
                continue
            del entry.copies[plane]
            self.stats.resident_now -= 1
            if entry.block_key is not None:
                self._index.discard(plane, entry.block_key, self.bit)
            if not entry.copies:
                self._drop(handle, entry)

    def clear(self) -> None:
        """The engine emptied its device pool; copies in other media stay. Cost: O(blocks of this worker).

        SGLang's clear also means its pinned host memory.
        """
        self._forget(lambda plane: plane[0] in _CLEARED_MEDIA)

    def reset(self) -> None:
        """Forget all of this worker: blocks in every medium, and what its stores taught. Cost: O(its blocks)."""
        self._forget(lambda _: True)
        self.learnt_block_size = None
        self.groups.clear()
        self.only_full = True
        self.other_media.clear()

    @property
    def block_size(self) -> int | None:
        """Tokens per block: as learnt from stores, else as configured, else as the metrics say."""
        return self.learnt_block_size or self.configured_block_size or self.stated_block_size

    @property
    def is_exact(self) -> bool:
        """Whether a hit is what the engine will report, neither more nor less.

        Not so with blocks of unknown content, copies in other media (engines count those as cached, too), or groups
        whose rule is not known.
        """
        known = all(kind in FULL_KINDS or (kind in WINDOW_KINDS and window) for kind, window in self.groups.values())
        return known and not self.stats.unkeyed_now and not self.other_media

    def _forget(self, is_gone: Callable[[Plane], bool]) -> None:
        for handle, entry in list(self._handles.items()):
            for plane in [plane for plane in entry.copies if is_gone(plane)]:
                del entry.copies[plane]
                self.stats.resident_now -= 1
                if entry.block_key is not None:
                    self._index.discard(plane, entry.block_key, self.bit)
            if not entry.copies:
                self._drop(handle, entry)
        self._orphans.clear()
        self.stats.orphans_now = 0

    def _drop(self, handle: BlockHandle, entry: _Handle) -> None:
        del self._handles[handle]
        if entry.block_key is None:
            self.stats.unkeyed_now -= 1

    def _learn_group(self, plane: Plane, event: BlockStored) -> None:
        medium, group = plane
        if medium != DEFAULT_MEDIUM:
            self.other_media.add(medium)  # offloading placeholders name a group without its kind
            return
        if event.kv_cache_spec_kind is None and group in self.groups:
            return
        profile = (event.kv_cache_spec_kind or "full_attention", event.kv_cache_spec_sliding_window)
        if self.groups.get(group) != profile:
            self.groups[group] = profile
            self.only_full = len(self.groups) == 1 and group == 0 and profile[0] in FULL_KINDS

    def _add_copy(self, handle: BlockHandle, plane: Plane) -> None:
        entry = self._handles.get(handle)
        if entry is None:
            entry = self._handles[handle] = _Handle(None, {})
            self.stats.unkeyed_now += 1
        copies = entry.copies.get(plane, 0)
        if copies and self._mode is CopyMode.SET:
            return
        entry.copies[plane] = copies + 1
        if not copies:
            self.stats.resident_now += 1
            if entry.block_key is not None:
                self._index.add(plane, entry.block_key, self.bit)

    def _join(self, run: _Run, parent_key: int) -> None:
        """Give a run's handles their keys and whoever waited for them theirs. Iterative: chains may be long."""
        pending = [(run, parent_key)]
        while pending:
            current, key = pending.pop()
            size = current.block_size
            for i, handle in enumerate(current.handles):
                key = self._hasher.block_key(key, current.token_ids[i * size : (i + 1) * size], current.extras[i])
                entry = self._handles.get(handle)
                if entry is not None and entry.block_key is None:
                    entry.block_key = key
                    self.stats.unkeyed_now -= 1
                    for plane in entry.copies:
                        self._index.add(plane, key, self.bit)
                waiting = self._orphans.pop(handle, None)
                if waiting:
                    self.stats.orphans_now -= sum(len(orphan.handles) for orphan in waiting)
                    pending.extend((orphan, key) for orphan in waiting)

    def _wait_for(self, parent: BlockHandle, run: _Run) -> None:
        self._orphans.setdefault(parent, []).append(run)
        self.stats.orphaned_blocks += len(run.handles)
        self.stats.orphans_now += len(run.handles)
        while self.stats.orphans_now > self._max_orphan_blocks:
            _, dropped = self._orphans.popitem(last=False)
            blocks = sum(len(orphan.handles) for orphan in dropped)
            self.stats.orphans_now -= blocks
            self.stats.dropped_orphan_blocks += blocks


def normal_handle(handle: BlockHandle) -> BlockHandle:
    """One form per hash: signed 64-bit integers (SGLang) become unsigned, bytes stay bytes."""
    return handle & _U64 if isinstance(handle, int) else handle


def normal_medium(medium: str | None) -> str:
    """Media compare without case; engines that name none mean the device."""
    return medium.upper() if medium else DEFAULT_MEDIUM


def _provable_token_ids(event: BlockStored) -> Sequence[int] | None:
    """The event's tokens if hash i surely covers tokens [i * block_size, (i + 1) * block_size), else None."""
    if event.block_size < 1 or len(event.token_ids) != len(event.block_hashes) * event.block_size:
        return None
    return plain_token_ids(event.token_ids)


def _extras_per_block(event: BlockStored) -> tuple[BlockExtras, ...] | None:
    """The extras of each listed block; None when they are of no form that engines publish.

    A salt named for the whole event (SGLang) belongs to the block at token 0.
    """
    count = len(event.block_hashes)
    published = event.extra_keys
    at_root = event.parent_block_hash is None
    if not published and event.lora_name is None and (event.cache_salt is None or not at_root):
        return (NO_BLOCK_EXTRAS,) * count
    try:
        return tuple(
            BlockExtras.from_published(
                published[i] if published and i < len(published) else None,
                event.lora_name,
                event.cache_salt if at_root and i == 0 else None,
            )
            for i in range(count)
        )
    except HashingError:
        return None
