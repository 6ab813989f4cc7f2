"""Writing snapshots of a running fleet: one worker at a time, to whoever reads, and to a file now and then."""

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvatlas import __version__
from kvatlas.clock import Clock
from kvatlas.errors import ConfigError
from kvatlas.fleet.fleet import Fleet
from kvatlas.fleet.worker import Worker
from kvatlas.index import PrefixIndex, SnapshotHead, WorkerSnapshot, WorkerState, write_snapshot

__all__ = ["SnapshotKeeper", "SnapshotStats", "fleet_snapshot", "new_file"]

_log = logging.getLogger(__name__)


def fleet_snapshot(fleet: Fleet, index: PrefixIndex, clock: Clock) -> Iterator[bytes]:
    """Yield the bytes of a snapshot of all that is known of the fleet's workers.

    Each worker is taken whole between two events, at the time its part is asked for; a worker that leaves meanwhile is
    left out. What an earlier snapshot says of workers that have not come yet is handed on.

    Cost: natively 6-9 ms for 100,000 blocks, the checksum included.
    """
    head = SnapshotHead(index.seed, clock.wall_s(), __version__)
    return write_snapshot(head, _known_workers(fleet, index))


def _known_workers(fleet: Fleet, index: PrefixIndex) -> Iterator[WorkerSnapshot]:
    told = set()
    for worker in fleet.workers:
        if fleet.get(worker.worker_id) is worker and worker.source is not None and worker.source.has_past:
            told.add(worker.worker_id)
            yield _snapshot_of(worker, index)
    yield from (past.snapshot for past in fleet.untold_pasts if past.snapshot.state.worker_id not in told)


def _snapshot_of(worker: Worker, index: PrefixIndex) -> WorkerSnapshot:
    source = worker.source
    state = WorkerState(
        worker_id=worker.worker_id,
        url=worker.config.url,
        rank=worker.config.rank,
        copy_mode=worker.config.copy_mode,
        column=index.dump_state(worker.worker_id),
        planes=index.planes,
        position=None if source is None else source.position,
        engine_started_s=worker.gauges.started_s,
        loss=None if source is None else source.loss,
        trust=worker.trust.level.value,
        trust_reason=worker.trust.reason,
    )
    return WorkerSnapshot(state, index.dump_blocks(worker.worker_id))


@dataclass(slots=True)
class SnapshotStats:
    """What the file's snapshots amounted to. Counters only grow.

    Attributes:
        saved, failed: how many.
        last_bytes, last_s, last_wall_s: of the newest one that was saved: its size, how long it took, when it was done.
        longest_turn_s: the longest time the event loop was held for one worker, ever.
    """

    saved: int = 0
    failed: int = 0
    last_bytes: int = 0
    last_s: float = 0.0
    last_wall_s: float = 0.0
    longest_turn_s: float = 0.0


class SnapshotKeeper:
    """Keeps a file's snapshot fresh.

    Args:
        path: of the file. It is replaced whole: a reader finds the old snapshot or the new one.
        interval_s: between two snapshots.
        take: begins a snapshot; each step of it is one turn on the event loop. Files are written off the loop.

    Raises:
        ConfigError: the folder does not exist.
    """

    def __init__(self, path: Path, interval_s: float, take: Callable[[], Iterator[bytes]], clock: Clock) -> None:
        if not path.parent.is_dir():
            raise ConfigError(f"snapshot_path {path} cannot be written: its folder {path.parent} does not exist")
        self._path = path
        self._interval_s = interval_s
        self._take = take
        self._clock = clock
        self._one_at_a_time = asyncio.Lock()
        self.stats = SnapshotStats()

    async def run(self) -> None:
        """Save for ever, every interval. Cancel to stop."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.save()

    async def save(self) -> bool:
        """Save now. Returns whether that worked; if not, the old file is left and the reason logged."""
        async with self._one_at_a_time:
            try:
                await self._save()
            except OSError as error:
                self.stats.failed += 1
                _log.warning("no snapshot written to %s: %s", self._path, error.strerror or error)
                return False
        return True

    async def _save(self) -> None:
        began_s, total = self._clock.monotonic_s(), 0
        async with new_file(self._path) as file:
            parts = self._take()
            while (part := self._next(parts)) is not None:
                total += len(part)
                await asyncio.to_thread(file.write, part)
        stats = self.stats
        stats.saved += 1
        stats.last_bytes, stats.last_wall_s = total, self._clock.wall_s()
        stats.last_s = self._clock.monotonic_s() - began_s
        _log.debug("snapshot of %d bytes in %.3f s", total, stats.last_s)

    def _next(self, parts: Iterator[bytes]) -> bytes | None:
        began_s = self._clock.monotonic_s()
        part = next(parts, None)
        self.stats.longest_turn_s = max(self.stats.longest_turn_s, self._clock.monotonic_s() - began_s)
        return part


@contextlib.asynccontextmanager
async def new_file(path: Path) -> AsyncIterator[BinaryIO]:
    """A file to write that takes `path`'s place when the block ends well, and vanishes when it does not.

    Only its owner may read it: it tells the seed of the block keys.

    Raises:
        OSError: it cannot be written.
    """
    number, name = await asyncio.to_thread(tempfile.mkstemp, ".tmp", f".{path.name}.", path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
            await asyncio.to_thread(_flush, file)
        await asyncio.to_thread(temporary.replace, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            await asyncio.to_thread(temporary.unlink)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
