"""Starting from a snapshot: what it says of each worker is taken over, and then proven by the engine or doubted.

A snapshot is a claim about the past. Its stream position says which batch was the last one applied; the subscriber asks
the engine to replay from there. The same bytes prove the same life, and what follows is the difference. Other bytes, or
none, are another life: all is forgotten. A replay that begins later, or no replay endpoint at all, proves nothing: all
is doubted.
"""

import asyncio
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from kvatlas.clock import Clock
from kvatlas.config import ServeConfig, WorkerConfig
from kvatlas.errors import IndexStateError, KvAtlasError, UpstreamConnectError, UpstreamError
from kvatlas.events import StreamPosition
from kvatlas.fleet.failures import describe_failure
from kvatlas.fleet.source import EventSource
from kvatlas.fleet.worker import worker_id_of
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import CopyMode, PrefixIndex, Snapshot, WorkerSnapshot, read_snapshot

__all__ = [
    "SNAPSHOT_PATH",
    "WarmStart",
    "WorkerPast",
    "check_blocks",
    "fetch_snapshot",
    "find_warm_start",
    "read_snapshot_file",
]

SNAPSHOT_PATH = "/api/index/snapshot"
"""Where an admin port gives its snapshot."""

_KEPT_S = 900.0  # workers that join later than this after the start have another past by then
_FETCH_TIMEOUT = aiohttp.ClientTimeout(total=60.0, sock_connect=5.0)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerPast:
    """What a snapshot says of one worker.

    Attributes:
        origin: which snapshot, for people.
    """

    snapshot: WorkerSnapshot
    origin: str

    @property
    def engine_started_s(self) -> float | None:
        """Unix time at which the engine's process started: another value is another engine."""
        return self.snapshot.state.engine_started_s

    def may_be_of(self, engine_started_s: float | None) -> bool:
        """Whether it may be the past of an engine whose process started then; None where that is not known yet."""
        known_s = self.engine_started_s
        return known_s is None or engine_started_s is None or known_s == engine_started_s

    def restore(self, source: EventSource, index: PrefixIndex, *, can_replay: bool) -> StreamPosition | None:
        """Take the past over into the worker's empty column.

        Args:
            can_replay: whether the engine can be asked to prove it; if not, all is doubted at once.

        Returns:
            From where to follow the stream; None from its beginning, also when the past cannot be used: that is logged.
        """
        state = self.snapshot.state
        try:
            index.restore(state.worker_id, state.column, self.snapshot.blocks, state.planes)
        except (IndexStateError, MemoryError) as error:
            why = str(error) or "it does not fit under index_max_bytes"
            _log.warning("worker %s: starts with nothing, %s is not used: %s", state.worker_id, self.origin, why)
            return None
        loss, position = state.loss, state.position
        if position is None or not can_replay:
            loss = loss or f"restored from {self.origin}, and no replay can prove that it still holds"
            index.doubt(state.worker_id)
        source.restore(position, loss, f"restored from {self.origin}; not proven by the engine yet")
        blocks = index.stats(state.worker_id).resident_now
        _log.info("worker %s: %d blocks restored from %s", state.worker_id, blocks, self.origin)
        return position


