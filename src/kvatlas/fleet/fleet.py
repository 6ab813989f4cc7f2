"""All workers, their streams and their health checks: started, watched and stopped together."""

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass

import aiohttp
import msgspec

from kvatlas.clock import Clock
from kvatlas.config import NO_EVENTS, ServeConfig, WorkerConfig
from kvatlas.errors import ConfigError, IndexStateError
from kvatlas.fleet.discovery import EventDiscovery, EventSources
from kvatlas.fleet.follower import EventFollower
from kvatlas.fleet.health import HealthMonitor
from kvatlas.fleet.load import LoadLedger
from kvatlas.fleet.recency import FleetRecency
from kvatlas.fleet.speed import FleetSpeed, PrefillSpeed
from kvatlas.fleet.trust import TrustState
from kvatlas.fleet.warm_start import WarmStart, WorkerPast
from kvatlas.fleet.worker import Worker, split_url, worker_id_of
from kvatlas.index import CopyMode, PrefixIndex

__all__ = ["Fleet"]


_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    """What keeps one worker's state fresh. `given` is what the operator wrote; it may have become several workers."""

    given: WorkerConfig
    monitor: HealthMonitor
    follower: EventFollower
    first_check: asyncio.Event


class Fleet:
    """The workers behind one gateway.

    Args:
        config: every setting that concerns workers.
        index: gets one column per worker.
        warm_start: what a snapshot says of workers, each of which takes its part; None starts with nothing.

    Use as: `await fleet.start()`, then `candidates(model)` per request, then `await fleet.close()`.
    """

    def __init__(
        self, config: ServeConfig, index: PrefixIndex, clock: Clock, *, warm_start: WarmStart | None = None
    ) -> None:
        self._config = config
        self._index = index
        self._clock = clock
        self._warm_start = warm_start
        self._speed = FleetSpeed(config.prefill_tokens_per_s)
        self._recency = FleetRecency(index, clock)
        self._session: aiohttp.ClientSession | None = None
        self._workers: dict[str, Worker] = {}
        self._running: dict[str, _Running] = {}
        self._monitors: dict[str, tuple[HealthMonitor, asyncio.Task[None]]] = {}
        """By base URL: the ranks of an engine share its checks."""
        self._leaving: set[asyncio.Task[None]] = set()
        self._removed: set[str] = set()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers, healthy or not."""
        return tuple(self._workers.values())

    @property
    def untold_pasts(self) -> tuple[WorkerPast, ...]:
        """What a snapshot says of workers that have not come yet, or whose stream is not followed yet."""
        waiting = () if self._warm_start is None else self._warm_start.waiting
        pasts = (running.follower.past for running in self._running.values())
        return (*waiting, *(past for past in pasts if past is not None))

    @property
    def ready(self) -> bool:
        """Whether a request could be served now."""
        return any(worker.healthy for worker in self._workers.values())

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that healthy workers serve, sorted."""
        return tuple(sorted({model for worker in self._workers.values() if worker.healthy for model in worker.models}))

    def get(self, worker_id: str) -> Worker | None:
        """The worker of that id, or None."""
        return self._workers.get(worker_id)

    def candidates(self, model: str | None) -> list[Worker]:
        """Healthy workers that serve a model (or, without a name, anything), less those whose stream is silent.

        Silence is a doubt, and no doubt may cost a service: the silent ones stay when they are more than half, so what
        is left out is never more than what takes its load.

        Cost: one pass; two where silent ones stay.
        """
        heard, silent = self._by_silence(model)
        if len(silent) <= len(heard):
            return heard
        return [worker for worker in self._workers.values() if worker.healthy and worker.serves(model)]

    def left_out(self, model: str | None) -> list[Worker]:
        """Those that `candidates` leaves out for their silence: still better than nobody when no candidate answers.

        Cost: one pass.
        """
        heard, silent = self._by_silence(model)
        return silent if len(silent) <= len(heard) else []

    def _by_silence(self, model: str | None) -> tuple[list[Worker], list[Worker]]:
        """Healthy workers that serve a model: those that are heard, and those whose stream is silent."""
        heard: list[Worker] = []
        silent: list[Worker] = []
        for worker in self._workers.values():
            if worker.healthy and worker.serves(model):
                (heard if worker.silent_reason is None else silent).append(worker)
        return heard, silent

    async def start(self) -> None:
        """Add the configured workers and check each once, so that the first request finds them."""
        # The default limit of 100 connections would let engines that hang delay the checks of all others.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        for worker in self._config.workers:
            self.add(worker)
        while waiting := [r.first_check for r in self._running.values() if not r.first_check.is_set()]:
            await asyncio.gather(*(first_check.wait() for first_check in waiting))

    def add(self, config: WorkerConfig) -> Worker:
        """Take one more worker in.

        Raises:
            ConfigError: the same worker (URL and rank) is already there.
            IndexStateError: the fleet has not been started.
        """
        worker_id = worker_id_of(config)
        self._check_distinct(worker_id, config)
        self._removed.discard(worker_id)
        return self._add(config, config)

    def _add(self, config: WorkerConfig, given: WorkerConfig) -> Worker:
        if self._session is None:
            raise IndexStateError("the fleet is not running: await start() before adding workers")
        settings = self._config
        worker_id = worker_id_of(config)
        host, port, base_path = split_url(config.url)
        self._index.add_worker(worker_id, block_size=config.block_size, copy_mode=CopyMode(config.copy_mode))
        speed = PrefillSpeed(self._clock, self._speed)
        load = LoadLedger(self._clock, speed, decode_step_s=settings.decode_step_s)
        trust = TrustState(since_s=self._clock.monotonic_s())
        worker = Worker(worker_id, config, host, port, base_path, load, trust, models=config.models)
        worker.recency = self._recency.watch(worker_id)
        self._workers[worker_id] = worker
        asks = config.events is None and settings.discover_events
        follower = EventFollower(
            worker,
            self._index,
            self._clock,
            discovery=EventDiscovery(self._session, timeout_s=settings.health_timeout_s) if asks else None,
            silent_s=settings.silent_stream_s,
            owner_of=self._owner_of,
            on_ranks=self._on_ranks,
            past=None if self._warm_start is None else self._warm_start.take(config),
        )
        follower.start()
        monitor = self._monitor_of(worker.base_url, self._session)
        self._running[worker_id] = _Running(given, monitor, follower, monitor.watch(worker, follower.after_check))
        return worker

    def _monitor_of(self, base_url: str, session: aiohttp.ClientSession) -> HealthMonitor:
        """The one that checks the engine there, started if there is none."""
        if base_url not in self._monitors:
            settings = self._config
            monitor = HealthMonitor(
                base_url,
                session,
                self._clock,
                interval_s=settings.health_interval_s,
                timeout_s=settings.health_timeout_s,
                failures=settings.health_failures,
                on_cache=self._learn_cache,
            )
            self._monitors[base_url] = monitor, asyncio.create_task(monitor.run(), name=f"health {base_url}")
        return self._monitors[base_url][0]

    def _learn_cache(self, worker_id: str, block_size: int | None, num_blocks: int | None) -> None:
        if block_size:
            self._index.set_block_size(worker_id, block_size)
        if num_blocks:
            self._index.set_capacity(worker_id, num_blocks)

    def check_soon(self, worker_id: str) -> None:
        """Have a worker's health looked at now: something just went wrong with it."""
        running = self._running.get(worker_id)
        if running is not None:
            running.monitor.check_soon()

    async def remove(self, worker_id: str) -> None:
        """Stop following a worker and forget all it held.

        Raises:
            IndexStateError: no such worker.
        """
        if worker_id not in self._running:
            raise IndexStateError(f"no worker {worker_id!r}; known workers: {', '.join(self._workers) or 'none'}")
        self._removed.add(worker_id)
        await self._retire(worker_id)

    async def close(self) -> None:
        """Stop everything. The fleet cannot be started again."""
        checks = [task for _, task in self._monitors.values()]
        for task in checks:
            task.cancel()
        followers = (running.follower.close() for running in self._running.values())
        await asyncio.gather(*checks, *followers, *self._leaving, return_exceptions=True)
        self._running.clear()
        self._monitors.clear()
        if self._session is not None:
            await self._session.close()

    def _retire(self, worker_id: str) -> "asyncio.Task[None]":
        """Forget a worker at once; what it has open is closed by the task that is returned."""
        running = self._running.pop(worker_id)
        base_url = self._workers.pop(worker_id).base_url
        running.follower.leave()
        checks = None if running.monitor.unwatch(worker_id) else self._monitors.pop(base_url)[1]
        self._index.remove_worker(worker_id)
        task = asyncio.create_task(_stop(running.follower, checks), name=f"leaving {worker_id}")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return task

    def _on_ranks(self, worker: Worker, sources: EventSources) -> bool:
        """Make the workers of one URL those ranks that its engine has; whether `worker` is still one of them."""
        running = self._running.get(worker.worker_id)
        if running is None:
            return False
        given = running.given
        if given.rank is not None:
            return True
        configs = [msgspec.structs.replace(given, rank=rank) for rank in sorted(sources.ranks)]
        wanted = {worker_id_of(config): config for config in (configs if len(configs) > 1 else [given])}
        present = {worker_id for worker_id, other in self._running.items() if other.given is given}
        new = [worker_id for worker_id in wanted if worker_id not in present | self._removed]
        old = [worker_id for worker_id in present if worker_id not in wanted]
        if new or old:
            _log.info("%s: %s: workers are now %s", given.url, sources.reason, ", ".join(wanted))
        for worker_id in old:
            self._retire(worker_id)
        for worker_id in new:
            self._add(wanted[worker_id], given)
            self._running[worker_id].follower.take(sources)
        return worker.worker_id in wanted

    def _owner_of(self, endpoint: str) -> str | None:
        for worker in self._workers.values():
            if worker.events_at is not None and worker.events_at.events == endpoint:
                return worker.worker_id
        return None

    def _check_distinct(self, worker_id: str, config: WorkerConfig) -> None:
        if worker_id in self._workers:
            raise ConfigError(f"worker {worker_id} is given twice: each URL and rank may be named once")
        for other in self._workers.values():
            if other.config.url == config.url and (other.config.rank is None or config.rank is None):
                raise ConfigError(f"{config.url} is given several times: give rank= with each of them")
            if config.events not in {None, NO_EVENTS} and other.config.events == config.events:
                raise ConfigError(f"events endpoint {config.events} is given for {other.worker_id} and for {worker_id}")


async def _stop(follower: EventFollower, checks: "asyncio.Task[None] | None") -> None:
    ending: list[Awaitable[None]] = [follower.close()]
    if checks is not None:
        checks.cancel()
        ending.append(checks)
    await asyncio.gather(*ending, return_exceptions=True)
