"""Prometheus metrics, read from plain counters when a scrape comes; the data path never touches a metrics library."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvatlas import __version__
from kvatlas.admin.metric_list import METRICS, MetricInfo
from kvatlas.fleet import Cause, Fleet, RecencyWatch, SnapshotStats, SurvivalCurve, Trust, Worker
from kvatlas.gateway import GatewayStats, HistogramSnapshot, StatsSnapshot, WorkerSnapshot
from kvatlas.gateway.fleet_planner import FleetPlanner
from kvatlas.index import BLOCKS_PER_STAMP, PrefixIndex

__all__ = ["MetricsCollector"]


_Samples = Iterable[tuple[tuple[str, ...], float]]
_AGE_SHARES = (0.1, 0.5, 0.9)


class MetricsCollector(Collector):
    """Turns the gateway's and the fleet's counters into samples at scrape time. Cost: O(workers).

    Args:
        started_s: when the gateway started, Unix time.
        snapshots: what its snapshots amount to; all 0 where it writes none.
    """

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        gateway: GatewayStats,
        planner: FleetPlanner,
        *,
        started_s: float,
        snapshots: SnapshotStats | None = None,
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._gateway = gateway
        self._planner = planner
        self._started_s = started_s
        self._snapshots = snapshots or SnapshotStats()

    def collect(self) -> Iterator[Metric]:
        """All metrics of `METRICS`, in order."""
        snapshot = self._gateway.snapshot()
        values = self._values(snapshot)
        histograms: dict[str, Callable[[WorkerSnapshot], HistogramSnapshot]] = {
            "kvatlas_worker_ttft_seconds": lambda worker: worker.ttft_s,
            "kvatlas_worker_duration_seconds": lambda worker: worker.duration_s,
        }
        for info in METRICS:
            if info.kind == "histogram":
                pick = histograms[info.name]
                yield _histogram(info, [(worker_id, pick(w)) for worker_id, w in snapshot.workers.items()])
            else:
                yield _family(info, values[info.name]())

    def _values(self, gateway: StatsSnapshot) -> dict[str, Callable[[], _Samples]]:
        planner = self._planner

        def one(value: float) -> Callable[[], _Samples]:
            return lambda: [((), value)]

        def each(read: Callable[[Worker], float]) -> Callable[[], _Samples]:
            return lambda: [((worker.worker_id,), read(worker)) for worker in self._fleet.workers]

        return {
            "kvatlas_build_info": lambda: [((__version__,), 1)],
            "kvatlas_start_time_seconds": one(self._started_s),
            "kvatlas_requests_total": one(gateway.requests),
            "kvatlas_in_flight": one(gateway.in_flight),
            "kvatlas_client_aborts_total": one(gateway.client_aborts),
            "kvatlas_retries_total": one(gateway.retries),
            "kvatlas_refused_total": lambda: [((code,), n) for code, n in gateway.refused_by_code.items()],
            "kvatlas_render_errors_total": one(planner.render_errors),
            "kvatlas_rendered_tokens_total": lambda: [
                (("memory",), sum(cache.hit_tokens for cache in planner.token_caches)),
                (("tokenizer",), sum(cache.missed_tokens for cache in planner.token_caches)),
            ],
            "kvatlas_turn_memory_bytes": one(sum(cache.used_bytes for cache in planner.token_caches)),
            "kvatlas_planner_faults_total": one(gateway.planner_faults),
            "kvatlas_worker_responses_total": lambda: [
                ((worker_id, f"{status_class}xx" if status_class else "none"), n)
                for worker_id, w in gateway.workers.items()
                for status_class, n in enumerate(w.responses_by_class)
                if n
            ],
            "kvatlas_worker_errors_total": lambda: [
                ((worker_id, code), n)
                for worker_id, w in gateway.workers.items()
                for code, n in w.errors_by_code.items()
            ],
            "kvatlas_worker_in_flight": lambda: [
                ((worker_id,), w.in_flight) for worker_id, w in gateway.workers.items()
            ],
            "kvatlas_worker_healthy": each(lambda w: w.healthy),
            "kvatlas_worker_silent": each(lambda w: w.silent_reason is not None),
            "kvatlas_worker_events_configured": each(lambda w: w.events_at is not None),
            "kvatlas_worker_trust": lambda: [
                ((w.worker_id, level.value), w.trust.level is level) for w in self._fleet.workers for level in Trust
            ],
            "kvatlas_worker_queued_prefill_tokens": each(lambda w: w.load.queued_prefill_tokens),
            "kvatlas_worker_prefill_tokens_per_second": each(lambda w: w.load.prefill_tokens_per_s),
            "kvatlas_worker_uncached_tokens_total": each(lambda w: w.load.uncached_tokens_total),
            **self._snapshot_values(),
            **self._event_values(each),
        }

    def _snapshot_values(self) -> dict[str, Callable[[], _Samples]]:
        stats = self._snapshots
        return {
            "kvatlas_snapshot_saved_total": lambda: [((), stats.saved)],
            "kvatlas_snapshot_failed_total": lambda: [((), stats.failed)],
            "kvatlas_snapshot_bytes": lambda: [((), stats.last_bytes)],
            "kvatlas_snapshot_duration_seconds": lambda: [((), stats.last_s)],
            "kvatlas_snapshot_timestamp_seconds": lambda: [((), stats.last_wall_s)],
            "kvatlas_snapshot_longest_turn_seconds": lambda: [((), stats.longest_turn_s)],
        }

    def _event_values(
        self, each: Callable[[Callable[[Worker], float]], Callable[[], _Samples]]
    ) -> dict[str, Callable[[], _Samples]]:
        def stats(worker: Worker) -> "object":
            return worker.source.stats if worker.source else None

        def stream(name: str) -> Callable[[], _Samples]:
            return each(lambda w: getattr(stats(w), name, 0))

        def connection(name: str) -> Callable[[], _Samples]:
            return each(lambda w: getattr(w.stream, name, 0))

        return {
            **self._index_values(each),
            "kvatlas_events_batches_total": stream("batches"),
            "kvatlas_events_total": stream("events"),
            "kvatlas_events_malformed_total": lambda: [
                ((w.worker_id, what), getattr(stats(w), f"malformed_{what}", 0))
                for w in self._fleet.workers
                for what in ("batches", "events")
            ],
            "kvatlas_events_unknown_total": stream("unknown_events"),
            "kvatlas_events_gaps_total": stream("gaps"),
            "kvatlas_events_lives_total": stream("lives"),
            "kvatlas_events_foreign_total": stream("foreign_batches"),
            "kvatlas_stream_replays_total": connection("replays"),
            "kvatlas_stream_failed_replays_total": connection("failed_replays"),
            "kvatlas_stream_bad_messages_total": connection("bad_messages"),
            "kvatlas_stream_overflowed_batches_total": connection("overflowed"),
            "kvatlas_stream_connections_total": connection("connections"),
            **self._audit_values(each),
        }

    def _index_values(
        self, each: Callable[[Callable[[Worker], float]], Callable[[], _Samples]]
    ) -> dict[str, Callable[[], _Samples]]:
        """Each worker's counters, and the memory, are asked for once a scrape: every answer is made anew."""
        memory = self._index.memory
        stats = {worker.worker_id: self._index.stats(worker.worker_id) for worker in self._fleet.workers}
        return {
            "kvatlas_index_bytes": lambda: [((), memory.used_bytes)],
            "kvatlas_index_max_bytes": lambda: [((), memory.max_bytes or 0)],
            "kvatlas_index_blocks": lambda: [((), memory.blocks)],
            "kvatlas_index_refused_blocks_total": each(lambda w: stats[w.worker_id].refused_blocks),
            "kvatlas_index_forgotten_blocks_total": each(lambda w: stats[w.worker_id].forgotten_blocks),
            "kvatlas_index_unpaired_blocks_total": each(lambda w: stats[w.worker_id].unpaired_blocks),
            "kvatlas_index_dropped_orphan_blocks_total": each(lambda w: stats[w.worker_id].dropped_orphan_blocks),
            "kvatlas_index_unkeyed_blocks": each(lambda w: stats[w.worker_id].unkeyed_now),
            "kvatlas_index_removal_age_blocks": lambda: self._removal_ages(
                lambda recency: recency.curve, BLOCKS_PER_STAMP
            ),
            "kvatlas_index_idle_removal_blocks": lambda: self._removal_ages(lambda recency: recency.own_curve, 1),
            "kvatlas_index_timed_blocks": each(lambda w: self._index.uses.counts(w.worker_id, 0).timed_blocks),
            "kvatlas_index_resident_blocks": each(lambda w: stats[w.worker_id].resident_now),
            "kvatlas_index_orphan_blocks": each(lambda w: stats[w.worker_id].orphans_now),
            "kvatlas_index_unknown_removals_total": each(lambda w: stats[w.worker_id].unknown_removals),
            "kvatlas_index_doubted_blocks": each(lambda w: stats[w.worker_id].doubted_now),
            "kvatlas_index_reported_blocks": each(lambda w: stats[w.worker_id].reported_now),
        }

    def _removal_ages(self, curve_of: Callable[[RecencyWatch], SurvivalCurve], unit_blocks: int) -> _Samples:
        for worker in self._fleet.workers:
            curve = curve_of(worker.recency) if worker.recency else None
            for share in _AGE_SHARES:
                age = curve.removal_age(share) if curve else None
                if age is not None:
                    yield (worker.worker_id, str(share)), age * unit_blocks

    def _audit_values(
        self, each: Callable[[Callable[[Worker], float]], Callable[[], _Samples]]
    ) -> dict[str, Callable[[], _Samples]]:
        return {
            "kvatlas_predictions_total": lambda: [
                ((w.worker_id, result), getattr(w.audit, result))
                for w in self._fleet.workers
                for result in ("equal", "over", "under", "unreported")
            ],
            "kvatlas_healed_blocks_total": lambda: [
                ((w.worker_id, how), getattr(w.audit, f"{how}_blocks"))
                for w in self._fleet.workers
                for how in ("confirmed", "adopted", "refuted")
            ],
            "kvatlas_prediction_errors_total": lambda: [
                ((w.worker_id, direction, cause.value), causes.get(cause, 0))
                for w in self._fleet.workers
                for direction, causes in (("over", w.audit.over_by_cause), ("under", w.audit.under_by_cause))
                for cause in Cause
            ],
            "kvatlas_overclaim_alarms_total": each(lambda w: w.audit.alarms),
            "kvatlas_parity_mismatches_total": each(lambda w: w.audit.parity_mismatches),
            "kvatlas_predicted_cached_tokens_total": each(lambda w: w.audit.predicted_tokens),
            "kvatlas_reported_cached_tokens_total": each(lambda w: w.audit.reported_tokens),
        }


def _family(info: MetricInfo, samples: _Samples) -> Metric:
    kind = CounterMetricFamily if info.kind == "counter" else GaugeMetricFamily
    family = kind(info.name, info.help, labels=info.labels)
    for labels, value in samples:
        family.add_metric(labels, float(value))
    return family


def _histogram(info: MetricInfo, samples: Iterable[tuple[str, HistogramSnapshot]]) -> Metric:
    family = HistogramMetricFamily(info.name, info.help, labels=info.labels)
    for worker_id, snapshot in samples:
        buckets: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip(snapshot.bounds, snapshot.counts, strict=False):
            running += count
            buckets.append((str(bound), running))
        buckets.append(("+Inf", snapshot.count))
        family.add_metric([worker_id], buckets, sum_value=snapshot.total)
    return family
