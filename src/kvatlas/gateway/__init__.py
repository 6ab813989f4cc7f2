"""The data path: an OpenAI-compatible HTTP front door that moves bytes between clients and engines.

What lives here: the client side, the upstream pool, one exchange per request, timers, counters. What must not: deciding
where a request goes. That is behind the `Planner` seam, so the data path knows no index, tokenizer or policy.
"""

from kvatlas.gateway.planner import FixedPlanner, Planner
from kvatlas.gateway.server import GatewayServer, event_loop_factory
from kvatlas.gateway.stats import GatewayStats, HistogramSnapshot, StatsSnapshot, WorkerSnapshot
from kvatlas.gateway.values import GatewayConfig, GatewayRequest, Outcome, OutcomeKind, Plan, Reply, Target, Timeouts

__all__ = [
    "FixedPlanner",
    "GatewayConfig",
    "GatewayRequest",
    "GatewayServer",
    "GatewayStats",
    "HistogramSnapshot",
    "Outcome",
    "OutcomeKind",
    "Plan",
    "Planner",
    "Reply",
    "StatsSnapshot",
    "Target",
    "Timeouts",
    "WorkerSnapshot",
    "event_loop_factory",
]
