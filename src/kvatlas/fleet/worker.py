"""A worker: one data-parallel rank of one addressable engine, and all that is known of it."""

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvatlas.config import WorkerConfig
from kvatlas.fleet.audit import PredictionAudit
from kvatlas.fleet.load import LoadLedger
from kvatlas.fleet.recency import RecencyWatch
from kvatlas.fleet.silence import TrafficCount
from kvatlas.fleet.source import EventSource
from kvatlas.fleet.trust import TrustState
from kvatlas.stream import StreamCounters

__all__ = ["EngineGauges", "EventAddress", "Worker", "split_url", "worker_id_of"]


@dataclass(frozen=True, slots=True)
class EventAddress:
    """Where a worker's KV events come from: ZMQ endpoints as we connect to them. `replay` None: there is no replay."""

    events: str
    replay: str | None = None


@dataclass(slots=True)
class EngineGauges:
    """The newest scrape of an engine's own metrics."""

    running_requests: int = 0
    waiting_requests: int = 0
    kv_usage: float = 0.0
    num_blocks: int | None = None
    started_s: float | None = None
    """Unix time at which the process behind the page started: another value is another engine."""
    traffic: TrafficCount | None = None
    """What must show in the event stream; None when the page does not tell, or the engine caches no prefixes."""


@dataclass(slots=True)
class Worker:
    """Mutable state of one worker; owned by the fleet, read by routing and the admin app."""

    worker_id: str
    config: WorkerConfig
    host: str
    port: int
    base_path: str
    load: LoadLedger
    trust: TrustState
    source: EventSource | None = None
    """What its event stream feeds; None while it has none."""
    events_at: EventAddress | None = None
    """The stream that is followed, configured or found."""
    models: tuple[str, ...] = ()
    model_cards: dict[str, bytes] = field(default_factory=dict)
    """Its entries of /v1/models by name, JSON as it gave them."""
    stream: StreamCounters | None = None
    """What its subscriber counts."""
    adapters: frozenset[str] = frozenset()
    """Those of its models that are LoRA adapters: their name is part of what their blocks contain."""
    foreign_running: int = 0
    """Running requests that this router did not send, as far as scrapes can tell."""
    foreign_waiting: int = 0
    silent_reason: str | None = None
    """Why its event stream is judged silent while it works: it is left out where enough others are not; None if not."""
    healthy: bool = False
    health_reason: str = "not checked yet"
    failed_checks: int = 0
    """Checks that failed since one passed."""
    healthy_since_s: float | None = None
    """Unix time since when it has been healthy without a break; None while it is not."""
    gauges: EngineGauges = field(default_factory=EngineGauges)
    audit: PredictionAudit = field(default_factory=PredictionAudit)
    recency: RecencyWatch | None = None
    """How old its blocks get; None where nobody asks."""

    @property
    def base_url(self) -> str:
        """Where its HTTP paths begin, without a slash at the end."""
        return self.config.url.rstrip("/")

    def serves(self, model: str | None) -> bool:
        """Whether a request for `model` may go here. A worker whose models are unknown takes anything."""
        return model is None or not self.models or model in self.models


def worker_id_of(config: WorkerConfig) -> str:
    """`host:port`, with the path if there is one, and `#rank` if a rank is configured."""
    host, port, path = split_url(config.url)
    rank = "" if config.rank is None else f"#{config.rank}"
    return f"{host}:{port}{path}{rank}"


def split_url(url: str) -> tuple[str, int, str]:
    """(host, port, path without a slash at the end) of an http URL; the port defaults to 80."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    shown = f"[{host}]" if ":" in host else host
    return shown, parts.port or 80, parts.path.rstrip("/")
