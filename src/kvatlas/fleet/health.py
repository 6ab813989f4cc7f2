"""Is an engine alive, what does it serve, how busy does it say it is: asked over HTTP, outside the data path."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import msgspec

from kvatlas.clock import Clock
from kvatlas.fleet.failures import describe_failure
from kvatlas.fleet.metrics_page import MetricsPage
from kvatlas.fleet.worker import Worker

__all__ = ["HealthMonitor"]

_log = logging.getLogger(__name__)
_MAX_METRICS_BYTES = 8 * 1024 * 1024
# A healthy engine that failed a check is looked at again this much sooner.
_HASTE = 4


class _ModelCard(msgspec.Struct):
    id: str
    parent: str | None = None


class _ModelList(msgspec.Struct):
    data: list[msgspec.Raw]


@dataclass(frozen=True, slots=True)
class _Answer:
    """What one round of questions brought. None is what was not told: the ranks keep what they know."""

    failure: str | None = None
    """Why the engine is not well."""
    trouble: str | None = None
    """Why models or metrics could not be read, although it is."""
    models: "_Models | None" = None
    page: MetricsPage | None = None


@dataclass(frozen=True, slots=True)
class _Models:
    names: tuple[str, ...]
    cards: dict[str, bytes]
    adapters: frozenset[str]


class HealthMonitor:
    """Checks one engine for as long as it runs; each of its ranks gets the result.

    Args:
        base_url: where the engine's paths begin, without a slash at the end.
        on_cache: told a rank's block size and the number of blocks in its pool, as the metrics name them.
        failures: checks that must fail in a row before a worker that was healthy gets no traffic.
    """

    def __init__(
        self,
        base_url: str,
        session: aiohttp.ClientSession,
        clock: Clock,
        *,
        interval_s: float,
        timeout_s: float,
        failures: int,
        on_cache: Callable[[str, int | None, int | None], None],
    ) -> None:
        self._base_url = base_url
        self._session = session
        self._clock = clock
        self._interval_s = interval_s
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._failures = failures
        self._on_cache = on_cache
        self._ranks: dict[str, _Rank] = {}
        self._soon = asyncio.Event()
        self._has_asked = False

    def watch(self, worker: Worker, on_alive: Callable[[bool], Awaitable[bool]]) -> asyncio.Event:
        """Tell this worker, too, what the checks bring; the next one comes at once if there was one already.

        Args:
            on_alive: called when the engine answered, with whether the worker had not been healthy; before it gets
                traffic again. Its answer says whether the worker is still one.

        Returns:
            An event that is set when the worker's first check is over, whatever it brought, or it is unwatched.
        """
        rank = self._ranks[worker.worker_id] = _Rank(worker, on_alive)
        if self._has_asked:
            self._soon.set()
        return rank.first_check

    def unwatch(self, worker_id: str) -> bool:
        """Tell a worker nothing any more, also not what is being asked now. Returns whether others are watched."""
        self._ranks.pop(worker_id).first_check.set()
        return bool(self._ranks)

    async def run(self) -> None:
        """Check for ever. Cancel to stop."""
        while True:
            try:
                await self.check()
            except Exception as error:  # noqa: BLE001 - whatever an engine answers, its health is looked at again
                for rank in self._ranks.values():
                    self._failed(rank, f"the check itself failed: {error!r}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._soon.wait(), self._pause_s())
            self._soon.clear()

    def _pause_s(self) -> float:
        """Until the next check: spread, so that a large fleet is not asked all at once; short while one is in doubt."""
        pause_s = self._interval_s * random.uniform(0.9, 1.0)
        in_doubt = any(rank.worker.healthy and rank.worker.failed_checks for rank in self._ranks.values())
        return pause_s / _HASTE if in_doubt else pause_s

    def check_soon(self) -> None:
        """Ask for a check now, e.g. because a connection to the engine has just failed."""
        self._soon.set()

    async def check(self) -> None:
        """One round of questions, and its result to every rank. Never raises for the engine's faults."""
        self._has_asked = True
        answer = await self._ask()
        await asyncio.gather(*(self._give(rank, answer) for rank in self._ranks.values()))

    # -- asking the engine --

    async def _ask(self) -> _Answer:
        """Health first, then models and metrics."""
        try:
            status = await self._status("/health")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return _Answer(failure=self._describe(error))
        if status != 200:
            return _Answer(failure=f"GET /health answered {status}")
        models = None
        try:
            models = await self._read_models()
            return _Answer(models=models, page=await self._scrape())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            return _Answer(trouble=self._describe(error), models=models)

    def _describe(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer in {self._timeout.total:g} s"
        return describe_failure(error)

    async def _status(self, path: str) -> int:
        async with self._session.get(self._base_url + path, timeout=self._timeout) as response:
            return response.status

    async def _read_models(self) -> _Models | None:
        async with self._session.get(self._base_url + "/v1/models", timeout=self._timeout) as response:
            if response.status != 200:
                return None
            raw_cards = msgspec.json.decode(await response.read(), type=_ModelList).data
        cards = [msgspec.json.decode(raw, type=_ModelCard) for raw in raw_cards]
        return _Models(
            tuple(card.id for card in cards),
            {card.id: bytes(raw) for card, raw in zip(cards, raw_cards, strict=True)},
            frozenset(card.id for card in cards if card.parent),
        )

    async def _scrape(self) -> MetricsPage | None:
        async with self._session.get(self._base_url + "/metrics", timeout=self._timeout) as response:
            if response.status != 200:
                return None
            page = bytearray()
            async for chunk in response.content.iter_any():
                page += chunk
                if len(page) > _MAX_METRICS_BYTES:
                    raise ValueError(f"/metrics is over {_MAX_METRICS_BYTES} bytes")
        return MetricsPage(page.decode())

    # -- telling the ranks --

    async def _give(self, rank: "_Rank", answer: _Answer) -> None:
        """One rank's share of the result; what fails here is that rank's failed check and no other's."""
        try:
            await self._take(rank, answer)
        except Exception as error:  # noqa: BLE001 - as in `run`
            self._failed(rank, f"the check itself failed: {error!r}")
        rank.first_check.set()

    async def _take(self, rank: "_Rank", answer: _Answer) -> None:
        worker = rank.worker
        if not self._watches(rank):
            return
        if answer.failure is not None:
            self._failed(rank, answer.failure)
            return
        worker.health_reason = "GET /health answered 200"
        if answer.trouble is not None:
            worker.health_reason += f", but its models or metrics cannot be read: {answer.trouble}"
        if answer.models is not None:
            worker.models = worker.config.models or answer.models.names
            worker.model_cards, worker.adapters = answer.models.cards, answer.models.adapters
        if answer.page is not None:
            block_size = answer.page.fill(worker.config.rank or 0, worker.gauges)
            rank.reckon_foreign()
            self._on_cache(worker.worker_id, block_size, worker.gauges.num_blocks)
        if not await rank.on_alive(not worker.healthy) or not self._watches(rank):
            return
        if not worker.healthy:
            models = ", ".join(worker.models) or "unknown models"
            _log.info("worker %s: healthy, serves %s", worker.worker_id, models)
            worker.healthy_since_s = self._clock.wall_s()
        worker.failed_checks = 0
        worker.healthy = True

    def _watches(self, rank: "_Rank") -> bool:
        return self._ranks.get(rank.worker.worker_id) is rank

    def _failed(self, rank: "_Rank", reason: str) -> None:
        worker = rank.worker
        if not self._watches(rank):
            return
        worker.failed_checks += 1
        worker.health_reason = reason
        if worker.failed_checks >= self._failures or not worker.healthy:
            if worker.healthy or worker.failed_checks == 1:
                _log.warning("worker %s: gets no traffic: %s", worker.worker_id, reason)
            worker.healthy = False
            worker.healthy_since_s = None
        rank.first_check.set()


class _Rank:
    """A worker whose engine is checked."""

    __slots__ = ("_foreign", "first_check", "on_alive", "worker")

    def __init__(self, worker: Worker, on_alive: Callable[[bool], Awaitable[bool]]) -> None:
        self.worker = worker
        self.on_alive = on_alive
        self.first_check = asyncio.Event()
        self._foreign = (0, 0)

    def reckon_foreign(self) -> None:
        """Requests of others: what the engine counts beyond ours. Two scrapes must agree, since ours come and go."""
        worker = self.worker
        gauges = worker.gauges
        beyond = max(0, gauges.running_requests + gauges.waiting_requests - worker.load.in_flight)
        waiting = min(gauges.waiting_requests, beyond)
        previous, self._foreign = self._foreign, (beyond - waiting, waiting)
        worker.foreign_running = min(previous[0], self._foreign[0])
        worker.foreign_waiting = min(previous[1], self._foreign[1])
