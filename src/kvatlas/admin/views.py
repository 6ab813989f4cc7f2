"""Workers as the admin app shows them."""

import msgspec

from kvatlas.fleet import Worker
from kvatlas.index import BLOCKS_PER_STAMP, PrefixIndex

__all__ = ["WorkerView", "view_worker"]


class TrustView(msgspec.Struct):
    """How far the worker's column can be believed."""

    level: str
    reason: str
    age_s: float


class StreamView(msgspec.Struct):
    """What came from its event stream."""

    batches: int
    events: int
    last_seq: int
    last_batch_age_s: float | None
    gaps: int
    lives: int
    malformed_batches: int
    malformed_events: int
    unknown_events: int


class IndexView(msgspec.Struct):
    """What the index knows of it."""

    block_size: int | None
    resident_blocks: int
    orphan_blocks: int
    stored_blocks: int
    removed_blocks: int
    unknown_removals: int
    unpaired_blocks: int
    removal_age_blocks: int | None = None
    """Median age at removal, in blocks that the whole fleet stored or looked up since the last use."""


class LoadView(msgspec.Struct):
    """How busy it is."""

    in_flight: int
    queued_prefill_tokens: int
    prefill_tokens_per_s: float
    requests_total: int
    uncached_tokens_total: int
    engine_running: int
    engine_waiting: int
    engine_kv_usage: float


class PredictionView(msgspec.Struct):
    """Predicted against reported cached tokens."""

    compared: int
    equal: int
    over: int
    under: int
    unreported: int
    parity_mismatches: int
    predicted_tokens: int
    reported_tokens: int


class WorkerView(msgspec.Struct):
    """One worker, whole.

    Attributes:
        healthy_since_s: Unix time since when it has been healthy without a break; None while it is not.
        failed_checks: health checks that failed since one passed.
        silent_reason: why its event stream is judged silent while it works; it gets no traffic where enough others are
            not. None if it is not.
    """

    id: str
    url: str
    rank: int | None
    models: tuple[str, ...]
    healthy: bool
    health_reason: str
    healthy_since_s: float | None
    failed_checks: int
    silent_reason: str | None
    trust: TrustView
    stream: StreamView | None
    index: IndexView
    load: LoadView
    predictions: PredictionView


def view_worker(worker: Worker, index: PrefixIndex, now_s: float) -> WorkerView:
    """Copy a worker's state. `now_s` is monotonic."""
    stats = index.stats(worker.worker_id)
    load, gauges, audit, trust = worker.load, worker.gauges, worker.audit, worker.trust
    return WorkerView(
        id=worker.worker_id,
        url=worker.config.url,
        rank=worker.config.rank,
        models=worker.models,
        healthy=worker.healthy,
        health_reason=worker.health_reason,
        healthy_since_s=worker.healthy_since_s,
        failed_checks=worker.failed_checks,
        silent_reason=worker.silent_reason,
        trust=TrustView(trust.level.value, trust.reason, round(now_s - trust.since_s, 3)),
        stream=_view_stream(worker, now_s),
        index=IndexView(
            index.block_size(worker.worker_id),
            stats.resident_now,
            stats.orphans_now,
            stats.stored_blocks,
            stats.removed_blocks,
            stats.unknown_removals,
            stats.unpaired_blocks,
            _removal_age(worker),
        ),
        load=LoadView(
            load.in_flight,
            load.queued_prefill_tokens,
            round(load.prefill_tokens_per_s, 1),
            load.requests_total,
            load.uncached_tokens_total,
            gauges.running_requests,
            gauges.waiting_requests,
            gauges.kv_usage,
        ),
        predictions=PredictionView(
            audit.compared,
            audit.equal,
            audit.over,
            audit.under,
            audit.unreported,
            audit.parity_mismatches,
            audit.predicted_tokens,
            audit.reported_tokens,
        ),
    )


def _removal_age(worker: Worker) -> int | None:
    age = worker.recency.curve.removal_age(0.5) if worker.recency else None
    return None if age is None else round(age * BLOCKS_PER_STAMP)


def _view_stream(worker: Worker, now_s: float) -> StreamView | None:
    if worker.source is None:
        return None
    stats = worker.source.stats
    return StreamView(
        batches=stats.batches,
        events=stats.events,
        last_seq=stats.last_seq,
        last_batch_age_s=round(now_s - stats.last_batch_s, 3) if stats.batches else None,
        gaps=stats.gaps,
        lives=stats.lives,
        malformed_batches=stats.malformed_batches,
        malformed_events=stats.malformed_events,
        unknown_events=stats.unknown_events,
    )
