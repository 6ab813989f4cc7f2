"""Is an engine alive, what does it serve, how busy does it say it is: asked over HTTP, outside the data path."""

import asyncio
import contextlib
import logging
import math
import random
import re
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec

from kvatlas.clock import Clock
from kvatlas.fleet.failures import describe_failure
from kvatlas.fleet.silence import TrafficCount
from kvatlas.fleet.worker import EngineGauges, Worker

__all__ = ["HealthMonitor", "parse_gauges"]

_log = logging.getLogger(__name__)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_MAX_METRICS_BYTES = 8 * 1024 * 1024
# A healthy engine that failed a check is looked at again this much sooner.
_HASTE = 4
_COMPUTED = "vllm:prompt_tokens_by_source_total"
_NAMES = (
    "process_start_time_seconds",
    "vllm:cache_config_info",
    "vllm:gpu_cache_usage_perc",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    _COMPUTED,
    "vllm:request_success_total",
)
# Only these: most of a page is buckets of histograms, and a large fleet has many pages.
_SAMPLE = re.compile(rf"^({'|'.join(_NAMES)})(?:\{{(.*)\}})? ([0-9.eE+-]+|NaN)\r?$", re.MULTILINE)


class _ModelCard(msgspec.Struct):
    id: str
    parent: str | None = None


class _ModelList(msgspec.Struct):
    data: list[msgspec.Raw]


