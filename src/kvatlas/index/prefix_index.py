"""The index a router asks: for this prompt, how much does each worker already hold?"""

from collections.abc import Iterable, Sequence

from kvatlas._native import new_index_core
from kvatlas.errors import IndexStateError
from kvatlas.events import DEFAULT_LIMITS, DecodeLimits, Event
from kvatlas.hashing import NO_EXTRAS, BlockKeyHasher, RequestExtras
from kvatlas.index.batches import (
    ALL_APPLIED,
    ANY_RANK,
    USUAL_EVENTS,
    Applied,
    IncomingBatch,
    after_ingest,
    apply_batch,
    apply_event,
    ingest_run,
    open_batch,
)
from kvatlas.index.column import WorkerColumn
from kvatlas.index.column_state import ColumnState, ColumnStats, CopyMode
from kvatlas.index.doubts import Healed, Moment
from kvatlas.index.match import WorkerMatch
from kvatlas.index.matching import asked_bits, match_columns, named
from kvatlas.index.memory import MemoryKeeper, MemoryStats
from kvatlas.index.planes import DEVICE_PLANE, Plane, Planes
from kvatlas.index.recency import RecencyBooks
from kvatlas.index.uses import PromptUses

__all__ = ["PrefixIndex"]

DEFAULT_MAX_ORPHAN_BLOCKS = 65_536


