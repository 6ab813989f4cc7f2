"""A worker's batches: natively straight from their bytes, and event by event where the core asks for it."""

from dataclasses import dataclass
from typing import Final, TypeAlias, cast

from kvatlas._native import IndexCore, NativeBatch
from kvatlas.errors import EventDecodeError
from kvatlas.events import (
    DEFAULT_LIMITS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    DecodedBatch,
    DecodeLimits,
    Event,
    decode_batch,
    decode_event,
)
from kvatlas.index.column import WorkerColumn

__all__ = [
    "ALL_APPLIED",
    "ANY_RANK",
    "USUAL_EVENTS",
    "Applied",
    "IncomingBatch",
    "after_ingest",
    "apply_batch",
    "apply_event",
    "ingest_run",
    "open_batch",
]

ANY_RANK: Final = -1


@dataclass(frozen=True, slots=True)
class Applied:
    """What one batch amounted to.

    Attributes:
        events: how many were applied.
        cleared: whether one of them emptied the worker's device pool.
        malformed: those that could not be read, each with its reason; nothing of them was applied.
        unknown_events: those of a kind that is not known here.
    """

    events: int
    cleared: bool = False
    malformed: tuple[EventDecodeError, ...] = ()
    unknown_events: int = 0


USUAL_EVENTS: Final = 64
ALL_APPLIED: Final = tuple(Applied(events) for events in range(USUAL_EVENTS))
"""The usual outcomes, made once."""


class DecodedIncoming:
    """A batch that Python decoded: no core reads it from its bytes.

    Attributes:
        rank: its data-parallel rank; None when it names none.
        event_count: events in it that can be read.
    """

    __slots__ = ("_decoded", "event_count", "rank")

    def __init__(self, decoded: DecodedBatch) -> None:
        self._decoded = decoded
        self.rank = decoded.batch.data_parallel_rank
        self.event_count = len(decoded.batch.events)

    def apply(self, column: WorkerColumn) -> Applied:
        """Apply its events in order."""
        outcome = _Outcome()
        for number, event in enumerate(self._decoded.batch.events):
            outcome.apply(column, event, number, self.event_count)
        events = self.event_count - len(outcome.malformed)
        malformed = (*outcome.malformed, *self._decoded.malformed)
        return Applied(events, outcome.cleared, malformed, self._decoded.unknown_events)


IncomingBatch: TypeAlias = NativeBatch | DecodedIncoming
"""A batch as far as its shape: `rank` and `event_count`. Apply it once, to one worker."""


def open_batch(core: IndexCore, payload: bytes, limits: DecodeLimits = DEFAULT_LIMITS) -> IncomingBatch:
    """Read a batch as far as its shape.

    Raises:
        EventDecodeError: it is no batch, or more than the limits allow.
    """
    if len(payload) <= limits.max_payload_bytes and _has_usual_limits(limits, len(payload)):
        native = core.open_batch(payload, limits.max_events, limits.max_depth)
        if native is not None:
            return native
    return DecodedIncoming(decode_batch(payload, limits))


def _has_usual_limits(limits: DecodeLimits, payload_bytes: int) -> bool:
    """Whether the limits of an event are those the core knows, or no event of the payload can reach them."""
    hashes, tokens = limits.max_hashes_per_event, limits.max_tokens_per_event
    usual = (DEFAULT_LIMITS.max_hashes_per_event, DEFAULT_LIMITS.max_tokens_per_event)
    return (hashes, tokens) == usual or payload_bytes <= min(hashes, tokens, *usual)


def apply_batch(core: IndexCore, column: WorkerColumn, batch: IncomingBatch) -> Applied:
    """Apply a batch's events in order; one that cannot be applied loses only itself. Cost: O(bytes)."""
    if isinstance(batch, DecodedIncoming):
        return batch.apply(column)
    return _go_on(core, column, batch, core.apply(column.number, batch))


def after_ingest(
    core: IndexCore, column: WorkerColumn, payload: bytes, rank: int | None, done: object
) -> Applied | IncomingBatch:
    """Finish what `IndexCore.ingest` began.

    Args:
        core: the index's.
        column: the worker's.
        payload: the batch as the engine sent it.
        rank: the data-parallel rank whose batches count, besides those that name none; None: only those; ANY_RANK: all.
        done: what the core returned.

    Returns:
        The batch, if it is of another rank; nothing of it was applied then.

    Raises:
        EventDecodeError: it is no batch, or more than the limits allow.
    """
    if type(done) is int:
        return Applied(done)
    if type(done) is tuple:
        return _go_on(core, column, *done)
    if done is not None:
        return cast("NativeBatch", done)
    batch = DecodedIncoming(decode_batch(payload))
    is_foreign = batch.rank is not None and rank not in {ANY_RANK, batch.rank}
    return batch if is_foreign else batch.apply(column)


def ingest_run(
    core: IndexCore, column: WorkerColumn, payloads: list[bytes], start: int, rank: int | None
) -> tuple[int, Applied]:
    """Apply batches from the one at `start` on, up to the first that needs a closer look.

    Returns:
        The position of the first that was not applied, and what those before it amounted to. Only the last of them can
        have cleared the pool or held events that were malformed or unknown.
    """
    at, events, odd = core.ingest_run(column.number, payloads, start, rank)
    if odd is None:
        return at, Applied(events)
    last = _go_on(core, column, *odd)
    return at + 1, Applied(events + last.events, last.cleared, last.malformed, last.unknown_events)


def _go_on(
    core: IndexCore, column: WorkerColumn, batch: NativeBatch, stopped: bytes | list[tuple[int, int]] | None
) -> Applied:
    """Do what the core asks for, and have it go on, until the batch is through."""
    if stopped is None:
        return Applied(batch.event_count)
    outcome = _Outcome()
    while stopped is not None:
        if isinstance(stopped, bytes):
            _decode_and_apply(column, stopped, batch, outcome)
        else:
            column.wake(stopped)
        stopped = core.apply(column.number, batch)
    events = batch.event_count - len(outcome.malformed) - outcome.unknown
    return Applied(events, outcome.cleared, tuple(outcome.malformed), outcome.unknown)


def _decode_and_apply(column: WorkerColumn, raw: bytes, batch: NativeBatch, outcome: "_Outcome") -> None:
    number = batch.position - 1
    try:
        event = decode_event(raw, number, batch.event_count)
    except EventDecodeError as error:
        outcome.malformed.append(error)
        return
    if event is None:
        outcome.unknown += 1
    else:
        outcome.apply(column, event, number, batch.event_count)


class _Outcome:
    """What became of a batch's events so far."""

    __slots__ = ("cleared", "malformed", "unknown")

    def __init__(self) -> None:
        self.cleared = False
        self.malformed: list[EventDecodeError] = []
        self.unknown = 0

    def apply(self, column: WorkerColumn, event: Event, number: int, count: int) -> None:
        try:
            self.cleared |= apply_event(column, event)
        except Exception as error:  # noqa: BLE001 - one event that cannot be applied must not lose its batch
            self.fail(error, number, count)

    def fail(self, error: Exception, number: int, count: int) -> None:
        self.malformed.append(EventDecodeError(f"event {number} of {count} (from 0) could not be applied: {error!r}"))


def apply_event(column: WorkerColumn, event: Event) -> bool:
    """Apply one event. Returns whether it emptied the worker's device pool."""
    match event:
        case BlockStored():
            column.store(event)
        case BlockRemoved():
            column.remove(event)
        case AllBlocksCleared():
            column.clear()
            return True
    return False
