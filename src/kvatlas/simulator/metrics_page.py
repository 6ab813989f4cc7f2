"""The registry behind `/metrics`: each series once, with a label for each engine behind the port."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvatlas.simulator.config import EngineConfig
from kvatlas.simulator.scheduler import Scheduler

__all__ = ["MetricsPage"]

_LABELS = ("model_name", "engine")
_REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")


class MetricsPage:
    """The registry of one server: every series once, with a label for each engine behind its port."""

    def __init__(self, config: EngineConfig) -> None:
        self._registry = CollectorRegistry()
        self._model = config.model
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused because too much is queued.",
            ("model_name", "reason"),
            registry=self._registry,
        )
        self.rejections = {reason: rejections.labels(config.model, reason) for reason in _REJECTION_REASONS}
        """By reason; over all engines."""
        self._started_s = Gauge(
            "process_start_time_seconds", "Start of the engine in seconds since the epoch.", registry=self._registry
        )
        self._lora_info = _LoraInfo(config.max_loras)
        if config.lora_modules:
            self._registry.register(self._lora_info)

    def set_start(self, wall_s: float) -> None:
        """Say when the engine began: what tells one life of it from another."""
        self._started_s.set(wall_s)

    def exposition(self) -> bytes:
        """The page in Prometheus text format 0.0.4."""
        return generate_latest(self._registry)

    def watch_loras(self, scheduler: Scheduler) -> None:
        """Read this engine's adapters when the page is asked for."""
        self._lora_info.schedulers.append(scheduler)

    def gauge(self, name: str, help_text: str, rank: int, **labels: str) -> Gauge:
        """The gauge of one engine."""
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, help_text, (*_LABELS, *labels), registry=self._registry)
        return self._gauges[name].labels(self._model, str(rank), *labels.values())

    def counter(self, name: str, help_text: str, rank: int, **labels: str) -> Counter:
        """The counter of one engine."""
        if name not in self._counters:
            self._counters[name] = Counter(name, help_text, (*_LABELS, *labels), registry=self._registry)
        return self._counters[name].labels(self._model, str(rank), *labels.values())

    def histogram(self, name: str, help_text: str, rank: int, buckets: tuple[float, ...]) -> Histogram:
        """The histogram of one engine."""
        if name not in self._histograms:
            self._histograms[name] = Histogram(name, help_text, _LABELS, registry=self._registry, buckets=buckets)
        return self._histograms[name].labels(self._model, str(rank))

    def info(self, name: str, help_text: str, labels: dict[str, str]) -> None:
        """A gauge of 1 that is all labels."""
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, help_text, tuple(labels), registry=self._registry)
        self._gauges[name].labels(**labels).set(1)


class _LoraInfo(Collector):
    """`vllm:lora_requests_info`: the adapters in use, read when the page is asked for. Its value is the wall time."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self.schedulers: list[Scheduler] = []

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's collectors."""
        running: set[str] = set()
        waiting: set[str] = set()
        for scheduler in self.schedulers:
            runs, waits = scheduler.loras
            running |= runs
            waiting |= waits
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of running and waiting requests.",
            labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        )
        names = (",".join(sorted(waiting)), ",".join(sorted(running)))
        family.add_metric((str(self._max_loras), *names), time.time())
        yield family
