"""The fleet index's core in Python: what it means, and what runs where the extension is not built.

Same names, arguments, results and errors as `index_kernel`; `tests/contract/test_index_kernels.py` holds one to the
other. Two things differ: memory is estimated, and never refused; no batch is applied from its bytes.

Workers and planes are small numbers. A plane is one KV cache group in one medium; plane 0 is the first group of the
device. What a worker held when its events were lost is in doubt: such claims stand in the shadow of their plane, where
only those find them who ask for doubted claims, too. Handles are an engine's block hashes as 64-bit numbers; block keys
are kvatlas's own.
"""

from array import array
from collections.abc import Iterable, Sequence

from kvatlas._native import _pure
from kvatlas._native._pure_column import Column, Entry, NativeBatch
from kvatlas._native._pure_recency import AgingState
from kvatlas._native.arguments import (
    MAX_PLANES,
    MAX_WORKERS,
    count_blocks,
    foreign_batch,
    index_full,
    require_pairs,
    require_u64,
)

__all__ = ["IndexCore"]

_U64 = (1 << 64) - 1
_ENTRY_BYTES = 330  # measured: a handle, its entry and its dictionary of copies
_BLOCK_BYTES = 120  # measured: a key and its row of workers, or a print and its time


class IndexCore(AgingState):
    """Residency of blocks on workers.

    Args:
        seed: of block keys and of the numbers of byte handles, 0..2**64-1.
        max_bytes: most bytes of memory, 0 for no cap. What does not fit is refused and counted (natively only).

    Raises:
        HashingError: seed out of range.
    """

    # -- workers and planes --

    def add_plane(self) -> int:
        """Return the number of a new plane.

        Raises:
            IndexStateError: there are 256 already.
        """
        if len(self._planes) == MAX_PLANES:
            raise index_full("planes", MAX_PLANES)
        self._planes.append({})
        self._shadows.append({})
        return len(self._planes) - 1

    def add_worker(self, name: str, root_key: int, /, *, counting: bool) -> int:
        """Return the number of a new worker, the lowest free one.

        Args:
            name: what results call it.
            root_key: parent key of its first blocks.
            counting: whether a repeated store is one more copy.

        Raises:
            IndexStateError: there are 4,096 already.
            HashingError: the root key is no unsigned 64-bit word.
        """
        require_u64("a root key", root_key)
        worker = next((number for number in range(MAX_WORKERS) if number not in self._columns), None)
        if worker is None:
            raise index_full("workers", MAX_WORKERS)
        self._columns[worker] = Column(name, root_key, counting)
        return worker

    def drop_worker(self, worker: int, /) -> None:
        """Forget a worker and all it holds; its number is free again. Cost: O(its blocks)."""
        self.forget_all(worker)
        del self._columns[worker]

    # -- what events say --

    def handle_numbers(self, handles: Sequence[int | bytes], /) -> "array[int]":
        """Return an engine's hashes as 64-bit numbers: integers by their low 64 bits, bytes by a seeded hash."""
        return array(
            "Q",
            [handle & _U64 if isinstance(handle, int) else _pure.xxh3_64(handle, self._seed) for handle in handles],
        )

    def add_copies(self, worker: int, plane: int, numbers: "array[int]", /) -> None:
        """One more copy of each block in a plane, or, when the worker does not count, at least one. Cost: O(blocks)."""
        column = self._column(worker)
        self._plane(plane)
        self._ticks += len(numbers)
        column.stored += len(numbers)
        for number in numbers:
            entry = column.entries.setdefault(number, Entry())
            if entry.in_doubt:
                self._renew(column, worker, entry)
            copies = entry.copies.get(plane, 0)
            if copies and not column.counting:
                continue
            if not entry.copies and entry.block_key is None:
                column.unkeyed += 1
            entry.copies[plane] = copies + 1
            if copies:
                continue
            column.resident += 1
            if entry.block_key is not None:
                self._claim(column, worker, plane, entry.block_key, in_doubt=False)

    def join(self, worker: int, numbers: "array[int]", block_keys: "array[int]", /) -> list[int]:
        """Give resident blocks their keys, where they have none yet.

        Returns:
            Positions of the blocks that were waited for (see `wait`); nobody waits for them any more.

        Raises:
            IndexStateError: as many keys as numbers are needed.
        """
        column = self._column(worker)
        require_pairs(len(numbers), len(block_keys))
        woken = []
        for position, (number, block_key) in enumerate(zip(numbers, block_keys, strict=True)):
            entry = column.entries.get(number)
            if entry is None:
                continue
            if entry.block_key is None and entry.copies:
                entry.block_key = block_key
                column.unkeyed -= 1
                for plane in entry.copies:
                    self._claim(column, worker, plane, block_key, in_doubt=entry.in_doubt)
            if entry.waited:
                woken.append(position)
                entry.waited = False
                if not entry.copies:
                    del column.entries[number]
        return woken

    def remove_copies(self, worker: int, plane: int, numbers: "array[int]", /) -> None:
        """One copy less of each block in a plane, never below none. Cost: O(blocks)."""
        column = self._column(worker)
        self._plane(plane)
        for number in numbers:
            entry = column.entries.get(number)
            copies = entry.copies.get(plane, 0) if entry else 0
            if entry is None or not copies:
                column.unknown_removals += 1
                self._doubt_reported(column, worker)  # it may have been one of those
                continue
            column.removed += 1
            if copies > 1 and not entry.in_doubt:  # in doubt, the last copy may be gone
                entry.copies[plane] = copies - 1
                continue
            if plane == 0 and not entry.in_doubt:
                self._note_removal(column, entry)
            self._take(column, worker, entry, plane)
            if entry.block_key is None:
                self._doubt_reported(column, worker)
            self._leave(column, number, entry)

    def key_of(self, worker: int, number: int, /) -> int | None:
        """The block key of a resident block; None when it is not resident or its key is not known. Cost: O(1)."""
        entry = self._column(worker).entries.get(number)
        return None if entry is None else entry.block_key

    def wait(self, worker: int, number: int, /) -> None:
        """Have `join` report this block when it gets its key. Repeating it changes nothing."""
        self._column(worker).entries.setdefault(number, Entry()).waited = True

    def stop_waiting(self, worker: int, number: int, /) -> None:
        """Take `wait` back."""
        column = self._column(worker)
        entry = column.entries.get(number)
        if entry is not None and entry.waited:
            entry.waited = False
            if not entry.copies:
                del column.entries[number]

    def forget(self, worker: int, planes: Iterable[int], /) -> None:
        """Forget all copies in some planes, and who waits. Cost: O(blocks of the worker)."""
        column = self._column(worker)
        gone = set(planes)
        for plane in gone:
            self._plane(plane)
        for number, entry in list(column.entries.items()):
            entry.waited = False
            had_copies = bool(entry.copies)
            for plane in gone & entry.copies.keys():
                self._take(column, worker, entry, plane)
            if had_copies:
                self._leave(column, number, entry)
            else:
                del column.entries[number]
        if 0 in gone:
            self.expire_reported(worker, _U64)

    def forget_all(self, worker: int, /) -> None:
        """Forget all copies of a worker in every plane, and who waits. Cost: O(blocks of the worker)."""
        self.forget(worker, range(len(self._planes)))
        self._forget_ages(worker)

    def forget_oldest(self, worker: int, count: int, /) -> int:
        """Forget about `count` blocks of a worker: those no prompt can match first, then those longest without use.

        Returns:
            How many went.

        Cost: O(blocks of the worker).
        """
        column = self._column(worker)
        entries = [(number, entry) for number, entry in column.entries.items() if entry.copies]
        entries.sort(key=lambda item: self._stamp_of(item[1]))
        for number, entry in entries[:count]:
            for plane in list(entry.copies):
                self._take(column, worker, entry, plane)
            self._leave(column, number, entry)
        gone = min(count, len(entries))
        column.forgotten += gone
        return gone

    # -- what is known --

    @property
    def blocks(self) -> int:
        """(plane, block key) pairs with at least one holder; those in doubt count by themselves."""
        return sum(len(holders) for holders in (*self._planes, *self._shadows))

    @property
    def used_bytes(self) -> int:
        """Memory held; an estimate, natively what the process holds for the index."""
        columns = self._columns.values()
        held = sum(len(column.entries) * _ENTRY_BYTES + len(column.uses) * _BLOCK_BYTES for column in columns)
        return held + self.blocks * _BLOCK_BYTES + self._charged

    @property
    def live_bytes(self) -> int:
        """Memory in use; natively less than what is held, by the room between live tables."""
        return self.used_bytes

    @property
    def refusals(self) -> int:
        """Requests for memory that the cap refused, ever. Here none."""
        return 0

    def charge(self, count: int, /) -> bool:
        """Count bytes that others hold for the index: so many more, or fewer. False when the cap refuses them."""
        if count > 0 and self.max_bytes and self.used_bytes + count > self.max_bytes:
            return False
        self._charged += count
        return True

    def find(self, plane: int, block_keys: Sequence[int], asked: bytes, /, *, doubted: bool = False) -> dict[str, int]:
        """How many leading blocks of a chain each worker holds in a plane without a hole.

        Args:
            plane: its number.
            block_keys: the chain; an array of 64-bit words is read where it lies.
            asked: one bit for each worker asked about, lowest first, in whole 8-byte words.
            doubted: whether claims in doubt count, too.

        Returns:
            name -> blocks, for every worker that holds at least the first.

        Cost: O(blocks that somebody holds), natively 5-20 ns each, and 30 ns for each worker found.
        """
        holders = self._plane(plane)
        shadow = self._shadows[plane] if doubted else {}
        found: dict[str, int] = {}
        alive = int.from_bytes(asked, "little")
        depth = 0
        for block_key in block_keys:
            still = alive & (holders.get(block_key, 0) | shadow.get(block_key, 0))
            if still != alive:
                self._record(found, alive & ~still, depth)
                alive = still
                if not alive:
                    break
            if plane == 0 and block_key in holders:
                self._stamps[block_key] = self._stamp
            depth += 1
        self._ticks += depth
        self._record(found, alive, depth)
        return found

    def _record(self, found: dict[str, int], workers: int, depth: int) -> None:
        while workers and depth:
            lowest = workers & -workers
            column = self._columns.get(lowest.bit_length() - 1)
            if column is not None:
                found[column.name] = depth
            workers ^= lowest

    def find_tokens(
        self,
        plane: int,
        token_ids: Sequence[int],
        block_size: int,
        root_key: int,
        limit_blocks: int,
        asked: bytes,
        /,
        *,
        doubted: bool = False,
    ) -> dict[str, int]:
        """The same for a prompt: it is hashed a few blocks ahead, no further than somebody holds it.

        Raises:
            HashingError: bad token ids, block size or root key.
        """
        self._plane(plane)
        words = _pure.pack_tokens(token_ids)
        num_blocks = min(count_blocks(len(words), block_size), limit_blocks)
        require_u64("a root key", root_key)
        keys = _chain(words, block_size, root_key, self._seed, num_blocks)
        return self.find(plane, keys, asked, doubted=doubted)  # type: ignore[arg-type]

    def held(self, plane: int, worker: int, block_keys: Sequence[int], /) -> bytes:
        """Whether a worker holds each block in a plane: one byte each, 2 = yes, 1 = in doubt, 0 = no. O(blocks)."""
        self._column(worker)
        holders, shadow = self._plane(plane), self._shadows[plane]
        return bytes(2 if holders.get(key, 0) >> worker & 1 else shadow.get(key, 0) >> worker & 1 for key in block_keys)

    # -- straight from bytes: natively only --

    def open_batch(self, _payload: bytes, _max_events: int, _max_depth: int, /) -> NativeBatch | None:
        """Return a batch that `apply` can read, or None: Python decodes it. Here always None."""
        return None

    def ingest(
        self, worker: int, _payload: bytes, _rank: int | None, /
    ) -> int | NativeBatch | tuple[NativeBatch, bytes | list[tuple[int, int]]] | None:
        """Open a batch and apply it, all in one, under the default limits of a batch.

        Args:
            worker: whose batch it is.
            _payload: its bytes.
            _rank: apply it if it is of this data-parallel rank or names none; None: only if it names none; -1: always.

        Returns:
            How many events were applied, when it was all of them; None when `open_batch` gives none; else the batch and
            what `apply` returned, or the batch alone when it is of another rank and nothing was applied. Here None.
        """
        self._column(worker)
        return None

    def ingest_run(
        self, worker: int, _payloads: list[bytes], start: int, _rank: int | None, /
    ) -> tuple[int, int, tuple[NativeBatch, bytes | list[tuple[int, int]]] | None]:
        """Open and apply batches from the one at `start`, as long as `ingest` would apply all events of each.

        Returns:
            The position of the first that is not wholly applied, or the number of payloads; the events of those before
            it; and what `apply` returned for it with its batch, None when nothing of it was applied. Here always
            `start`, none, None.
        """
        self._column(worker)
        return start, 0, None

    def apply(self, worker: int, _batch: NativeBatch, /) -> bytes | list[tuple[int, int]] | None:
        """Apply a batch's events, from where it stands, as far as they are of a learnt profile.

        Returns:
            None when all are applied; the bytes of an event that Python is to decode and apply before going on; or
            (number, block key) of blocks that were waited for and now have keys, to be joined before going on.

        Raises:
            IndexStateError: here always, since here no batch is opened.
        """
        self._column(worker)
        raise foreign_batch()

    def learn(
        self,
        worker: int,
        medium: str | None,
        group: int | None,
        kind: str | None,
        window: int | None,
        block_size: int,
        plane: int,
        /,
    ) -> None:
        """From now on apply events of this profile without asking. Here nothing."""

    def unlearn(self, worker: int, /) -> None:
        """Take every `learn` of a worker back. Here nothing."""


def _chain(words: memoryview, block_size: int, parent: int, seed: int, num_blocks: int) -> Iterable[int]:
    first, step = 0, 8
    while first < num_blocks:
        end = min(first + step, num_blocks)
        keys = _pure.chain_xxh3(words[first * block_size : end * block_size], block_size, parent, seed)
        yield from keys
        parent = keys[-1]
        first, step = end, 64
