"""What the gateway counts: plain integers and fixed-bucket histograms, read by an exporter elsewhere.

Written on the event loop only, so nothing is locked. `snapshot` copies everything into frozen values.
"""

from bisect import bisect_left
from dataclasses import dataclass

from kvatlas.gateway.values import OutcomeKind

__all__ = [
    "DURATION_BUCKETS_S",
    "TTFT_BUCKETS_S",
    "GatewayStats",
    "Histogram",
    "HistogramSnapshot",
    "StatsSnapshot",
    "WorkerSnapshot",
    "WorkerStats",
]

TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 600.0)
DURATION_BUCKETS_S = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """A histogram at one moment: `counts[i]` values were <= `bounds[i]` and above the one before; last the rest."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.counts)


class Histogram:
    """Counts values in fixed buckets. Cost of `observe`: one bisection."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramSnapshot:
        """A frozen copy."""
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """What went to one worker. `responses_by_class[n]` counts attempts answered nxx; [0] those without an answer.

    `ttft_s` holds generation streams answered 2xx, `duration_s` whole 2xx answers of any kind.
    """

    in_flight: int
    dispatched: int
    responses_by_class: tuple[int, ...]
    client_aborts: int
    errors_by_code: dict[str, int]
    ttft_s: HistogramSnapshot
    duration_s: HistogramSnapshot


class WorkerStats:
    """Counters of the attempts at one worker."""

    __slots__ = (
        "client_aborts",
        "dispatched",
        "duration_s",
        "errors_by_code",
        "in_flight",
        "responses_by_class",
        "ttft_s",
    )

    def __init__(self) -> None:
        self.in_flight = 0
        self.dispatched = 0
        self.responses_by_class = [0] * 10
        self.client_aborts = 0
        self.errors_by_code: dict[str, int] = {}
        self.ttft_s = Histogram(TTFT_BUCKETS_S)
        self.duration_s = Histogram(DURATION_BUCKETS_S)

    def ended(
        self, kind: OutcomeKind, status: int, duration_s: float, ttft_s: float | None, error_code: str | None
    ) -> None:
        """Count the end of one attempt; times only of 2xx answers, durations only of whole ones.

        `ttft_s` is None where the first byte says nothing about the first token.
        """
        succeeded = status // 100 == 2
        self.in_flight -= 1
        self.responses_by_class[status // 100] += 1
        if succeeded and ttft_s is not None:
            self.ttft_s.observe(ttft_s)
        if succeeded and kind == "ok":
            self.duration_s.observe(duration_s)
        elif kind == "client_abort":
            self.client_aborts += 1
        if error_code is not None:
            self.errors_by_code[error_code] = self.errors_by_code.get(error_code, 0) + 1

    def snapshot(self) -> WorkerSnapshot:
        """A frozen copy."""
        classes = tuple(self.responses_by_class)
        return WorkerSnapshot(
            self.in_flight,
            self.dispatched,
            classes,
            self.client_aborts,
            dict(self.errors_by_code),
            self.ttft_s.snapshot(),
            self.duration_s.snapshot(),
        )


@dataclass(frozen=True, slots=True)
class StatsSnapshot:
    """Everything the gateway counted, at one moment.

    `requests` were read whole and given to the planner; `local` were answered by the gateway itself (`/health`,
    `/readyz`); `refused_by_code` counts error answers made by the gateway, whatever the reason, by error code.
    """

    connections: int
    connections_total: int
    in_flight: int
    requests: int
    local: int
    client_aborts: int
    retries: int
    planner_faults: int
    request_bytes: int
    response_bytes: int
    refused_by_code: dict[str, int]
    workers: dict[str, WorkerSnapshot]


class GatewayStats:
    """The live counters. Fields mean what `StatsSnapshot` says."""

    __slots__ = (
        "client_aborts",
        "connections",
        "connections_total",
        "in_flight",
        "local",
        "planner_faults",
        "refused_by_code",
        "request_bytes",
        "requests",
        "response_bytes",
        "retries",
        "workers",
    )

    def __init__(self) -> None:
        self.connections = 0
        self.connections_total = 0
        self.in_flight = 0
        self.requests = 0
        self.local = 0
        self.client_aborts = 0
        self.retries = 0
        self.planner_faults = 0
        self.request_bytes = 0
        self.response_bytes = 0
        self.refused_by_code: dict[str, int] = {}
        self.workers: dict[str, WorkerStats] = {}

    def worker(self, worker_id: str) -> WorkerStats:
        """The counters of one worker, made at first use."""
        found = self.workers.get(worker_id)
        if found is None:
            found = self.workers[worker_id] = WorkerStats()
        return found

    def refused(self, code: str) -> None:
        """Count one error answer made here."""
        self.refused_by_code[code] = self.refused_by_code.get(code, 0) + 1

    def snapshot(self) -> StatsSnapshot:
        """A frozen copy of everything. Cost: O(workers)."""
        return StatsSnapshot(
            connections=self.connections,
            connections_total=self.connections_total,
            in_flight=self.in_flight,
            requests=self.requests,
            local=self.local,
            client_aborts=self.client_aborts,
            retries=self.retries,
            planner_faults=self.planner_faults,
            request_bytes=self.request_bytes,
            response_bytes=self.response_bytes,
            refused_by_code=dict(self.refused_by_code),
            workers={worker_id: worker.snapshot() for worker_id, worker in self.workers.items()},
        )
