"""All workers, their streams and their health checks: started, watched and stopped together."""

import asyncio
from dataclasses import dataclass

import aiohttp

from kvatlas.clock import Clock
from kvatlas.config import ServeConfig, WorkerConfig
from kvatlas.errors import ConfigError, IndexStateError
from kvatlas.fleet.health import HealthMonitor
from kvatlas.fleet.load import LoadLedger
from kvatlas.fleet.source import EventSource
from kvatlas.fleet.speed import FleetSpeed, PrefillSpeed
from kvatlas.fleet.trust import TrustState
from kvatlas.fleet.worker import Worker, split_url, worker_id_of
from kvatlas.index import CopyMode, PrefixIndex
from kvatlas.stream import SubscriberConfig, ZmqEventSubscriber

__all__ = ["Fleet"]


@dataclass(slots=True)
class _Running:
    """What keeps one worker's state fresh."""

    monitor: HealthMonitor
    subscriber: ZmqEventSubscriber | None
    tasks: tuple["asyncio.Task[None]", ...]


class Fleet:
    """The workers behind one gateway.

    Args:
        config: every setting that concerns workers.
        index: gets one column per worker.

    Use as: `await fleet.start()`, then `candidates(model)` per request, then `await fleet.close()`.
    """

    def __init__(self, config: ServeConfig, index: PrefixIndex, clock: Clock) -> None:
        self._config = config
        self._index = index
        self._clock = clock
        self._speed = FleetSpeed(config.prefill_tokens_per_s)
        self._session: aiohttp.ClientSession | None = None
        self._workers: dict[str, Worker] = {}
        self._running: dict[str, _Running] = {}

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers, healthy or not."""
        return tuple(self._workers.values())

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
        """Healthy workers that serve a model; all healthy ones when no model is named."""
        return [worker for worker in self._workers.values() if worker.healthy and worker.serves(model)]

    async def start(self) -> None:
        """Add the configured workers and check each once, so that the first request finds them."""
        self._session = aiohttp.ClientSession()
        for worker in self._config.workers:
            self.add(worker)
        await asyncio.gather(*(running.monitor.check() for running in self._running.values()))

    def add(self, config: WorkerConfig) -> Worker:
        """Take one more worker in.

        Raises:
            ConfigError: the same worker (URL and rank) is already there.
            IndexStateError: the fleet has not been started.
        """
        if self._session is None:
            raise IndexStateError("the fleet is not running: await start() before adding workers")
        worker_id = worker_id_of(config)
        self._check_distinct(worker_id, config)
        host, port, base_path = split_url(config.url)
        self._index.add_worker(worker_id, block_size=config.block_size, copy_mode=CopyMode(config.copy_mode))
        speed = PrefillSpeed(self._clock, self._speed)
        load = LoadLedger(self._clock, speed, decode_step_s=self._config.decode_step_s)
        trust = TrustState(since_s=self._clock.monotonic_s())
        worker = Worker(worker_id, config, host, port, base_path, load, trust, models=config.models)
        self._workers[worker_id] = worker
        monitor = HealthMonitor(
            worker,
            self._session,
            self._clock,
            interval_s=self._config.health_interval_s,
            timeout_s=self._config.health_timeout_s,
            failures=self._config.health_failures,
            on_block_size=self._index.set_block_size,
        )
        tasks = [asyncio.create_task(monitor.run(), name=f"health {worker_id}")]
        subscriber = self._subscribe(worker)
        if subscriber is not None:
            tasks.append(asyncio.create_task(subscriber.run(), name=f"events {worker_id}"))
        self._running[worker_id] = _Running(monitor, subscriber, tuple(tasks))
        return worker

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
        running = self._running.pop(worker_id, None)
        if running is None:
            raise IndexStateError(f"no worker {worker_id!r}; known workers: {', '.join(self._workers) or 'none'}")
        del self._workers[worker_id]
        await _stop(running)
        self._index.remove_worker(worker_id)

    async def close(self) -> None:
        """Stop everything. The fleet cannot be started again."""
        await asyncio.gather(*(_stop(running) for running in self._running.values()))
        self._running.clear()
        if self._session is not None:
            await self._session.close()

    def _check_distinct(self, worker_id: str, config: WorkerConfig) -> None:
        if worker_id in self._workers:
            raise ConfigError(f"worker {worker_id} is given twice: each URL and rank may be named once")
        for other in self._workers.values():
            if other.config.url == config.url and (other.config.rank is None or config.rank is None):
                raise ConfigError(f"{config.url} is given several times: give rank= with each of them")
            if config.events is not None and other.config.events == config.events:
                raise ConfigError(f"events endpoint {config.events} is given for {other.worker_id} and for {worker_id}")

    def _subscribe(self, worker: Worker) -> ZmqEventSubscriber | None:
        config = worker.config
        if config.events is None:
            return None
        worker.source = EventSource(worker.worker_id, self._index, worker.trust, self._clock, rank=config.rank)
        subscriber = ZmqEventSubscriber(
            SubscriberConfig(endpoint=config.events, replay_endpoint=config.replay, topic=config.topic),
            worker.source,
            self._clock,
        )
        worker.stream = subscriber.counters
        return subscriber


async def _stop(running: _Running) -> None:
    if running.subscriber is not None:
        running.subscriber.close()
    for task in running.tasks:
        task.cancel()
    await asyncio.gather(*running.tasks, return_exceptions=True)
