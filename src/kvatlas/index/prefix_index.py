"""The index a router asks: for this prompt, how much does each worker already hold?"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from kvatlas.errors import IndexStateError
from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvatlas.hashing import NO_EXTRAS, BlockKeyHasher, RequestExtras
from kvatlas.index.column import DEFAULT_MEDIUM, ColumnStats, CopyMode, WorkerColumn
from kvatlas.index.flat_index import FlatIndex
from kvatlas.index.match import GroupProfile, WorkerMatch, joint_hit_blocks, max_hit_blocks

__all__ = ["PrefixIndex"]

DEFAULT_MAX_ORPHAN_BLOCKS = 65_536


class PrefixIndex:
    """Workers' columns over one flat index.

    Args:
        hasher: gives block keys their seed; None draws one at random, so that nobody can aim collisions at this
            process.
        max_orphan_blocks: per worker, blocks that may wait for a parent that has not been announced.

    Single writer: all calls on one thread.
    """

    def __init__(
        self, hasher: BlockKeyHasher | None = None, *, max_orphan_blocks: int = DEFAULT_MAX_ORPHAN_BLOCKS
    ) -> None:
        self._hasher = hasher or BlockKeyHasher()
        self._flat = FlatIndex()
        self._columns: dict[str, WorkerColumn] = {}
        self._free_bits: list[int] = []
        self._max_orphan_blocks = max_orphan_blocks

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Workers with a column, in the order they were added."""
        return tuple(self._columns)

    def add_worker(
        self, worker_id: str, *, block_size: int | None = None, copy_mode: CopyMode = CopyMode.COUNT
    ) -> None:
        """Give a worker an empty column.

        Args:
            worker_id: any unique text.
            block_size: tokens per block; None learns it. What the worker's own stores prove counts more.
            copy_mode: what a repeated store means for this engine.

        Raises:
            IndexStateError: the worker already has a column, or the block size is below 1.
        """
        if worker_id in self._columns:
            raise IndexStateError(f"worker {worker_id!r} is already in the index; remove it first if it is a new one")
        if block_size is not None and block_size < 1:
            raise IndexStateError(
                f"block size {block_size} was given for worker {worker_id!r}; expected 1 or more tokens"
            )
        bit = self._free_bits.pop() if self._free_bits else 1 << len(self._columns)
        self._columns[worker_id] = WorkerColumn(
            bit,
            self._flat,
            self._hasher,
            block_size=block_size,
            mode=copy_mode,
            max_orphan_blocks=self._max_orphan_blocks,
        )

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker and all it held. Cost: O(blocks of that worker).

        Raises:
            IndexStateError: no such worker.
        """
        column = self._column(worker_id)
        column.reset()
        del self._columns[worker_id]
        self._free_bits.append(column.bit)

    def purge(self, worker_id: str) -> None:
        """Forget all that one worker's events said, touch nobody else. Cost: O(blocks of that worker)."""
        self._column(worker_id).reset()

    def apply(self, worker_id: str, event: Event) -> None:
        """Apply one event of one worker. Cost: O(blocks of the event), O(blocks of the worker) for a clear.

        Raises:
            IndexStateError: no such worker.
        """
        column = self._column(worker_id)
        match event:
            case BlockStored():
                column.store(event)
            case BlockRemoved():
                column.remove(event)
            case AllBlocksCleared():
                column.stats.cleared += 1
                column.clear()

    def block_size(self, worker_id: str) -> int | None:
        """Tokens per block of a worker; None while neither configured nor learnt."""
        return self._column(worker_id).block_size

    def set_block_size(self, worker_id: str, block_size: int) -> None:
        """State a worker's block size as its metrics give it; configuration and its own stores count more."""
        self._column(worker_id).stated_block_size = block_size

    def stats(self, worker_id: str) -> ColumnStats:
        """The worker's counters (live object: read, do not keep)."""
        return self._column(worker_id).stats

    def match(
        self, token_ids: Sequence[int], *, extras: RequestExtras = NO_EXTRAS, worker_ids: Iterable[str] | None = None
    ) -> dict[str, WorkerMatch]:
        """How much of a prompt each worker holds now.

        Args:
            token_ids: the prompt as the engine will see it, int[num_tokens].
            extras: LoRA, images, salt: part of what a block's content is.
            worker_ids: ask only about these; None asks about all. Unknown ids are left out of the answer.

        Returns:
            worker id -> match, for every worker asked about whose block size is known (0 tokens is an answer too).

        Cost: hashing each block once per distinct block size, up to the first block nobody holds.
        """
        asked = self._columns if worker_ids is None else {w: self._columns[w] for w in worker_ids if w in self._columns}
        by_size: dict[int, dict[str, WorkerColumn]] = {}
        for worker_id, column in asked.items():
            if column.block_size is not None:
                by_size.setdefault(column.block_size, {})[worker_id] = column
        found: dict[str, WorkerMatch] = {}
        for size, columns in by_size.items():
            found.update(self._match_one_size(token_ids, extras, size, columns))
        return found

    def _match_one_size(
        self, token_ids: Sequence[int], extras: RequestExtras, size: int, columns: dict[str, WorkerColumn]
    ) -> dict[str, WorkerMatch]:
        limit = max_hit_blocks(len(token_ids), size)
        keys = _LazyChain(self._hasher, token_ids, size, extras)
        simple = {w: c for w, c in columns.items() if c.only_full}
        bits = 0
        for column in simple.values():
            bits |= column.bit
        depth = self._flat.prefix_blocks((DEFAULT_MEDIUM, 0), islice(keys, limit), bits)
        found = {}
        for worker_id, column in columns.items():
            blocks = depth.get(column.bit, 0) if worker_id in simple else self._joint_hit(column, keys, limit)
            tiers = {DEFAULT_MEDIUM: blocks * size}
            for medium in column.other_media:
                held = self._flat.prefix_blocks((medium, 0), islice(keys, limit), column.bit)
                tiers[medium] = held.get(column.bit, 0) * size
            found[worker_id] = WorkerMatch(blocks * size, blocks, size, tiers, exact=column.is_exact)
        return found

    def _joint_hit(self, column: WorkerColumn, keys: "_LazyChain", limit: int) -> int:
        profiles = _profiles(column)
        full = limit
        for profile in profiles:
            if profile.is_full:
                plane = (DEFAULT_MEDIUM, profile.group_id)
                full = min(full, self._flat.prefix_blocks(plane, islice(keys, limit), column.bit).get(column.bit, 0))

        def resident(group_id: int, block: int) -> bool:
            return bool(self._flat.holders((DEFAULT_MEDIUM, group_id), keys[block]) & column.bit)

        return joint_hit_blocks(profiles, full, resident, column.block_size or 1)

    def _column(self, worker_id: str) -> WorkerColumn:
        try:
            return self._columns[worker_id]
        except KeyError:
            known = ", ".join(self._columns) or "none"
            raise IndexStateError(f"no worker {worker_id!r} in the index; known workers: {known}") from None


class _LazyChain:
    """Block keys of a prompt, hashed when first asked for and kept."""

    __slots__ = ("_keys", "_source")

    def __init__(
        self, hasher: BlockKeyHasher, token_ids: Sequence[int], block_size: int, extras: RequestExtras
    ) -> None:
        self._source = hasher.iter_chain(token_ids, block_size, extras=extras)
        self._keys: list[int] = []

    def __iter__(self) -> Iterator[int]:
        yield from self._keys
        for block_key in self._source:
            self._keys.append(block_key)
            yield block_key

    def __getitem__(self, block: int) -> int:
        while len(self._keys) <= block:
            self._keys.append(next(self._source))
        return self._keys[block]


def _profiles(column: WorkerColumn) -> tuple[GroupProfile, ...]:
    return tuple(GroupProfile(group, kind, window) for group, (kind, window) in sorted(column.groups.items()))
