"""One worker's column: its engine hashes, what they mean, and how many copies of each it holds.

An engine names blocks by hashes of its own. They are opaque handles here: a handle gets a block key when some event
gives its tokens and its parent's key is known, whatever group that event came from, because the groups of one worker
share handles. Until then its residency is counted but matches nothing:

* a store whose parent is unknown waits in the orphan pool under that parent's handle, and joins when the parent
  appears; it is never attached to the root;
* a store whose token span is longer than its hashes (sliding-window groups skip blocks) proves no pair of hash and
  tokens.

Copies count: vLLM announces every physical copy and every loss of one, so a block is gone when its count is zero.

The core keeps the books; here stand the rules about events. Once an event of some profile (medium, group, kind, window)
has been judged here, the core applies its like straight from the bytes.
"""

from array import array
from collections.abc import Iterable, Sequence

from kvatlas import _native
from kvatlas._native import IndexCore
from kvatlas.errors import HashingError
from kvatlas.events import BlockRemoved, BlockStored, plain_token_ids
from kvatlas.hashing import NO_BLOCK_EXTRAS, BlockExtras, BlockKeyHasher, RequestExtras
from kvatlas.index.column_state import ColumnState, ColumnStats
from kvatlas.index.digests import DigestBook
from kvatlas.index.doubts import DoubtBook
from kvatlas.index.groups import GroupBook
from kvatlas.index.orphans import OrphanPool, Run
from kvatlas.index.planes import DEFAULT_MEDIUM, Plane, Planes, normal_medium

__all__ = ["WorkerColumn"]