class HealthMonitor:
    """Checks one worker for as long as it runs.

    Args:
        on_cache: told the engine's block size and the number of blocks in its pool, as its metrics name them.
        on_alive: called when an engine answered, with whether it had not before; before it gets traffic again. Its
            answer says whether the worker is still one.
        failures: checks that must fail in a row before a worker that was healthy gets no traffic.
    """

    def __init__(
        self,
        worker: Worker,
        session: aiohttp.ClientSession,
        clock: Clock,
        *,
        interval_s: float,
        timeout_s: float,
        failures: int,
        on_cache: Callable[[str, int | None, int | None], None],
        on_alive: Callable[[bool], Awaitable[bool]],
    ) -> None:
        self._worker = worker
        self._session = session
        self._clock = clock
        self._interval_s = interval_s
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._failures = failures
        self._on_cache = on_cache
        self._on_alive = on_alive
        self.first_check = asyncio.Event()
        """Set when the first check is over, whatever it brought."""
        self._soon = asyncio.Event()
        self._foreign = (0, 0)

    async def run(self) -> None:
        """Check for ever. Cancel to stop."""
        while True:
            try:
                await self.check()
            except Exception as error:  # noqa: BLE001 - whatever an engine answers, its health is looked at again
                self._failed(f"the check itself failed: {error!r}")
            self.first_check.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._soon.wait(), self._pause_s())
            self._soon.clear()

    def _pause_s(self) -> float:
        """Until the next check: spread, so that a large fleet is not asked all at once; short while one is in doubt."""
        pause_s = self._interval_s * random.uniform(0.9, 1.0)
        return pause_s / _HASTE if self._worker.healthy and self._worker.failed_checks else pause_s

    def check_soon(self) -> None:
        """Ask for a check now, e.g. because a connection to the engine has just failed."""
        self._soon.set()

    async def check(self) -> None:
        """One round: health first, then models and metrics. Never raises for the engine's faults."""
        worker = self._worker
        try:
            status = await self._status("/health")
            if status != 200:
                self._failed(f"GET /health answered {status}")
                return
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._failed(self._describe(error))
            return
        worker.health_reason = "GET /health answered 200"
        await self._look_around()
        if not await self._on_alive(not worker.healthy):
            return
        if not worker.healthy:
            models = ", ".join(worker.models) or "unknown models"
            _log.info("worker %s: healthy, serves %s", worker.worker_id, models)
            worker.healthy_since_s = self._clock.wall_s()
        worker.failed_checks = 0
        worker.healthy = True

    async def _look_around(self) -> None:
        """Models and metrics. An engine that is alive but does not give them still serves; the reason says so."""
        try:
            await self._learn_models()
            await self._scrape()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self._worker.health_reason += f", but its models or metrics cannot be read: {self._describe(error)}"

    def _describe(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer in {self._timeout.total:g} s"
        return describe_failure(error)

    def _failed(self, reason: str) -> None:
        worker = self._worker
        worker.failed_checks += 1
        worker.health_reason = reason
        if worker.failed_checks >= self._failures or not worker.healthy:
            if worker.healthy or worker.failed_checks == 1:
                _log.warning("worker %s: gets no traffic: %s", worker.worker_id, reason)
            worker.healthy = False
            worker.healthy_since_s = None

    async def _status(self, path: str) -> int:
        async with self._session.get(self._worker.base_url + path, timeout=self._timeout) as response:
            return response.status

    async def _learn_models(self) -> None:
        worker = self._worker
        async with self._session.get(worker.base_url + "/v1/models", timeout=self._timeout) as response:
            if response.status != 200:
                return
            raw_cards = msgspec.json.decode(await response.read(), type=_ModelList).data
        cards = [msgspec.json.decode(raw, type=_ModelCard) for raw in raw_cards]
        worker.model_cards = {card.id: bytes(raw) for card, raw in zip(cards, raw_cards, strict=True)}
        worker.models = worker.config.models or tuple(card.id for card in cards)
        worker.adapters = frozenset(card.id for card in cards if card.parent)

    async def _scrape(self) -> None:
        async with self._session.get(self._worker.base_url + "/metrics", timeout=self._timeout) as response:
            if response.status != 200:
                return
            page = bytearray()
            async for chunk in response.content.iter_any():
                page += chunk
                if len(page) > _MAX_METRICS_BYTES:
                    raise ValueError(f"/metrics is over {_MAX_METRICS_BYTES} bytes")
        block_size = parse_gauges(page.decode(), self._worker.config.rank or 0, self._worker.gauges)
        self._reckon_foreign()
        self._on_cache(self._worker.worker_id, block_size, self._worker.gauges.num_blocks)

    def _reckon_foreign(self) -> None:
        """Requests of others: what the engine counts beyond ours. Two scrapes must agree, since ours come and go."""
        worker = self._worker
        gauges = worker.gauges
        beyond = max(0, gauges.running_requests + gauges.waiting_requests - worker.load.in_flight)
        waiting = min(gauges.waiting_requests, beyond)
        previous, self._foreign = self._foreign, (beyond - waiting, waiting)
        worker.foreign_running = min(previous[0], self._foreign[0])
        worker.foreign_waiting = min(previous[1], self._foreign[1])


def parse_gauges(text: str, rank: int, gauges: EngineGauges) -> int | None:
    """Read one rank's load out of an engine's metrics page into `gauges`.

    Returns:
        The engine's block size in tokens, if the page names it.

    Cost: about 0.4 ms for a page of 500 lines.

    Source: vLLM 0.32.0 metric names and labels (`engine` is the rank, absent in old releases).
    """
    totals: dict[str, float] = {}
    block_size: int | None = None
    caches_prefixes = True
    for sample in _SAMPLE.finditer(text):
        name, raw_labels, value = sample.groups()
        labels = dict(_LABEL.findall(raw_labels or ""))
        if labels.get("engine", str(rank)) != str(rank):
            continue
        if name == "vllm:cache_config_info":
            block_size = _whole(labels.get("block_size"))
            gauges.num_blocks = _whole(labels.get("num_gpu_blocks"))
            caches_prefixes = labels.get("enable_prefix_caching") != "False"
        elif name != _COMPUTED or labels.get("source") == "local_compute":
            totals[name] = totals.get(name, 0.0) + _finite(value)
    gauges.running_requests = int(totals.get("vllm:num_requests_running", 0))
    gauges.waiting_requests = int(totals.get("vllm:num_requests_waiting", 0))
    gauges.kv_usage = totals.get("vllm:kv_cache_usage_perc", totals.get("vllm:gpu_cache_usage_perc", 0.0))
    gauges.started_s = totals.get("process_start_time_seconds")
    gauges.traffic = _traffic_in(totals, gauges.running_requests) if caches_prefixes else None
    return block_size


def _traffic_in(totals: dict[str, float], running_requests: int) -> TrafficCount | None:
    """What was computed: told as such by new releases, lookups less hits by older ones."""
    computed = totals.get(_COMPUTED)
    queries, hits = totals.get("vllm:prefix_cache_queries_total"), totals.get("vllm:prefix_cache_hits_total")
    if computed is None and queries is not None and hits is not None:
        computed = queries - hits
    ended = totals.get("vllm:request_success_total")
    if computed is None or ended is None:
        return None
    return TrafficCount(computed, ended, running_requests)


def _finite(text: str) -> float:
    """A sample's value; 0 for what is no finite number, so that one odd sample spoils no page."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() and int(text) > 0 else None
