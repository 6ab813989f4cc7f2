"""Carries a plan's faults out on a running engine: ends its lives, lets it hang, breaks its answers."""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from kvatlas.clock import Clock
from kvatlas.simulator.api_errors import http_error
from kvatlas.simulator.engine_life import reset_connection
from kvatlas.simulator.fault_api import FAULT_PATH, fault_routes
from kvatlas.simulator.fault_kinds import Crash, Restart
from kvatlas.simulator.fault_plan import FaultPlan
from kvatlas.simulator.faulty_stream import FaultyStream
from kvatlas.stream import ZmqEventPublisher

__all__ = ["EngineClock", "FaultSupervisor"]

_BATCH_POLL_S = 0.01
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineClock:
    """A clock whose wall time jumps as the plan wants it."""

    def __init__(self, clock: Clock, plan: FaultPlan) -> None:
        self._clock = clock
        self._plan = plan

    def monotonic_s(self) -> float:
        """That of the clock inside."""
        return self._clock.monotonic_s()

    def wall_s(self) -> float:
        """That of the plan."""
        return self._plan.wall_s()


class FaultSupervisor:
    """Watches a plan in real time.

    Args:
        plan: what shall go wrong.
        streams: the outlets of `publishers`, aligned.
        publishers: one for each rank that has an event stream.
        end_life: ends the engine's life and begins another, down time and slow start included.
    """

    def __init__(
        self,
        plan: FaultPlan,
        streams: Sequence[FaultyStream],
        publishers: Sequence[ZmqEventPublisher],
        end_life: Callable[[Restart | Crash], Awaitable[None]],
    ) -> None:
        self.plan = plan
        self.streams = streams
        self._publishers = publishers
        self._end_life = end_life
        self._changed = asyncio.Event()
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._crash: Crash | None = None
        self.unhealthy_until_s = 0.0
        """Monotonic time until which every answer is 503."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._changed.clear()
            self._show_hang()
            crash, self._crash = self._crash, None
            for fault in (*([crash] if crash is not None else []), *self.plan.take_due()):
                await self._end_life(fault)
            waits = [self.plan.next_due_s(), _BATCH_POLL_S if self.plan.awaits_batch() else None]
            wait_s = min((wait_s for wait_s in waits if wait_s is not None), default=None)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)

    def _show_hang(self) -> None:
        if self.plan.is_hung():
            self._goes_on.clear()
        else:
            self._goes_on.set()

    def notice_change(self) -> None:
        """The plan gained or lost faults: let everybody look at it."""
        self._changed.set()
        self._show_hang()
        for stream, publisher in zip(self.streams, self._publishers, strict=True):
            publisher.at_outlet(stream.due)

    def restart_streams(self, fault: Restart | Crash) -> None:
        """The engine's life has ended: what is published from now on is of another."""
        for stream, publisher in zip(self.streams, self._publishers, strict=True):
            publisher.at_outlet(functools.partial(stream.restart, fault))

    async def sleep(self, seconds: float) -> None:
        """Sleep, and longer while the engine hangs."""
        await asyncio.sleep(seconds)
        await self._goes_on.wait()

    def on_piece(self, request: web.Request, pieces: int) -> None:
        """A streamed answer has sent its `pieces`-th piece: break its connection if that is its fate."""
        fault = self.plan.on_piece(pieces)
        if fault is None or request.transport is None:
            return
        # Not at once: what was written goes out at the end of this turn of the loop.
        asyncio.get_running_loop().call_soon(reset_connection, request.transport)
        if isinstance(fault, Crash):
            self._crash = fault
            self._changed.set()

    def watch(self, app: web.Application) -> None:
        """Put the faults of HTTP before every route, and the routes that change faults beside them."""

        @web.middleware
        async def suffer(request: web.Request, handler: _Handler) -> web.StreamResponse:
            if not request.path.startswith(FAULT_PATH):
                if not self._goes_on.is_set():
                    await self._goes_on.wait()
                if self.plan.now_s() < self.unhealthy_until_s:
                    return http_error(503)
            return await handler(request)

        app.middlewares.insert(0, suffer)
        app.add_routes(fault_routes(self.plan, self.streams, self.notice_change))
