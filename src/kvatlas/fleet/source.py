"""From one event stream into one column of the index, and the trust that this earns.

The subscriber calls this in order, each batch once per life. A malformed batch is lost and therefore a gap; a malformed
event may have been a removal, so it counts as a loss too.
"""

import logging
from dataclasses import dataclass

from kvatlas.clock import Clock
from kvatlas.errors import EventDecodeError
from kvatlas.events import StreamPosition
from kvatlas.fleet.trust import Trust, TrustState
from kvatlas.index import Applied, PrefixIndex
from kvatlas.stream import StreamStatus

__all__ = ["EventSource", "SourceStats"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SourceStats:
    """What arrived from one worker's stream. Counters only grow."""

    batches: int = 0
    events: int = 0
    malformed_batches: int = 0
    malformed_events: int = 0
    unknown_events: int = 0
    foreign_batches: int = 0
    """Batches of another data-parallel rank: not applied."""
    gaps: int = 0
    lives: int = 0
    last_seq: int = -1
    last_batch_s: float = 0.0
    """Monotonic time of the newest batch."""


class EventSource:
    """An `EventSink` that feeds one worker's column.

    Args:
        worker_id: a worker that the index knows.
        rank: the data-parallel rank whose batches count; None takes the rank of the first batch that names one.
        trust: the state to keep; shared with whoever shows it.
    """

    __slots__ = ("_clock", "_index", "_lossy", "_newest", "_rank", "_worker_id", "stats", "trust")

    def __init__(
        self, worker_id: str, index: PrefixIndex, trust: TrustState, clock: Clock, *, rank: int | None = None
    ) -> None:
        self._worker_id = worker_id
        self._index = index
        self._clock = clock
        self._lossy: str | None = None
        self._newest: tuple[int, bytes] | StreamPosition | None = None
        self._rank = rank
        self.trust = trust
        self.stats = SourceStats()

    @property
    def has_past(self) -> bool:
        """Whether the column holds what some life said."""
        return self.stats.batches > 0 or self._newest is not None or self._lossy is not None

    @property
    def position(self) -> StreamPosition | None:
        """The batch after which the column stands; None before the first, and after a loss until the next one."""
        return StreamPosition.at(*self._newest) if isinstance(self._newest, tuple) else self._newest

    @property
    def loss(self) -> str | None:
        """Why the worker is `partial` while its stream is live; None when nothing is doubted."""
        return self._lossy

    def restore(self, position: StreamPosition | None, loss: str | None, reason: str) -> None:
        """Go on where a snapshot left the stream; the index has the column already."""
        self.stats.lives = 1
        self.stats.last_seq = -1 if position is None else position.seq
        self._newest = position
        self._lossy = loss
        self._become(Trust.SYNCING, reason)

    def on_life(self, reason: str) -> None:
        """A new publisher life, not the first: what the old one said is void."""
        self.stats.lives = max(1, self.stats.lives) + 1
        self.stats.last_seq = -1
        self._newest = None
        self._index.purge(self._worker_id)
        self._lossy = None
        self._become(Trust.SYNCING, f"new life: {reason}")

    def on_batch(self, seq: int, payload: bytes) -> None:
        """Apply one batch."""
        self._count(seq, payload, 1)
        try:
            applied = self._index.ingest(self._worker_id, payload, rank=self._rank)
            if not isinstance(applied, Applied):
                if self._is_foreign(seq, applied.rank):
                    return
                applied = self._index.apply_batch(self._worker_id, applied)
        except EventDecodeError as error:
            self.stats.malformed_batches += 1
            self._lose(f"batch {seq} could not be read: {error.message}")
            return
        except Exception as error:
            self._lose_unless_gone(f"batch {seq} failed: {error!r}")
            raise
        self._learn(seq, applied)

    def on_batches(self, first_seq: int, payloads: list[bytes]) -> None:
        """Apply batches in turn, as `on_batch`; those that need no closer look in one call of the index."""
        at = 0
        while at < len(payloads):
            before = at
            try:
                at, applied = self._index.ingest_run(self._worker_id, payloads, at, rank=self._rank)
            except Exception as error:
                last_seq = first_seq + len(payloads) - 1
                self._lose_unless_gone(f"batches {first_seq + at} to {last_seq} failed: {error!r}")
                raise
            if at > before:
                seq = first_seq + at - 1
                self._count(seq, payloads[at - 1], at - before)
                self._learn(seq, applied)
            if at < len(payloads):
                self.on_batch(first_seq + at, payloads[at])
                at += 1

    def _count(self, seq: int, payload: bytes, batches: int) -> None:
        """Batches came, up to this one."""
        self.stats.batches += batches
        self.stats.last_seq = seq
        self._newest = (seq, payload)
        self.stats.last_batch_s = self._clock.monotonic_s()

    def _learn(self, seq: int, applied: Applied) -> None:
        """What was applied, the last of it in this batch, changes what is known of the worker."""
        self.stats.events += applied.events
        self.stats.unknown_events += applied.unknown_events
        if applied.cleared:
            self._known_empty(seq)
        elif self._lossy is not None and not self._index.is_doubtful(self._worker_id):
            self._overcome(seq)
        if applied.malformed:
            self.stats.malformed_events += len(applied.malformed)
            self._lose(
                f"batch {seq} held {len(applied.malformed)} malformed events, first: {applied.malformed[0].message}"
            )

    def _is_foreign(self, seq: int, rank: int | None) -> bool:
        if rank is None:
            return False
        if self._rank is None:
            self._rank = rank
        if rank == self._rank:
            return False
        self.stats.foreign_batches += 1
        if self._lossy is None:  # nothing of ours is missing for it: no reason to doubt again and again
            self._lose(f"batch {seq} is of data-parallel rank {rank}, this worker is rank {self._rank}: check events=")
        return True

    def on_gap(self, first_seq: int, last_seq: int | None) -> None:
        """Batches that nobody can return."""
        self.stats.gaps += 1
        if last_seq is not None:
            self._newest = None
        span = f"{first_seq}..{'?' if last_seq is None else last_seq}"
        self._lose(f"batches {span} are lost and replay does not have them")

    def on_status(self, status: StreamStatus, reason: str) -> None:
        """The stream's connection changed."""
        if status in ("syncing", "live") and not self.stats.lives:
            self.stats.lives = 1
        match status:
            case "connecting":
                self._become(Trust.STALE if self.stats.lives else Trust.NONE, reason)
            case "syncing":
                self._become(Trust.SYNCING, reason)
            case "live":
                if self._lossy is None:
                    self._become(Trust.SYNCED, reason)
                else:
                    self._become(Trust.PARTIAL, self._lossy)
            case "lost":
                self._become(Trust.STALE, reason)

    def note_reset(self, reason: str) -> None:
        """The engine's cache was emptied by a call somebody made; its own word for it comes with its next step."""
        self._index.purge(self._worker_id)
        self._lossy = None
        if self.trust.level is Trust.PARTIAL:
            self._become(Trust.SYNCED, reason)

    def _known_empty(self, seq: int) -> None:
        """A clear makes the whole state known again, whatever was lost before it."""
        self._lossy = None
        if self.trust.level is Trust.PARTIAL:
            self._become(Trust.SYNCED, f"the engine cleared its cache in batch {seq}: nothing older matters")

    def _overcome(self, seq: int) -> None:
        """One turnover after a loss nothing is claimed that stood before it, unless the engine confirmed it."""
        self._lossy = None
        if self.trust.level is Trust.PARTIAL:
            self._become(Trust.SYNCED, f"one turnover of the cache since the loss, at batch {seq}: no doubts are left")

    def note_overclaim(self, reason: str) -> None:
        """The engine keeps reporting less than was promised: events must be missing that nobody noticed."""
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        self._index.doubt(self._worker_id)
        self._lossy = reason
        if self.trust.level in (Trust.SYNCED, Trust.PARTIAL):
            self._become(Trust.PARTIAL, reason)

    def _lose_unless_gone(self, reason: str) -> None:
        """Nobody knows what of a batch was applied. The caller tells of the failure itself."""
        if self._worker_id in self._index.worker_ids:
            self._lose(reason)

    def _become(self, level: Trust, reason: str) -> None:
        if level is not self.trust.level:
            severity = logging.INFO if level in (Trust.SYNCED, Trust.SYNCING) else logging.WARNING
            _log.log(severity, "worker %s: trust %s -> %s: %s", self._worker_id, self.trust.level, level, reason)
        self.trust.become(level, reason, self._clock.monotonic_s())