class WorkerColumn:
    """The books of one worker.

    Args:
        core: keeps the residency of all workers.
        number: this worker's in the core.
        root_key: parent key of its first blocks.
        block_size: tokens per block as configured; what the worker's own stores prove counts more.
        max_orphan_blocks: blocks that may wait for an unknown parent; beyond it the oldest wait is dropped and counted.
    """

    __slots__ = (
        "_cleared",
        "_complete_at",
        "_core",
        "_hasher",
        "_planes",
        "_survived_loss",
        "_taught",
        "_unplaced",
        "_unprovable",
        "bit",
        "configured_block_size",
        "digests",
        "doubts",
        "groups",
        "number",
        "orphans",
        "other_media",
        "root_key",
        "stated_block_size",
    )

    def __init__(
        self,
        core: IndexCore,
        number: int,
        planes: Planes,
        hasher: BlockKeyHasher,
        *,
        root_key: int,
        block_size: int | None,
        max_orphan_blocks: int,
    ) -> None:
        self.number = number
        self.bit = 1 << number
        self.root_key = root_key
        self.configured_block_size = block_size
        self.stated_block_size: int | None = None
        """As the engine's metrics say; unscaled under decode context parallelism, so stores count more."""
        self.groups = GroupBook()
        self.other_media: set[str] = set()
        self.orphans = OrphanPool(max_orphan_blocks, core.charge)
        self.doubts = DoubtBook(core, number)
        self.digests = DigestBook(core)
        self._core = core
        self._planes = planes
        self._hasher = hasher
        self._taught: set[tuple[object, ...]] = set()
        self._cleared = 0
        self._unprovable = 0
        self._unplaced = 0
        self._complete_at = 0
        self._survived_loss = False

    def store(self, event: BlockStored) -> None:
        """Apply one BlockStored. Cost: O(blocks)."""
        plane = (normal_medium(event.medium), event.group_idx or 0)
        number = self._planes.number(plane)
        self._learn_group(plane, event)  # even if there is no room for it: a group that holds nothing allows no hit
        if number is None:
            self._unplaced += len(event.block_hashes)
            return
        numbers = self._core.handle_numbers(event.block_hashes)
        self._core.add_copies(self.number, number, numbers)
        if not numbers:
            return
        run = self._provable_run(event, numbers)
        if run is None:
            self._unprovable += len(numbers)
            return
        self._teach(event, run, number)
        if event.parent_block_hash is None:
            self._join([(run, self.root_key)])
            return
        parent = self._core.handle_numbers([event.parent_block_hash])[0]
        parent_key = self._core.key_of(self.number, parent)
        if parent_key is not None:
            self._join([(run, parent_key)])
        else:
            self._wait_for(parent, run)

    def remove(self, event: BlockRemoved) -> None:
        """Apply one BlockRemoved: one copy less of each listed block, never below none. Cost: O(blocks)."""
        plane = self._planes.number((normal_medium(event.medium), event.group_idx or 0))
        if plane is not None:
            self._core.remove_copies(self.number, plane, self._core.handle_numbers(event.block_hashes))

    def clear(self) -> None:
        """The engine emptied its device pool; copies in other media stay. Cost: O(blocks of this worker).

        SGLang's clear also means its pinned host memory.
        """
        self._cleared += 1
        self._core.forget(self.number, self._planes.cleared())
        self.orphans.clear()
        self._is_empty()

    def reset(self) -> None:
        """Forget all of this worker: blocks in every medium, and what its stores taught. Cost: O(its blocks)."""
        self._core.forget_all(self.number)
        self._unteach()
        self.orphans.clear()
        self.groups.clear()
        self.other_media.clear()
        self.digests.reset()
        self._is_empty()

    def state(self) -> ColumnState:
        """What a snapshot keeps beside the core's dump."""
        orphans = self.orphans
        return ColumnState(
            stated_block_size=self.stated_block_size,
            unit_tokens=self.groups.unit_tokens,
            groups=self.groups.state(),
            other_media=tuple(sorted(self.other_media)),
            doubts=self.doubts.state(),
            cleared=self._cleared,
            orphaned_blocks=orphans.waited_blocks,
            dropped_orphan_blocks=orphans.dropped_blocks + orphans.blocks_now,
            unprovable=self._unprovable,
            unplaced=self._unplaced,
            complete_at=self._complete_at,
            survived_loss=self._survived_loss,
        )

    def restore(self, state: ColumnState) -> None:
        """Go on as a snapshot says; the core has loaded the blocks already."""
        self.stated_block_size = state.stated_block_size
        self.groups.restore(state.groups, state.unit_tokens)
        self.other_media = set(state.other_media)
        self.doubts.restore(state.doubts)
        self.orphans.restore(state.orphaned_blocks, state.dropped_orphan_blocks)
        self._cleared = state.cleared
        self._unprovable = state.unprovable
        self._unplaced = state.unplaced
        self._complete_at = state.complete_at
        self._survived_loss = state.survived_loss

    def _is_empty(self) -> None:
        """All that the worker holds from now on is known."""
        self.doubts.end()
        self._complete_at = self._missing
        self._survived_loss = False

    def doubt(self) -> None:
        """Events of the worker are lost: what it held may be gone, and it may hold what nobody told."""
        self.doubts.begin()
        self._unplaced += 1
        self._survived_loss = True

    def settle(self) -> None:
        """After events: end what a turnover ends."""
        if self.doubts.settle():
            self._complete_at = self._missing  # what nobody told is gone, too, or was in use and so reported
        if self.orphans.may_wait_in_vain:
            self.drop_orphans(self.orphans.limit_for(self._core.shortfall(self.number)[1]))

    def wake(self, woken: Iterable[tuple[int, int]]) -> None:
        """Join the runs that waited for these handles, whose block keys are now known."""
        self._join([(run, key) for number, key in woken for run in self.orphans.take(number)])

    def place_orphans(self, token_ids: Sequence[int], extras: RequestExtras, block_keys: "array[int]") -> int:
        """Give waiting blocks their keys where the prompt of these keys proves them. Returns how many: `DigestBook`."""
        size = self.block_size
        if not self.orphans.blocks_now or size is None:
            return 0
        before = self._core.shortfall(self.number)[1]
        prompt = token_ids[: len(block_keys) * size]
        numbers = self.digests.numbers(prompt, size, extras, self.orphans)
        keys = block_keys[: len(numbers)]
        self.wake([(numbers[place], keys[place]) for place in self._core.join(self.number, numbers, keys)])
        return before - self._core.shortfall(self.number)[1]

    def drop_orphans(self, max_blocks: int) -> None:
        """End the oldest waits until at most `max_blocks` wait."""
        for number in self.orphans.shrink(max_blocks):
            self._core.stop_waiting(self.number, number)

    @property
    def block_size(self) -> int | None:
        """Tokens per block key: as learnt from stores, else as configured, else as the metrics say."""
        return self.groups.unit_tokens or self.configured_block_size or self.stated_block_size

    @property
    def stats(self) -> ColumnStats:
        """The counters as they stand."""
        stored, removed, unknown, unpaired, refused, forgotten, resident, unkeyed, doubted = self._core.counts(
            self.number
        )
        return ColumnStats(
            stored_blocks=stored,
            removed_blocks=removed,
            cleared=self._cleared,
            unknown_removals=unknown,
            orphaned_blocks=self.orphans.waited_blocks,
            dropped_orphan_blocks=self.orphans.dropped_blocks,
            unpaired_blocks=unpaired + self._unprovable,
            refused_blocks=refused + self._unplaced,
            forgotten_blocks=forgotten,
            resident_now=resident,
            unkeyed_now=unkeyed,
            doubted_now=doubted,
            reported_now=self._core.reported(self.number),
            orphans_now=self.orphans.blocks_now,
        )

    @property
    def _missing(self) -> int:
        """Blocks the worker may hold that were not recorded, or given up, ever."""
        return self._core.shortfall(self.number)[0] + self._unplaced

    @property
    def is_complete(self) -> bool:
        """Whether all it holds was told, without a loss, since it was last known to be empty."""
        return not self._survived_loss and self._missing == self._complete_at

    @property
    def is_exact(self) -> bool:
        """Whether a hit is what the engine will report, neither more nor less.

        Not so with blocks of unknown content, copies in other media (engines count those as cached, too), groups whose
        rule is not known, blocks given up for want of memory, or a loss of events less than one turnover ago.
        """
        if self.other_media or not self.groups.joins_exactly:
            return False
        missing, unkeyed = self._core.shortfall(self.number)
        return not unkeyed and missing + self._unplaced == self._complete_at

    def _learn_group(self, plane: Plane, event: BlockStored) -> None:
        medium, _ = plane
        if medium != DEFAULT_MEDIUM:
            self.other_media.add(medium)  # offloading placeholders name a group without its kind
            return
        before = self.groups.unit_tokens
        if not self.groups.learn(event):
            return
        self._unteach()
        if before not in {None, self.groups.unit_tokens}:
            # Keys cover other spans from now on: what was keyed before would never be found.
            self._unplaced += self._core.entries(self.number)
            self._core.forget_all(self.number)
            self.orphans.clear()

    def _provable_run(self, event: BlockStored, numbers: "array[int]") -> Run | None:
        """The event's blocks and what is in them; None when the event does not prove it."""
        token_ids = _provable_token_ids(event)
        extras = _extras_per_block(event)
        if token_ids is None or extras is None:
            return None
        unit = self.groups.unit_tokens
        if unit is None or event.block_size % unit:
            return Run(numbers, token_ids, extras, event.block_size)
        units = event.block_size // unit
        in_units = extras if units == 1 else _extras_per_unit(extras, units)
        return None if in_units is None else Run(numbers, token_ids, in_units, unit, units)

    def _teach(self, event: BlockStored, run: Run, plane: int) -> None:
        """Have the core apply events like this one by itself, where one hash is one key."""
        if run.units != 1:
            return
        profile = (
            event.medium,
            event.group_idx,
            event.kv_cache_spec_kind,
            event.kv_cache_spec_sliding_window,
            event.block_size,
        )
        if profile not in self._taught:
            self._taught.add(profile)
            self._core.learn(self.number, *profile, plane)

    def _unteach(self) -> None:
        self._taught.clear()
        self._core.unlearn(self.number)

    def _join(self, pending: list[tuple[Run, int]]) -> None:
        """Give runs' handles their keys and whoever waited for them theirs. Iterative: chains may be long."""
        while pending:
            run, parent_key = pending.pop()
            keys = self._keys_of(run, parent_key)
            for position in self._core.join(self.number, run.numbers, keys):
                pending.extend((orphan, keys[position]) for orphan in self.orphans.take(run.numbers[position]))

    def _keys_of(self, run: Run, parent_key: int) -> "array[int]":
        """One key for each block: that of its last unit."""
        keys = self._hasher.block_keys(parent_key, run.token_ids, run.unit_tokens, run.extras)
        return keys[run.units - 1 :: run.units]

    def _wait_for(self, parent: int, run: Run) -> None:
        packed = Run(run.numbers, _native.pack_tokens(run.token_ids), run.extras, run.unit_tokens, run.units)
        self._core.wait(self.number, parent)
        for number in self.orphans.add(parent, packed):
            self._core.stop_waiting(self.number, number)


def _provable_token_ids(event: BlockStored) -> Sequence[int] | None:
    """The event's tokens if hash i surely covers tokens [i * block_size, (i + 1) * block_size), else None."""
    if event.block_size < 1 or len(event.token_ids) != len(event.block_hashes) * event.block_size:
        return None
    return plain_token_ids(event.token_ids)


def _extras_per_unit(extras: Sequence[BlockExtras], units: int) -> tuple[BlockExtras, ...] | None:
    """The extras of each unit of longer blocks; None when nobody can say which of a block's units has which image."""
    if any(block.multimodal or block.prompt_embeds_digest for block in extras):
        return None
    later = [NO_BLOCK_EXTRAS if block.lora_name is None else BlockExtras(lora_name=block.lora_name) for block in extras]
    return tuple(unit for block, rest in zip(extras, later, strict=True) for unit in (block, *[rest] * (units - 1)))


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
