"""Starts and stops the data path on the running event loop."""

import asyncio
import logging
from collections.abc import Callable

from kvatlas.clock import Clock
from kvatlas.gateway.context import GatewayContext
from kvatlas.gateway.downstream import Downstream
from kvatlas.gateway.failure_log import FailureLog
from kvatlas.gateway.heads import RequestIds
from kvatlas.gateway.planner import Planner
from kvatlas.gateway.stats import GatewayStats
from kvatlas.gateway.timers import TICK_S, TimerWheel
from kvatlas.gateway.upstream import UpstreamPool
from kvatlas.gateway.values import GatewayConfig

__all__ = ["GatewayServer", "event_loop_factory"]

_log = logging.getLogger(__name__)
_TICKS_PER_SWEEP = 10


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """What to give `asyncio.Runner(loop_factory=...)`: uvloop where it is installed, else asyncio's own loop."""
    try:
        import uvloop  # noqa: PLC0415 - optional: the gateway works without it, 10-20 % slower
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class GatewayServer:
    """The gateway's data path: one listening port, one planner.

    Guarantee: one bad request never costs another request its connection, and one dead engine never the gateway.
    """

    def __init__(self, config: GatewayConfig, planner: Planner, clock: Clock) -> None:
        self._config = config
        self._planner = planner
        self._clock = clock
        self._connections: set[Downstream] = set()
        self._context: GatewayContext | None = None
        self._server: asyncio.Server | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._ticks = 0
        self._hurry = False
        self.stats = GatewayStats()

    async def start(self) -> int:
        """Listen; the port is returned (the real one when the configuration says 0).

        Raises:
            OSError: the address cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        config = self._config
        wheel = TimerWheel(self._clock)
        pool = UpstreamPool(wheel, max_idle_per_worker=config.max_idle_per_worker, max_head_bytes=config.max_head_bytes)
        context = GatewayContext(
            config, self._planner, self._clock, self.stats, pool, wheel, RequestIds(), loop, FailureLog(self._clock)
        )
        self._context = context
        self._server = await loop.create_server(
            lambda: Downstream(context, self._connections),
            config.host,
            config.port,
            backlog=config.backlog,
            reuse_port=config.reuse_port or None,
        )
        self._ticker = loop.call_later(TICK_S, self._tick, context)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def withdraw(self) -> None:
        """Answer 503 on `/readyz` from now on and serve as before, until `close`: load balancers move away first."""
        if self._context is not None:
            self._context.leaving = True

    def hurry(self) -> None:
        """End the drain of `close` at once, whether it runs already or is still to come."""
        self._hurry = True

    async def close(self, drain_s: float = 30.0) -> None:
        """Stop accepting, give answers under way up to `drain_s` seconds, then cut the rest. May be called twice."""
        if self._server is None or self._context is None:
            return
        server, self._server = self._server, None
        context = self._context
        context.draining = True
        server.close()
        _log.info("shutting down: the port is closed, %d requests in flight get %g s", self.stats.in_flight, drain_s)
        for connection in list(self._connections):
            connection.drain()
        deadline_s = self._clock.monotonic_s() + drain_s
        while self._connections and not self._hurry and self._clock.monotonic_s() < deadline_s:  # noqa: ASYNC110 - no event per connection on the hot path
            await asyncio.sleep(0.02)
        cut = self.stats.in_flight
        for connection in list(self._connections):
            connection.shut_down()
        context.failures.flush(final=True)
        _log.log(logging.WARNING if cut else logging.INFO, "drain over: %d requests in flight were cut", cut)
        context.pool.close()
        if self._ticker is not None:
            self._ticker.cancel()
        await asyncio.sleep(0)  # let the transports report their end

    def forget_worker(self, worker_id: str) -> None:
        """Close the idle connections of a worker that left the fleet and drop its counters."""
        if self._context is not None:
            self._context.pool.forget(worker_id)
        self.stats.workers.pop(worker_id, None)

    def upstream_connections(self) -> dict[str, tuple[int, int]]:
        """Per worker: open upstream connections, and how many of them are idle."""
        return self._context.pool.open_connections() if self._context is not None else {}

    def _tick(self, context: GatewayContext) -> None:
        self._ticker = context.loop.call_later(TICK_S, self._tick, context)
        self._ticks += 1
        try:
            context.wheel.advance()
            if self._ticks % _TICKS_PER_SWEEP == 0:
                context.pool.close_expired(context.config.timeouts.upstream_idle_s)
                context.failures.flush()
        except Exception:  # noqa: BLE001 - the clock of every connection must not stop
            _log.exception("a timer failed; the others go on")
