"""A worker's batches: natively straight from their bytes, and event by event where the core asks for it."""

from dataclasses import dataclass

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

__all__ = ["Applied", "IncomingBatch", "apply_event", "open_batch"]


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


class IncomingBatch:
    """One batch, read as far as its shape. Apply it once, to one worker.

    Attributes:
        rank: its data-parallel rank; None when it names none.
        event_count: events in it that can be read.
    """

    __slots__ = ("_decoded", "_limits", "_native", "event_count", "rank")

    def __init__(self, native: NativeBatch | None, decoded: DecodedBatch | None, limits: DecodeLimits) -> None:
        self._native = native
        self._decoded = decoded
        self._limits = limits
        if native is not None:
            self.rank = native.rank
            self.event_count = native.event_count
        elif decoded is not None:
            self.rank = decoded.batch.data_parallel_rank
            self.event_count = len(decoded.batch.events)

    def apply(self, core: IndexCore, column: WorkerColumn) -> Applied:
        """Apply its events in order; one that cannot be applied loses only itself. Cost: O(bytes)."""
        outcome = _Outcome()
        if self._native is not None:
            self._apply_native(core, column, self._native, outcome)
        elif self._decoded is not None:
            events = self._decoded.batch.events
            for number, event in enumerate(events):
                outcome.apply(column, event, number, len(events))
            outcome.malformed.extend(self._decoded.malformed)
            outcome.unknown += self._decoded.unknown_events
        failed = len(outcome.malformed) + outcome.unknown if self._native is not None else outcome.not_applied
        return Applied(self.event_count - failed, outcome.cleared, tuple(outcome.malformed), outcome.unknown)

    def _apply_native(self, core: IndexCore, column: WorkerColumn, batch: NativeBatch, outcome: "_Outcome") -> None:
        count = batch.event_count
        while True:
            try:
                stopped = core.apply(column.number, batch)
            except MemoryError as error:
                outcome.fail(error, batch.position - 1, count)
                continue
            if stopped is None:
                return
            if isinstance(stopped, list):
                column.wake(stopped)
                continue
            try:
                event = decode_event(stopped, batch.position - 1, count, self._limits)
            except EventDecodeError as error:
                outcome.malformed.append(error)
                continue
            if event is None:
                outcome.unknown += 1
            else:
                outcome.apply(column, event, batch.position - 1, count)


class _Outcome:
    """What became of a batch's events so far."""

    __slots__ = ("cleared", "malformed", "not_applied", "unknown")

    def __init__(self) -> None:
        self.cleared = False
        self.malformed: list[EventDecodeError] = []
        self.unknown = 0
        self.not_applied = 0

    def apply(self, column: WorkerColumn, event: Event, number: int, count: int) -> None:
        try:
            self.cleared |= apply_event(column, event)
        except Exception as error:  # noqa: BLE001 - one event that cannot be applied must not lose its batch
            self.fail(error, number, count)

    def fail(self, error: Exception, number: int, count: int) -> None:
        self.not_applied += 1
        self.malformed.append(EventDecodeError(f"event {number} of {count} (from 0) could not be applied: {error!r}"))


def open_batch(core: IndexCore, payload: bytes, limits: DecodeLimits = DEFAULT_LIMITS) -> IncomingBatch:
    """Read a batch as far as its shape.

    Raises:
        EventDecodeError: it is no batch, or more than the limits allow.
    """
    if len(payload) <= limits.max_payload_bytes:
        native = core.open_batch(payload, limits.max_events, limits.max_depth)
        if native is not None:
            return IncomingBatch(native, None, limits)
    return IncomingBatch(None, decode_batch(payload, limits), limits)


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
