"""One engine's event stream, kept: journaled, published on under numbers of the keeper's own, replayed from 0.

The keeper's numbers are the engine's plus an offset. It is 0 in a life the keeper saw from its beginning; what the
engine's replay could not return stays a hole in the numbers, so that every reader sees the loss. A compaction begins a
new life: the resident blocks as numbers from 0, then the stream goes on. A new life of the engine is a new life here.

Readers are let in only while the keeper knows the engine's present state: when the engine is gone, so is the keeper's
stream.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import msgspec

from kvatlas.clock import Clock
from kvatlas.errors import ConfigError
from kvatlas.events import SequenceTracker, decode_batch
from kvatlas.keeper.compaction import Compaction, compact, empty_batch
from kvatlas.keeper.residency import CopyCounting
from kvatlas.stream import (
    NO_ENGINE_SEQ,
    Journal,
    ReplayServer,
    ReplayServerConfig,
    Segment,
    Sent,
    StreamStatus,
    SubscriberConfig,
    ZmqEventSubscriber,
)

__all__ = ["Keeper", "KeeperConfig", "KeeperCounters"]

_log = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 1024**3
_TICK_S = 1.0
# A compaction must free something: the journal may grow to this many times the resident blocks.
_MIN_GROWTH = 2


@dataclass(frozen=True, slots=True)
class KeeperConfig:
    """Whom to follow, where to serve, how much to keep.

    Attributes:
        max_bytes: journal size at which it is compacted; above it when the resident blocks alone take half of it.
        sync_s: at most so many seconds of batches are lost at a power failure.
    """

    engine: SubscriberConfig
    serve: ReplayServerConfig
    max_bytes: int = DEFAULT_MAX_BYTES
    counting: CopyCounting = CopyCounting.COUNT
    sync_s: float = _TICK_S


class KeeperCounters(msgspec.Struct):
    """What happened since the start. Counters only grow."""

    batches: int = 0
    lost_batches: int = 0
    losses: int = 0
    engine_lives: int = 0
    compactions: int = 0
    failed_compactions: int = 0
    resumed: bool = False


@dataclass(slots=True)
class _Compacting:
    """A compaction under way: its file, and the first number that is copied behind it."""

    target: Segment
    life: int
    first_copied: int
    called_off: threading.Event
    task: "asyncio.Task[Compaction]"


class Keeper:
    """Follows, journals and serves, until `close`. An `EventSink` and a `ReplaySource`.

    Args:
        config: whom and where.
        journal: open, of this engine's stream; the caller closes it.
        clock: for the subscriber.
    """

    def __init__(self, config: KeeperConfig, journal: Journal, clock: Clock) -> None:
        self._config = config
        self._journal = journal
        self.counters = KeeperCounters()
        """What happened so far."""
        self.status: tuple[StreamStatus, str] = ("connecting", "not started")
        """How the engine's stream is followed, and why."""
        self.server = ReplayServer(config.serve, self)
        """Where it is served."""
        self.subscriber = ZmqEventSubscriber(config.engine, self, clock)
        self._last_engine_seq = -1
        self._ts = 0.0
        self._rank: int | None = None
        self._dirty = False
        self._failure: OSError | None = None
        self._threshold_bytes = config.max_bytes
        self._compacting: _Compacting | None = None
        self._resume()

    @property
    def journal(self) -> Journal:
        """What is kept, to read."""
        return self._journal

    @property
    def last_engine_seq(self) -> int:
        """The engine's number of the newest batch; -1 before the first of a life."""
        return self._last_engine_seq

    # -- running --

    def check_ports(self) -> None:
        """Learn the real ports and see that they are free; readers come when the engine's state is known.

        Raises:
            ConfigError: an endpoint is malformed or taken.
        """
        self.server.open()
        self.server.close()

    async def run(self) -> None:
        """Follow and serve until `close`, or until the journal cannot be written.

        Raises:
            ConfigError: the engine's endpoint is malformed, or the journal's disk failed.
        """
        ticking = asyncio.create_task(self._tick())
        try:
            await self.subscriber.run()
        finally:
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
            await self._abandon_compaction()
            self.server.close()
            with contextlib.suppress(OSError):
                self._journal.sync()
        if self._failure is not None:
            raise ConfigError(f"the journal cannot be written: {self._failure}; make room, then start the keeper again")

    def close(self) -> None:
        """End `run`. Idempotent."""
        self.subscriber.close()

    # -- what the subscriber tells --

    def on_life(self, reason: str) -> None:
        """The engine started anew: so does the keeper."""
        _log.warning("new life: %s", reason)
        self.counters.engine_lives += 1
        if self._compacting is not None:
            self._compacting.called_off.set()
        self._write(self._journal.begin_life)
        self._last_engine_seq = -1
        self._threshold_bytes = self._config.max_bytes
        self._break_connections()

    def on_batch(self, seq: int, payload: bytes) -> None:
        """Journal, then publish: a reader never has what a crash could take from the keeper."""
        number = self._number_of(seq)
        if not self._write(lambda: self._journal.append(number, seq, payload)):
            return
        self.counters.batches += 1
        self._last_engine_seq = seq
        self.server.send(number, payload)

    def on_gap(self, first_seq: int, last_seq: int | None) -> None:
        """Missing numbers speak for themselves; an unknown number of batches is one missing number."""
        self.counters.losses += 1
        if last_seq is not None:
            self.counters.lost_batches += last_seq - first_seq + 1
            _log.warning("batches %d..%d are lost: the engine's replay does not have them", first_seq, last_seq)
            return
        _log.warning("batches from %d on may be lost: nobody can tell", first_seq)
        self._mark_loss()

    def on_status(self, status: StreamStatus, reason: str) -> None:
        """Let readers in, or send them away."""
        if status != self.status[0]:
            _log.info("engine's stream: %s: %s", status, reason)
        self.status = (status, reason)
        if status == "live" or (status == "syncing" and self._config.engine.replay_endpoint is None):
            if not self.server.is_open:
                self.server.reopen()
        elif status in ("lost", "connecting"):
            self.server.close()

    # -- what the server asks --

    def batches_from(self, seq: int) -> Iterator[Sent]:
        """The journal from a number on."""
        return (Sent(record.seq, record.payload) for record in self._journal.read_from(seq))

    # -- numbers --

    def _number_of(self, engine_seq: int) -> int:
        """The keeper's number of an engine's batch: as far above the newest as at the engine."""
        return self._journal.next_seq - 1 + engine_seq - self._last_engine_seq

    def _mark_loss(self) -> None:
        """A missing number, and behind it a batch that says nothing, so that readers see it at once."""
        last = self._journal.last_of_engine
        if last is not None:
            with contextlib.suppress(Exception):
                batch = decode_batch(last.payload).batch
                self._ts, self._rank = batch.ts, batch.data_parallel_rank
        number, payload = self._journal.next_seq + 1, empty_batch(self._ts, self._rank)
        if self._write(lambda: self._journal.append(number, NO_ENGINE_SEQ, payload)):
            self.server.send(number, payload)

    def _resume(self) -> None:
        """Go on where the journal ends, if the engine proves to be the one that is in it."""
        last = self._journal.last_of_engine
        if last is None:
            return
        self.counters.resumed = True
        self._last_engine_seq = last.engine_seq
        _remember(self.subscriber.tracker, last.engine_seq, last.payload)

    # -- disk --

    def _write(self, write: Callable[[], None]) -> bool:
        """Do it, or end: readers may have nothing that is not journaled."""
        if self._failure is not None:
            return False
        try:
            write()
        except OSError as error:
            _log.error("the journal cannot be written: %s", error)
            self._failure = error
            self.server.close()
            self.close()
            return False
        self._dirty = True
        return True

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._config.sync_s)
            if self._dirty:
                self._dirty = False
                try:
                    await asyncio.to_thread(self._journal.syncing())
                except OSError as error:
                    self._failure = error
                    self.close()
                    return
            self._look_after_size()

    # -- compaction --

    def _look_after_size(self) -> None:
        if self._compacting is None:
            if self._journal.size_bytes > self._threshold_bytes:
                self.start_compaction()
        elif self._compacting.task.done():
            self._finish_compaction(self._compacting)

    def start_compaction(self) -> bool:
        """Begin to replace the journal by its resident blocks, on a thread. False when nothing can be compacted."""
        last = self._journal.last_of_engine
        if self._compacting is not None or last is None:
            return False
        try:
            target = self._journal.successor()
        except OSError as error:
            self._compaction_failed(error)
            return False
        extents = self._journal.extents_before_last()
        called_off = threading.Event()
        work = partial(compact, extents, last.seq, target, self._config.counting, is_called_off=called_off.is_set)
        task = asyncio.create_task(asyncio.to_thread(work))
        task.add_done_callback(lambda _: self._look_after_size())
        self._compacting = _Compacting(target, self._journal.life, last.seq, called_off, task)
        return True

    def _finish_compaction(self, compacting: _Compacting) -> None:
        self._compacting = None
        target = compacting.target
        if self._journal.life != compacting.life or self._failure is not None:
            compacting.task.exception()
            target.remove()
            return
        before = self._journal.size_bytes
        try:
            done = compacting.task.result()
            self._copy_newer(compacting.first_copied, target)
            self._journal.adopt(target)
        except Exception as error:  # noqa: BLE001 - whatever went wrong in it, the stream goes on
            target.remove()
            self._compaction_failed(error)
            return
        self.counters.compactions += 1
        after = self._journal.size_bytes
        self._threshold_bytes = max(self._config.max_bytes, _MIN_GROWTH * after)
        _log.info(
            "compacted: %d blocks in %d batches, %d bytes before, %d after", done.blocks, done.batches, before, after
        )
        self._break_connections()

    def _copy_newer(self, first_seq: int, target: Segment) -> None:
        """What was journaled since, under numbers that go on; a hole stays one."""
        shift = target.next_seq - first_seq
        for record in self._journal.read_from(first_seq):
            target.append(record.seq + shift, record.engine_seq, record.payload)

    def _compaction_failed(self, error: Exception) -> None:
        self.counters.failed_compactions += 1
        self._threshold_bytes = _MIN_GROWTH * self._journal.size_bytes
        _log.error("compaction failed, the journal grows on: %r", error)

    async def _abandon_compaction(self) -> None:
        compacting, self._compacting = self._compacting, None
        if compacting is not None:
            compacting.called_off.set()
            with contextlib.suppress(Exception):
                await compacting.task
            compacting.target.remove()

    def _break_connections(self) -> None:
        """Readers connect anew and find another life, as they would after an engine's restart."""
        if self.server.is_open:
            self.server.close()
            self.server.reopen()


def _remember(tracker: SequenceTracker, seq: int, payload: bytes) -> None:
    """Have a new tracker believe that it applied a batch, so that it demands the same bytes of the engine first."""
    tracker.connected()
    token = tracker.replay_token
    if token is None:
        tracker.live(seq, payload)
    else:
        tracker.replayed(token, seq, payload)
        tracker.replay_ended(token, complete=True)
