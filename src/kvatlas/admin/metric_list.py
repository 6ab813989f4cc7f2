"""Every metric there is: the collector takes names and help from here, docs/metrics.md is generated from it."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["METRICS", "MetricInfo"]


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One metric: what it is called, what it counts, how it is split."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


METRICS = (
    MetricInfo("kvatlas_build_info", "gauge", ("version",), "Always 1; the label is the version that runs."),
    MetricInfo("kvatlas_start_time_seconds", "gauge", (), "When this gateway started, Unix time."),
    MetricInfo("kvatlas_requests_total", "counter", (), "Requests read whole and given to the planner."),
    MetricInfo("kvatlas_in_flight", "gauge", (), "Requests being served now."),
    MetricInfo("kvatlas_client_aborts_total", "counter", (), "Requests whose client left before the end."),
    MetricInfo("kvatlas_retries_total", "counter", (), "Requests sent to a second worker after a failed connection."),
    MetricInfo(
        "kvatlas_refused_total", "counter", ("code",), "Error answers made by the gateway itself, by error code."
    ),
    MetricInfo(
        "kvatlas_render_errors_total",
        "counter",
        (),
        "Requests routed without the index because their tokens could not be known.",
    ),
    MetricInfo(
        "kvatlas_rendered_tokens_total",
        "counter",
        ("source",),
        "Prompt tokens made here: `memory` of turns seen before, or `tokenizer`.",
    ),
    MetricInfo("kvatlas_turn_memory_bytes", "gauge", (), "Memory that the tokens of turns seen before take."),
    MetricInfo(
        "kvatlas_planner_faults_total",
        "counter",
        (),
        "Requests answered 500 because planning failed: a bug, see the log.",
    ),
    MetricInfo(
        "kvatlas_worker_responses_total",
        "counter",
        ("worker", "status_class"),
        "Responses by worker and status class (`none`: no answer).",
    ),
    MetricInfo(
        "kvatlas_worker_errors_total", "counter", ("worker", "code"), "Attempts that an engine failed, by error code."
    ),
    MetricInfo("kvatlas_worker_in_flight", "gauge", ("worker",), "Attempts in flight at this worker."),
    MetricInfo(
        "kvatlas_worker_ttft_seconds",
        "histogram",
        ("worker",),
        "Generation streams answered 2xx: from the whole request to the first byte of the body.",
    ),
    MetricInfo(
        "kvatlas_worker_duration_seconds",
        "histogram",
        ("worker",),
        "Whole 2xx answers of any kind: from the whole request to the end of the answer.",
    ),
    MetricInfo("kvatlas_worker_healthy", "gauge", ("worker",), "1 when health checks pass."),
    MetricInfo(
        "kvatlas_worker_silent",
        "gauge",
        ("worker",),
        "1 while its event stream is judged silent although it works: no traffic where enough others are not.",
    ),
    MetricInfo(
        "kvatlas_worker_events_configured", "gauge", ("worker",), "1 when the worker has an event stream to follow."
    ),
    MetricInfo(
        "kvatlas_worker_trust", "gauge", ("worker", "trust"), "1 for the present trust of the worker's event stream."
    ),
    MetricInfo(
        "kvatlas_worker_queued_prefill_tokens",
        "gauge",
        ("worker",),
        "Uncached prompt tokens reckoned to be ahead of a new request.",
    ),
    MetricInfo("kvatlas_worker_prefill_tokens_per_second", "gauge", ("worker",), "Measured prefill speed."),
    MetricInfo(
        "kvatlas_worker_uncached_tokens_total",
        "counter",
        ("worker",),
        "Prompt tokens sent here that had to be computed, as predicted.",
    ),
    MetricInfo("kvatlas_index_bytes", "gauge", (), "Memory the index holds."),
    MetricInfo("kvatlas_snapshot_saved_total", "counter", (), "Snapshots written to snapshot_path."),
    MetricInfo(
        "kvatlas_snapshot_failed_total", "counter", (), "Snapshots that could not be written; the old file was left."
    ),
    MetricInfo("kvatlas_snapshot_bytes", "gauge", (), "Size of the newest snapshot."),
    MetricInfo("kvatlas_snapshot_duration_seconds", "gauge", (), "How long the newest snapshot took to write."),
    MetricInfo(
        "kvatlas_snapshot_timestamp_seconds",
        "gauge",
        (),
        "When the newest snapshot was written, Unix time; 0 before the first.",
    ),
    MetricInfo(
        "kvatlas_snapshot_longest_turn_seconds",
        "gauge",
        (),
        "The longest time that requests waited for one worker's part of a snapshot.",
    ),
    MetricInfo("kvatlas_index_max_bytes", "gauge", (), "Its cap, index_max_bytes; 0 without one."),
    MetricInfo("kvatlas_index_blocks", "gauge", (), "Distinct (block, medium, group) that any worker holds."),
    MetricInfo(
        "kvatlas_index_refused_blocks_total",
        "counter",
        ("worker",),
        "Blocks not recorded for want of memory: the worker holds more than is claimed.",
    ),
    MetricInfo(
        "kvatlas_index_forgotten_blocks_total",
        "counter",
        ("worker",),
        "Blocks given up to stay below the cap, those longest without use first.",
    ),
    MetricInfo(
        "kvatlas_index_doubted_blocks",
        "gauge",
        ("worker",),
        "Blocks claimed before a loss of events and not confirmed since: half credit.",
    ),
    MetricInfo("kvatlas_index_reported_blocks", "gauge", ("worker",), "Blocks known from the engine's reports alone."),
    MetricInfo(
        "kvatlas_healed_blocks_total",
        "counter",
        ("worker", "how"),
        "What engines' reports of cached tokens did to the index: doubts confirmed or refuted, blocks adopted.",
    ),
    MetricInfo(
        "kvatlas_prediction_errors_total",
        "counter",
        ("worker", "direction", "cause"),
        "Promises that the engine's report did not bear out, over or under, by the likely cause.",
    ),
    MetricInfo(
        "kvatlas_overclaim_alarms_total",
        "counter",
        ("worker",),
        "Times that unexplained over-claims put all of a worker's claims in doubt. Should stay 0.",
    ),
    MetricInfo(
        "kvatlas_index_removal_age_blocks",
        "gauge",
        ("worker", "quantile"),
        "How old blocks are when the worker removes them: blocks stored or looked up by the whole fleet since their "
        "last use. Absent below 100 removals.",
    ),
    MetricInfo(
        "kvatlas_index_idle_removal_blocks",
        "gauge",
        ("worker", "quantile"),
        "How long blocks of this router's requests went without use when the worker removes them: blocks the worker "
        "stored or used since. Absent below 100 such removals.",
    ),
    MetricInfo(
        "kvatlas_index_timed_blocks", "gauge", ("worker",), "Blocks with a time of last use on the worker's own clock."
    ),
    MetricInfo("kvatlas_index_resident_blocks", "gauge", ("worker",), "Distinct (block, medium, group) held."),
    MetricInfo(
        "kvatlas_index_orphan_blocks", "gauge", ("worker",), "Blocks that wait for a parent nobody has announced."
    ),
    MetricInfo(
        "kvatlas_index_unkeyed_blocks",
        "gauge",
        ("worker",),
        "Resident blocks of unknown content: no promises while above 0.",
    ),
    MetricInfo(
        "kvatlas_index_unpaired_blocks_total",
        "counter",
        ("worker",),
        "Stored hashes whose content the event did not prove.",
    ),
    MetricInfo(
        "kvatlas_index_dropped_orphan_blocks_total", "counter", ("worker",), "Orphans given up because too many waited."
    ),
    MetricInfo(
        "kvatlas_index_unknown_removals_total",
        "counter",
        ("worker",),
        "Removals of blocks that were never announced: a sign of lost batches.",
    ),
    MetricInfo("kvatlas_events_batches_total", "counter", ("worker",), "Event batches applied."),
    MetricInfo("kvatlas_events_total", "counter", ("worker",), "Events applied."),
    MetricInfo(
        "kvatlas_events_malformed_total", "counter", ("worker", "what"), "Batches and events that could not be read."
    ),
    MetricInfo("kvatlas_events_unknown_total", "counter", ("worker",), "Events of kinds this release does not know."),
    MetricInfo("kvatlas_events_gaps_total", "counter", ("worker",), "Losses that replay could not mend."),
    MetricInfo("kvatlas_events_lives_total", "counter", ("worker",), "Publisher lives seen."),
    MetricInfo(
        "kvatlas_events_foreign_total",
        "counter",
        ("worker",),
        "Batches of another data-parallel rank: a wiring mistake.",
    ),
    MetricInfo("kvatlas_stream_replays_total", "counter", ("worker",), "Replays asked for."),
    MetricInfo(
        "kvatlas_stream_failed_replays_total", "counter", ("worker",), "Replays that were not answered in time."
    ),
    MetricInfo("kvatlas_stream_bad_messages_total", "counter", ("worker",), "ZMQ messages that are no event batch."),
    MetricInfo(
        "kvatlas_stream_overflowed_batches_total",
        "counter",
        ("worker",),
        "Batches dropped here because they came faster than they could be applied; asked for again.",
    ),
    MetricInfo("kvatlas_stream_connections_total", "counter", ("worker",), "Connections made to the event stream."),
    MetricInfo(
        "kvatlas_predictions_total",
        "counter",
        ("worker", "result"),
        "Promised against reported cached tokens: equal, over, under; unreported: the answer told no count.",
    ),
    MetricInfo(
        "kvatlas_parity_mismatches_total",
        "counter",
        ("worker",),
        "Answers whose usage.prompt_tokens is not our own count: another template or tokenizer than the engine's.",
    ),
    MetricInfo(
        "kvatlas_predicted_cached_tokens_total",
        "counter",
        ("worker",),
        "Cached tokens predicted, where the engine reported its own count.",
    ),
    MetricInfo(
        "kvatlas_reported_cached_tokens_total",
        "counter",
        ("worker",),
        "Cached tokens reported by engines for those requests.",
    ),
)
