"""The settings of `kvatlas serve`. Every field's comment is the text of the generated table in docs/config.md."""

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["NO_EVENTS", "ServeConfig", "WorkerConfig"]

NO_EVENTS = "none"
"""`events` of a worker whose events are not to be followed."""


def _doc(text: str) -> Meta:
    return Meta(description=text)


Port = Annotated[int, Meta(ge=0, le=65535)]
PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NotNegativeFloat = Annotated[float, Meta(ge=0)]


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: where it answers HTTP and where it publishes its KV events."""

    url: Annotated[str, _doc("Base URL of the engine, e.g. http://10.0.0.5:8000.")]
    events: Annotated[
        str | None,
        _doc(
            "ZMQ endpoint of its KV events, e.g. tcp://10.0.0.5:5557. When not given, the engine is asked for it; "
            "`none` follows no events, and the worker is routed by load only."
        ),
    ] = None
    replay: Annotated[
        str | None,
        _doc(
            "ZMQ endpoint that replays missed batches, e.g. tcp://10.0.0.5:5558. "
            "Without it the first gap leaves the worker `partial`."
        ),
    ] = None
    topic: Annotated[str, _doc("Prefix of the event topics to subscribe to; empty takes all.")] = ""
    rank: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        _doc(
            "Data-parallel rank, for a URL that serves several whose events cannot be found: give each rank as a "
            "worker of its own. Sent to the engine as X-data-parallel-rank."
        ),
    ] = None
    block_size: Annotated[
        PositiveInt | None, _doc("Tokens per KV block. Learnt from the engine's metrics or its events when not given.")
    ] = None
    copy_mode: Annotated[
        str,
        Meta(
            pattern="^(count|set)$",
            description="`count`: every repeated store is one more physical copy (vLLM). "
            "`set`: repeated stores are re-announcements.",
        ),
    ] = "count"
    models: Annotated[tuple[str, ...], _doc("Names of the models it serves. Asked from /v1/models when empty.")] = ()


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `kvatlas serve` can be told."""

    workers: Annotated[tuple[WorkerConfig, ...], _doc("The engines behind this gateway.")] = ()
    host: Annotated[str, _doc("Address the gateway listens on.")] = "0.0.0.0"  # noqa: S104 - a gateway is for others; the admin port is not
    port: Annotated[Port, _doc("Port of the OpenAI-compatible gateway; 0 takes a free one.")] = 8080
    admin_host: Annotated[
        str,
        _doc("Address of the admin app (metrics, workers, decisions). Keep it private: it has no authentication yet."),
    ] = "127.0.0.1"
    admin_port: Annotated[Port, _doc("Port of the admin app; 0 takes a free one.")] = 9090
    policy: Annotated[str, _doc("How a worker is picked: cost, round_robin, random, least_loaded, longest_prefix.")] = (
        "cost"
    )
    tokenizers: Annotated[
        dict[str, str],
        _doc(
            "Model name -> folder or hub name of its tokenizer; `*` stands for every other model. "
            "Prompts of models without one are tokenised by the engine's own /tokenize."
        ),
    ] = msgspec.field(default_factory=dict)
    seed: Annotated[int | None, _doc("Seed of random choices and of block keys; unset draws one at start.")] = None
    index_max_bytes: Annotated[
        Annotated[int, Meta(ge=1 << 20)] | None,
        _doc(
            "Most memory the index may take, at least 1 MiB; unset for no cap. "
            "Close to it the least valuable knowledge is given up: see docs/operations.md."
        ),
    ] = None
    snapshot_path: Annotated[
        str | None,
        _doc(
            "File that keeps the index over restarts: read at start, written at intervals and at shutdown. Unset keeps "
            "nothing. See docs/operations.md."
        ),
    ] = None
    snapshot_interval_s: Annotated[PositiveFloat, _doc("Pause between two writes of `snapshot_path`.")] = 60.0
    bootstrap_from: Annotated[
        Annotated[str, Meta(pattern="^https?://[^\\s/]+/?$")] | None,
        _doc(
            "Admin URL of a running gateway, e.g. http://10.0.0.7:9090, whose index to start from. Preferred to "
            "`snapshot_path`; a peer that does not answer is left aside."
        ),
    ] = None
    discover_events: Annotated[
        bool,
        _doc(
            "Ask engines given without `events` where their KV events are (vLLM /kv_event_sources, SGLang "
            "/server_info). One with several data-parallel ranks becomes a worker per rank."
        ),
    ] = True
    silent_stream_s: Annotated[
        PositiveFloat,
        _doc(
            "How long an event stream may bring nothing after its engine's own counters show that it had blocks to "
            "announce, before it is believed no more."
        ),
    ] = 5.0
    full_report_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description=(
                "Share of the requests to a worker whose cache is not wholly known that ask vLLM to announce again "
                "what they reuse (kv_cache_report_mode=full). Needs copy_mode = 'set' on every worker: a repeated "
                "store is no new copy then."
            ),
        ),
    ] = 0.0
    prefill_tokens_per_s: Annotated[
        PositiveFloat, _doc("First guess of an engine's prefill speed; measured times replace it.")
    ] = 8000.0
    decode_step_s: Annotated[PositiveFloat, _doc("First guess of one decode step's duration, in seconds.")] = 0.02
    health_interval_s: Annotated[PositiveFloat, _doc("Pause between two health checks of an engine.")] = 2.0
    health_timeout_s: Annotated[PositiveFloat, _doc("How long one health check may take.")] = 2.0
    health_failures: Annotated[PositiveInt, _doc("Failed checks in a row after which an engine gets no traffic.")] = 2
    max_body_bytes: Annotated[PositiveInt, _doc("Largest request body; a larger one is answered with 413.")] = (
        64 * 1024 * 1024
    )
    connect_timeout_s: Annotated[PositiveFloat, _doc("How long a connection to an engine may take.")] = 5.0
    first_byte_timeout_s: Annotated[PositiveFloat, _doc("How long an engine may take to its first response byte.")] = (
        600.0
    )
    idle_timeout_s: Annotated[PositiveFloat, _doc("How long a response may pause between two reads.")] = 600.0
    shutdown_delay_s: Annotated[
        NotNegativeFloat,
        _doc(
            "How long, after SIGTERM, new requests are still served while /readyz already answers 503, "
            "so that load balancers move away before the port closes."
        ),
    ] = 0.0
    drain_s: Annotated[
        PositiveFloat,
        _doc("How long running requests may take to end once the port is closed. A second SIGTERM ends the wait."),
    ] = 30.0
    forward_all_paths: Annotated[
        bool,
        _doc(
            "Forward every path. By default only what clients use is: see docs/operations.md. "
            "Engines' admin routes (/sleep, /reset_prefix_cache, LoRA loading) stay closed."
        ),
    ] = False
    decision_log_size: Annotated[PositiveInt, _doc("Decision records kept in memory.")] = 10_000
    render_timeout_s: Annotated[
        PositiveFloat,
        _doc(
            "How long tokenising (a large prompt, or the engine's /tokenize) may take "
            "before the request is routed without the index."
        ),
    ] = 2.0
