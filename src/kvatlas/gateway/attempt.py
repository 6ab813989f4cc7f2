"""The books of one attempt at one worker: what the planner is told and the counters say about it.

`Attempt` is made when an attempt begins and ended exactly once; the planner's `dispatched` and `finished` are called
from here and nowhere else, which is what keeps them paired. A planner that fails in its own bookkeeping costs nobody a
request.
"""

import logging

from kvatlas.gateway.context import GatewayContext
from kvatlas.gateway.usage import NO_USAGE, parse_usage
from kvatlas.gateway.values import GatewayRequest, Outcome, OutcomeKind, Plan, Target

__all__ = ["Attempt", "report_undispatched"]

_log = logging.getLogger(__name__)


class Attempt:
    """One attempt. Times are the gateway clock's seconds; `started_s` is when the request was complete."""

    __slots__ = (
        "_context",
        "_first_byte_s",
        "_plan",
        "_request",
        "_started_s",
        "_tail",
        "_worker",
        "response_bytes",
        "status",
        "target",
    )

    def __init__(
        self, context: GatewayContext, request: GatewayRequest, plan: Plan, target: Target, started_s: float
    ) -> None:
        """Begin: count the attempt as load at once, before any connection is made."""
        self._context = context
        self._request = request
        self._plan = plan
        self.target = target
        self._started_s = started_s
        self._first_byte_s: float | None = None
        self._tail: bytes | bytearray = b""
        self.response_bytes = 0
        self.status = 0
        worker = self._worker = context.stats.worker(target.worker_id)
        worker.dispatched += 1
        worker.in_flight += 1
        try:
            context.planner.dispatched(request, plan, target)
        except Exception:  # noqa: BLE001
            _note_planner_fault(context, request, "dispatched")

    def head_sent(self, status: int, out: bytes, *, with_body: bool) -> None:
        """The response head went out, `with_body` bytes behind it."""
        self.status = status
        self.response_bytes = len(out)
        self._tail = out
        if with_body:
            self._body_begins()

    def body_sent(self, data: bytes) -> None:
        """Body bytes went out: count them and keep the end of them, for `usage`. Cost: about 0.2 us."""
        if self._first_byte_s is None:
            self._body_begins()
        self.response_bytes += len(data)
        limit = self._context.config.usage_tail_bytes
        tail = self._tail
        if isinstance(tail, bytearray) and len(data) < limit:
            tail += data
            if len(tail) > 2 * limit:
                del tail[:-limit]
        else:
            self._tail = bytearray((tail[-limit:] + data)[-limit:])

    def end(self, kind: OutcomeKind, error_code: str | None = None) -> None:
        """End: tell the counters and the planner. The caller sees to it that this happens once."""
        context = self._context
        status = self.status
        duration_s = context.clock.monotonic_s() - self._started_s
        ttft_s = self._first_byte_s if self._plan.measures_ttft else None
        self._worker.ended(kind, status, duration_s, ttft_s, error_code)
        usage = parse_usage(self._tail) if kind == "ok" and status < 300 else NO_USAGE
        outcome = Outcome(
            kind,
            status,
            duration_s,
            self._first_byte_s,
            usage.cached_tokens,
            usage.prompt_tokens,
            usage.completion_tokens,
            len(self._request.body),
            self.response_bytes,
            error_code,
        )
        try:
            context.planner.finished(self._request, self._plan, self.target, outcome)
        except Exception:  # noqa: BLE001
            _note_planner_fault(context, self._request, "finished")

    def _body_begins(self) -> None:
        self._first_byte_s = self._context.clock.monotonic_s() - self._started_s
        try:
            self._context.planner.first_byte(self._request, self._plan, self.target)
        except Exception:  # noqa: BLE001
            _note_planner_fault(self._context, self._request, "first_byte")


def report_undispatched(
    context: GatewayContext, request: GatewayRequest, plan: Plan, kind: OutcomeKind, duration_s: float
) -> None:
    """Tell the planner that a plan it made was never dispatched."""
    try:
        context.planner.finished(request, plan, None, Outcome(kind, 0, duration_s, request_bytes=len(request.body)))
    except Exception:  # noqa: BLE001
        _note_planner_fault(context, request, "finished")


def _note_planner_fault(context: GatewayContext, request: GatewayRequest, where: str) -> None:
    context.stats.planner_faults += 1
    _log.exception("planner.%s failed for request %s", where, request.request_id)