class WarmStart:
    """A checked snapshot, each worker's part for that worker to take.

    Args:
        snapshot: as read.
        origin: where it came from, for people.
        seed: the configured seed of block keys; None takes the snapshot's.

    Raises:
        IndexStateError: its block keys are of another seed, or a worker's blocks are damaged. Nothing of it is used.

    Cost: natively about 300 ns a block: every worker's blocks are loaded once to see that they can be.
    """

    def __init__(self, snapshot: Snapshot, origin: str, clock: Clock, *, seed: int | None = None) -> None:
        if seed is not None and seed != snapshot.head.seed:
            raise IndexStateError(
                f"the block keys of {origin} are of another seed than the configured one: remove `seed` from the "
                "configuration to take the snapshot's, or start without the snapshot"
            )
        self.seed = snapshot.head.seed
        self._clock = clock
        self._until_s = clock.monotonic_s() + _KEPT_S
        age_s = max(0.0, clock.wall_s() - snapshot.head.taken_wall_s)
        self._origin = f"{origin}, {age_s:.0f} s old"
        self._waiting = {worker.state.worker_id: worker for worker in snapshot.workers}
        for worker in snapshot.workers:
            check_blocks(replace(snapshot, workers=(worker,)))

    @property
    def waiting(self) -> tuple[WorkerPast, ...]:
        """The parts that were not taken yet."""
        self._expire()
        return tuple(WorkerPast(worker, self._origin) for worker in self._waiting.values())

    def take(self, config: WorkerConfig) -> WorkerPast | None:
        """The past of a worker that joins; None when there is none or it was taken, and 15 minutes after the start."""
        self._expire()
        worker = self._waiting.pop(worker_id_of(config), None)
        return None if worker is None else WorkerPast(worker, self._origin)

    def _expire(self) -> None:
        if self._clock.monotonic_s() > self._until_s:
            self._waiting.clear()


def check_blocks(snapshot: Snapshot) -> PrefixIndex:
    """Load all workers into an empty index, which is returned.

    Raises:
        IndexStateError: a worker's blocks are damaged.
    """
    index = PrefixIndex(BlockKeyHasher(snapshot.head.seed))
    for worker in snapshot.workers:
        state = worker.state
        if state.copy_mode not in set(CopyMode):
            raise IndexStateError(
                f"worker {state.worker_id} has copy_mode {state.copy_mode!r}: the snapshot is damaged"
            )
        index.add_worker(state.worker_id, copy_mode=CopyMode(state.copy_mode))
        index.restore(state.worker_id, state.column, worker.blocks, state.planes)
    return index


async def find_warm_start(config: ServeConfig, clock: Clock) -> WarmStart | None:
    """What `serve` starts from: the peer's snapshot if one is configured and answers, else its own file, else nothing.

    A snapshot that cannot be used is logged with the reason, and a file moved aside (`.refused`): the start goes on.
    """
    if config.bootstrap_from is not None:
        origin = f"the snapshot of {config.bootstrap_from}"
        try:
            snapshot = read_snapshot(await fetch_snapshot(config.bootstrap_from), origin)
            return WarmStart(snapshot, origin, clock, seed=config.seed)
        except KvAtlasError as error:
            _log.warning("bootstrap_from: %s", error.message)
    if config.snapshot_path is None:
        return None
    path = Path(config.snapshot_path)
    return await asyncio.to_thread(_from_file, path, config.seed, clock)


def _from_file(path: Path, seed: int | None, clock: Clock) -> WarmStart | None:
    if not path.exists():
        _log.info("no snapshot at %s yet: the index starts empty", path)
        return None
    try:
        return WarmStart(read_snapshot_file(path), str(path), clock, seed=seed)
    except IndexStateError as error:
        aside = path.with_name(path.name + ".refused")
        _log.error("the index starts empty, %s is kept as %s: %s", path, aside.name, error.message)
        try:
            path.replace(aside)
        except OSError as failure:
            _log.warning("%s cannot be renamed: %s", path, failure.strerror)
        return None


def read_snapshot_file(path: Path) -> Snapshot:
    """Read and check a snapshot's file.

    Raises:
        IndexStateError: it cannot be read, or is no snapshot that this release can use.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise IndexStateError(f"{path} cannot be read: {error.strerror}") from error
    return read_snapshot(data, str(path))


async def fetch_snapshot(admin_url: str) -> bytes:
    """Get the snapshot of a running gateway from its admin port.

    Raises:
        UpstreamConnectError: nobody answers there.
        UpstreamError: it is not a gateway's admin port.
    """
    url = admin_url.rstrip("/") + SNAPSHOT_PATH
    try:
        async with aiohttp.ClientSession(timeout=_FETCH_TIMEOUT) as session, session.get(url) as response:
            if response.status != 200:
                raise UpstreamError(f"{url} answered {response.status}: is it the admin port of a kvatlas gateway?")
            return await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise UpstreamConnectError(f"no snapshot from {url}: {describe_failure(error)}") from error
