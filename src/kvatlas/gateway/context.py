"""What all connections of one gateway share."""

import asyncio
from dataclasses import dataclass

from kvatlas.clock import Clock
from kvatlas.gateway.failure_log import FailureLog
from kvatlas.gateway.heads import RequestIds
from kvatlas.gateway.planner import Planner
from kvatlas.gateway.stats import GatewayStats
from kvatlas.gateway.timers import TimerWheel
from kvatlas.gateway.upstream import UpstreamPool
from kvatlas.gateway.values import GatewayConfig

__all__ = ["GatewayContext"]


@dataclass(slots=True)
class GatewayContext:
    """Made once by the server, read by every connection and exchange. Only the last two change."""

    config: GatewayConfig
    planner: Planner
    clock: Clock
    stats: GatewayStats
    pool: UpstreamPool
    wheel: TimerWheel
    request_ids: RequestIds
    loop: asyncio.AbstractEventLoop
    failures: FailureLog
    leaving: bool = False
    """Set when the server will close soon: it serves as before, but says that it is not ready for more."""
    draining: bool = False
    """Set when the server closes: answers under way finish, and each says that it is its connection's last."""
