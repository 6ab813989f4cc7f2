"""Routes by which faults of a running engine are given and taken back. No real engine has them."""

from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web

from kvatlas.errors import BadRequest, ConfigError
from kvatlas.simulator.api_errors import engine_error, json_response
from kvatlas.simulator.fault_gate import FaultState
from kvatlas.simulator.fault_kinds import Fault
from kvatlas.simulator.fault_plan import FaultPlan, PlacedFault
from kvatlas.simulator.fault_specs import fault_from_json
from kvatlas.simulator.faulty_stream import FaultyStream

__all__ = ["FAULT_PATH", "fault_routes"]

FAULT_PATH = "/sim/faults"
"""Answers whatever the engine suffers, as long as its port is open."""


class _ShownFault(msgspec.Struct):
    id: int
    spec: str
    state: FaultState
    hits: int


class _ShownStream(msgspec.Struct):
    life: int
    boot_id: int
    next_seq: int
    is_up: bool


class _Shown(msgspec.Struct):
    engine: int
    batches: int
    streams: list[_ShownStream]
    faults: list[_ShownFault]


def fault_routes(
    plan: FaultPlan, streams: Sequence[FaultyStream], notice_change: Callable[[], None]
) -> list[web.RouteDef]:
    """The routes.

    Args:
        plan: the engine's.
        streams: by rank, to be shown.
        notice_change: called after every change.
    """
    api = _FaultApi(plan, streams, notice_change)
    return [
        web.get(FAULT_PATH, api.show),
        web.post(FAULT_PATH, api.add),
        web.delete(FAULT_PATH, api.clear),
        web.delete(FAULT_PATH + r"/{id:\d+}", api.remove),
    ]


class _FaultApi:
    def __init__(self, plan: FaultPlan, streams: Sequence[FaultyStream], notice_change: Callable[[], None]) -> None:
        self._plan = plan
        self._streams = streams
        self._notice_change = notice_change

    async def show(self, _request: web.Request) -> web.Response:
        """All faults given, and how the streams stand."""
        streams = [_ShownStream(s.life, s.boot_id, s.next_seq, s.is_up) for s in self._streams]
        faults = [self._shown(placed) for placed in self._plan.placed]
        return json_response(_Shown(self._plan.engine, self._plan.num_batches, streams, faults))

    async def add(self, request: web.Request) -> web.Response:
        """Give one; its times count from now."""
        try:
            fault = fault_from_json(await request.read())
            self._check(fault)
        except (BadRequest, ConfigError) as error:
            return engine_error(error)
        placed = self._plan.add(fault)
        self._notice_change()
        return json_response(self._shown(placed))

    def _check(self, fault: Fault) -> None:
        if fault.engine not in (None, self._plan.engine):
            raise BadRequest(f"this is engine {self._plan.engine}, the fault is of engine {fault.engine}")
        rank = getattr(fault, "rank", None) or 0
        if self._streams and rank >= len(self._streams):
            raise BadRequest(f"there is no rank {rank}: ranks are 0 to {len(self._streams) - 1}")

    async def clear(self, _request: web.Request) -> web.Response:
        """Take all back."""
        count = self._plan.clear()
        self._notice_change()
        return json_response({"removed": count})

    async def remove(self, request: web.Request) -> web.Response:
        """Take one back."""
        if not self._plan.remove(int(request.match_info["id"])):
            raise web.HTTPNotFound
        self._notice_change()
        return json_response({"removed": 1})

    def _shown(self, placed: PlacedFault) -> _ShownFault:
        return _ShownFault(placed.fault_id, placed.spec, placed.gate.state(self._plan.now_s()), placed.hits)