class PrefixIndex:
    """Workers' columns over one core.

    Args:
        hasher: gives block keys their seed; None draws one at random, so that nobody can aim collisions at this
            process.
        max_orphan_blocks: per worker, blocks that may wait for a parent that has not been announced.
        max_bytes: most memory the index may take; None for no cap. Close to it the least valuable knowledge is given
            up, see `MemoryKeeper`; what still does not fit is refused. Both are counted, and never lead to a claim
            that is too high.

    Single writer: all calls on one thread. Up to 4,096 workers. `uses` is what requests used when.
    """

    def __init__(
        self,
        hasher: BlockKeyHasher | None = None,
        *,
        max_orphan_blocks: int = DEFAULT_MAX_ORPHAN_BLOCKS,
        max_bytes: int | None = None,
    ) -> None:
        self._hasher = hasher or BlockKeyHasher()
        self._core = new_index_core(self._hasher.seed, max_bytes or 0)
        self._ingest = self._core.ingest
        self._planes = Planes(self._core)
        self._columns: dict[str, WorkerColumn] = {}
        self._max_orphan_blocks = max_orphan_blocks
        self._keeper = MemoryKeeper(self._core, max_bytes)
        self.uses = PromptUses(self._core, self._planes, self._hasher, self._columns)

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Workers with a column, in the order they were added."""
        return tuple(self._columns)

    @property
    def memory(self) -> MemoryStats:
        """What the index holds now. Cost: O(workers)."""
        return self._keeper.stats(self._columns.values())

    def add_worker(
        self,
        worker_id: str,
        *,
        block_size: int | None = None,
        copy_mode: CopyMode = CopyMode.COUNT,
        namespace: str = "",
    ) -> None:
        """Give a worker an empty column.

        Args:
            worker_id: any unique text.
            block_size: tokens per block; None learns it. What the worker's own stores prove counts more.
            copy_mode: what a repeated store means for this engine.
            namespace: the model; blocks of two namespaces never meet.

        Raises:
            IndexStateError: the worker already has a column, the block size is below 1, or the index has 4,096 workers.
        """
        if worker_id in self._columns:
            raise IndexStateError(f"worker {worker_id!r} is already in the index; remove it first if it is a new one")
        if block_size is not None and block_size < 1:
            raise IndexStateError(
                f"block size {block_size} was given for worker {worker_id!r}; expected 1 or more tokens"
            )
        root_key = self._hasher.root_key(namespace)
        number = self._core.add_worker(worker_id, root_key, counting=copy_mode is CopyMode.COUNT)
        self._columns[worker_id] = WorkerColumn(
            self._core,
            number,
            self._planes,
            self._hasher,
            root_key=root_key,
            block_size=block_size,
            max_orphan_blocks=self._max_orphan_blocks,
        )

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker and all it held. Cost: O(blocks of that worker).

        Raises:
            IndexStateError: no such worker.
        """
        column = self._column(worker_id)
        column.orphans.clear()
        self._core.drop_worker(column.number)
        del self._columns[worker_id]

    def purge(self, worker_id: str) -> None:
        """Forget all that one worker's events said, touch nobody else. Cost: O(blocks of that worker)."""
        self._column(worker_id).reset()

    @property
    def seed(self) -> int:
        """The seed of the block keys."""
        return self._hasher.seed

    @property
    def planes(self) -> tuple[Plane, ...]:
        """(medium, group) of every plane, in the order of their numbers in `dump_blocks`."""
        return self._planes.names

    def dump_state(self, worker_id: str) -> ColumnState:
        """What a snapshot keeps of a column beside `dump_blocks`; take both in one turn."""
        return self._column(worker_id).state()

    def dump_blocks(self, worker_id: str) -> bytes:
        """A column's blocks, 18 bytes each and more for copies elsewhere. Natively 60 ns a block."""
        return self._core.dump(self._column(worker_id).number)

    def restore(self, worker_id: str, state: ColumnState, blocks: bytes, planes: Sequence[Plane]) -> None:
        """Fill a worker's empty column from a snapshot: all of it, or nothing.

        Args:
            state, blocks: from `dump_state` and `dump_blocks`.
            planes: from `planes`, of the index they were taken from.

        Raises:
            IndexStateError: the column is not empty, or the dump is damaged, of another seed or another copy mode.
            MemoryError: it does not fit under the cap.

        Cost: natively about 300 ns a block.
        """
        column = self._column(worker_id)
        self._core.load(column.number, blocks, self._planes.numbers(planes))
        column.restore(state)
        self._keeper.relieve(self._columns.values())

    def apply(self, worker_id: str, event: Event) -> None:
        """Apply one event of one worker. Cost: O(blocks of the event), O(blocks of the worker) for a clear.

        Raises:
            IndexStateError: no such worker.
        """
        column = self._column(worker_id)
        apply_event(column, event)
        self._after_events(column)

    def open_batch(self, payload: bytes, limits: DecodeLimits = DEFAULT_LIMITS) -> IncomingBatch:
        """Read a batch as the engine sent it as far as its shape; nothing is applied.

        Raises:
            EventDecodeError: it is no batch, or more than the limits allow.
        """
        return open_batch(self._core, payload, limits)

    def apply_batch(self, worker_id: str, batch: IncomingBatch) -> Applied:
        """Apply an opened batch to one worker, once. Malformed events are left out, each with its reason.

        Raises:
            IndexStateError: no such worker.

        Cost: O(bytes); natively 100-150 ns a block, hashing and both tables included.
        """
        column = self._column(worker_id)
        applied = apply_batch(self._core, column, batch)
        self._after_events(column)
        return applied

    def ingest(self, worker_id: str, payload: bytes, *, rank: int | None = ANY_RANK) -> Applied | IncomingBatch:
        """Open and apply one batch, under the default limits.

        Args:
            worker_id: whose it is.
            payload: as the engine sent it.
            rank: the data-parallel rank whose batches count, besides those that name none; None: only those.

        Returns:
            The batch, if it is of another rank; nothing of it was applied then.

        Raises:
            EventDecodeError: it is no batch, or more than the limits allow; nothing was applied.
            IndexStateError: no such worker.

        Cost: as `apply_batch`, and 1 us.
        """
        # Single-block events come by the hundred thousand: no call here that is not needed.
        try:
            column = self._columns[worker_id]
        except KeyError:
            column = self._column(worker_id)
        done = self._ingest(column.number, payload, rank)
        if done.__class__ is int and done < USUAL_EVENTS:
            applied: Applied | IncomingBatch = ALL_APPLIED[done]
        else:
            applied = after_ingest(self._core, column, payload, rank, done)
        if column.doubts.has_business or self._keeper.is_capped:
            self._after_events(column)
        return applied

    def ingest_run(
        self, worker_id: str, payloads: list[bytes], start: int = 0, *, rank: int | None = ANY_RANK
    ) -> tuple[int, Applied]:
        """`ingest` a run of batches, up to the first that needs a closer look: one of another rank, or no batch at all.

        Nothing is applied while doubts may end: each batch may then have consequences of its own. Keep runs short of
        100 KiB under a cap, which is looked at once a run. Cost: as `apply_batch`.

        Returns:
            The position of the first that was not applied, and what those before it amounted to. Only the last of them
            can have cleared the pool or held events that were malformed or unknown.

        Raises:
            IndexStateError: no such worker.
        """
        column = self._columns.get(worker_id) or self._column(worker_id)
        if column.doubts.has_business:
            return start, ALL_APPLIED[0]
        outcome = ingest_run(self._core, column, payloads, start, rank)
        if column.doubts.has_business or self._keeper.is_capped:
            self._after_events(column)
        return outcome

    def _after_events(self, column: WorkerColumn) -> None:
        """End what a turnover ends, and keep below the cap."""
        column.settle()
        self._keeper.relieve(self._columns.values())

    def block_size(self, worker_id: str) -> int | None:
        """Tokens per block of a worker; None while neither configured nor learnt."""
        return self._column(worker_id).block_size

    def set_block_size(self, worker_id: str, block_size: int) -> None:
        """State a worker's block size as its metrics give it; configuration and its own stores count more."""
        self._column(worker_id).stated_block_size = block_size

    def set_capacity(self, worker_id: str, blocks: int) -> None:
        """State how many blocks a worker's pool holds: so long doubts last after a loss."""
        self._column(worker_id).doubts.capacity_blocks = blocks

    def doubt(self, worker_id: str) -> None:
        """Events of a worker are lost for good: its claims are in doubt until confirmed, refuted, or a turnover old.

        Cost: O(blocks of that worker).
        """
        self._column(worker_id).doubt()

    def is_doubtful(self, worker_id: str) -> bool:
        """Whether a loss of the worker's events is less than one turnover ago."""
        return self._column(worker_id).doubts.is_pending

    def is_complete(self, worker_id: str) -> bool:
        """Whether all the worker holds was told, without a loss, since it was last known to be empty."""
        return self._column(worker_id).is_complete

    def may_ask_for_report(self, worker_id: str) -> bool:
        """Whether a full report would teach something, and the worker's engine is known to give one without harm."""
        return self._column(worker_id).may_report

    def moment(self, worker_id: str) -> Moment:
        """A worker's present, for `heal` of what is sent now."""
        return self._column(worker_id).doubts.moment()

    def heal(
        self,
        worker_id: str,
        token_ids: Sequence[int],
        cached_tokens: int,
        sent: Moment,
        *,
        claimed_tokens: int = 0,
        extras: RequestExtras = NO_EXTRAS,
    ) -> Healed:
        """Learn from an engine's own count of cached tokens.

        The first `cached_tokens` of the prompt are on the worker: doubts about them end, and blocks that no event named
        are claimed from now on. What was claimed beyond, in doubt, is not there. Blocks that wait for a parent no event
        named get their place where the prompt's own digests prove it.

        Args:
            token_ids: the prompt.
            cached_tokens: as the engine reported.
            sent: the worker's `moment` when the request was sent.
            claimed_tokens: what was claimed then, doubted claims included.

        Cost: hashing the blocks concerned. Nothing is learnt about workers with several KV cache groups or media: there
            the count does not say which of them holds a block.
        """
        column = self._column(worker_id)
        matcher = self.uses.matcher(column, token_ids, extras)
        if matcher is None or not column.groups.only_full or column.other_media:
            return Healed()
        keys, size = matcher.all_keys(), matcher.block_size
        placed = column.place_orphans(token_ids, extras, keys)
        concerned = keys[: max(cached_tokens, claimed_tokens) // size]
        return column.doubts.heal(concerned, cached_tokens // size, sent, placed_blocks=placed)

    def claims(self, worker_id: str, token_ids: Sequence[int], *, extras: RequestExtras = NO_EXTRAS) -> bytes:
        """What is claimed of each block of a prompt in the worker's first group on the device.

        One byte for each complete block that an engine may reuse: 2 = held, 1 = in doubt, 0 = not held.
        """
        column = self._column(worker_id)
        matcher = self.uses.matcher(column, token_ids, extras)
        return b"" if matcher is None else self._core.held(DEVICE_PLANE, column.number, matcher.all_keys())

    def claimed(self, worker_id: str, block_keys: Sequence[int]) -> bytes:
        """What is claimed of each block, by its key; see `claims`. Cost: O(blocks), an array is read where it lies."""
        return self._core.held(DEVICE_PLANE, self._column(worker_id).number, block_keys)

    def stats(self, worker_id: str) -> ColumnStats:
        """The worker's counters as they stand."""
        return self._column(worker_id).stats

    def recency(self, worker_id: str) -> RecencyBooks:
        """How old the worker's blocks are, and were when it removed them."""
        return RecencyBooks(self._core, self._column(worker_id).number)

    def find(self, block_keys: Sequence[int], *, worker_ids: Iterable[str] | None = None) -> dict[str, int]:
        """How many leading blocks of a chain each worker holds on its device, in its first KV cache group.

        Args:
            block_keys: from `BlockKeyHasher.chain` under this index's hasher; an array of 64-bit words is not copied.
            worker_ids: ask only about these; None asks about all.

        Returns:
            worker id -> blocks, for every worker that holds at least the first.

        Cost: 5-20 ns for each block somebody holds, 30 ns for each worker found.
        """
        return self._core.find(DEVICE_PLANE, block_keys, asked_bits(self._columns, worker_ids))

    def find_tokens(
        self,
        token_ids: Sequence[int],
        block_size: int,
        *,
        namespace: str = "",
        worker_ids: Iterable[str] | None = None,
    ) -> dict[str, int]:
        """The same from token ids, hashed and looked up in one pass that ends at the first block nobody holds.

        Raises:
            HashingError: bad token ids or block size.
        """
        root_key, asked = self._hasher.root_key(namespace), asked_bits(self._columns, worker_ids)
        return self._core.find_tokens(DEVICE_PLANE, token_ids, block_size, root_key, len(token_ids), asked)

    def match(
        self, token_ids: Sequence[int], *, extras: RequestExtras = NO_EXTRAS, worker_ids: Iterable[str] | None = None
    ) -> dict[str, WorkerMatch]:
        """How much of a prompt each worker holds now, as the engine will count it.

        Args:
            token_ids: the prompt as the engine will see it, int[num_tokens].
            extras: LoRA, images, salt: part of what a block's content is.
            worker_ids: ask only about these; None asks about all. Unknown ids are left out of the answer.

        Returns:
            worker id -> match, for every worker asked about whose block size is known (0 tokens is an answer too).

        Cost: hashing each block once per distinct block size and namespace, up to the first block nobody holds.
        """
        asked = named(self._columns, worker_ids)
        return match_columns(self._core, self._planes, self._hasher, token_ids, extras, asked)

    def _column(self, worker_id: str) -> WorkerColumn:
        try:
            return self._columns[worker_id]
        except KeyError:
            known = ", ".join(self._columns) or "none"
            raise IndexStateError(f"no worker {worker_id!r} in the index; known workers: {known}") from None
