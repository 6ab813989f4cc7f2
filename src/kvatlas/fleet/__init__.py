"""The workers behind a router: their event streams, health, load and how far each can be believed.

Here: what turns configuration into live workers and keeps their state fresh. Not here: choosing among them (routing)
and carrying requests (gateway).
"""

from kvatlas.fleet.audit import Cause, PredictionAudit, cause_of
from kvatlas.fleet.discovery import EventDiscovery, EventSources
from kvatlas.fleet.failures import describe_failure
from kvatlas.fleet.fleet import Fleet
from kvatlas.fleet.health import HealthMonitor, parse_gauges
from kvatlas.fleet.load import LoadLedger, Ticket
from kvatlas.fleet.recency import FleetRecency, RecencyWatch, SurvivalCurve
from kvatlas.fleet.silence import Silence, SilenceWatch, TrafficCount
from kvatlas.fleet.source import EventSource, SourceStats
from kvatlas.fleet.speed import FleetSpeed, PrefillSpeed
from kvatlas.fleet.trust import Trust, TrustState
from kvatlas.fleet.worker import EngineGauges, EventAddress, Worker, worker_id_of

__all__ = [
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
    "PredictionAudit",
    "PrefillSpeed",
    "RecencyWatch",
    "Silence",
    "SilenceWatch",
    "SourceStats",
    "SurvivalCurve",
    "Ticket",
    "TrafficCount",
    "Trust",
    "TrustState",
    "Worker",
    "cause_of",
    "describe_failure",
    "parse_gauges",
    "worker_id_of",
]
