"""The workers behind a router: their event streams, health, load and how far each can be believed.

Here: what turns configuration into live workers and keeps their state fresh. Not here: choosing among them (routing)
and carrying requests (gateway).
"""

from kvatlas.fleet.audit import Cause, PredictionAudit, cause_of
from kvatlas.fleet.discovery import EventDiscovery, EventSources
from kvatlas.fleet.failures import describe_failure
from kvatlas.fleet.fleet import Fleet
from kvatlas.fleet.health import HealthMonitor
from kvatlas.fleet.load import LoadLedger, Ticket
from kvatlas.fleet.metrics_page import MetricsPage, parse_gauges
from kvatlas.fleet.recency import FleetRecency, RecencyWatch
from kvatlas.fleet.silence import Silence, SilenceTerm, SilenceWatch, TrafficCount
from kvatlas.fleet.snapshot_keeper import SnapshotKeeper, SnapshotStats, fleet_snapshot, new_file
from kvatlas.fleet.source import EventSource, SourceStats
from kvatlas.fleet.speed import FleetSpeed, PrefillSpeed
from kvatlas.fleet.survival import SurvivalCurve
from kvatlas.fleet.trust import Trust, TrustState
from kvatlas.fleet.warm_start import (
    SNAPSHOT_PATH,
    WarmStart,
    WorkerPast,
    check_blocks,
    fetch_snapshot,
    find_warm_start,
    read_snapshot_file,
)
from kvatlas.fleet.worker import EngineGauges, EventAddress, Worker, worker_id_of

__all__ = [
    "SNAPSHOT_PATH",
    "Cause",
    "EngineGauges",
    "EventAddress",
    "EventDiscovery",
    "EventSource",
    "EventSources",
    "Fleet",
    "FleetRecency",
    "FleetSpeed",
    "HealthMonitor",
    "LoadLedger",
    "MetricsPage",
    "PredictionAudit",
    "PrefillSpeed",
    "RecencyWatch",
    "Silence",
    "SilenceTerm",
    "SilenceWatch",
    "SnapshotKeeper",
    "SnapshotStats",
    "SourceStats",
    "SurvivalCurve",
    "Ticket",
    "TrafficCount",
    "Trust",
    "TrustState",
    "WarmStart",
    "Worker",
    "WorkerPast",
    "cause_of",
    "check_blocks",
    "describe_failure",
    "fetch_snapshot",
    "find_warm_start",
    "fleet_snapshot",
    "new_file",
    "parse_gauges",
    "read_snapshot_file",
    "worker_id_of",
]
