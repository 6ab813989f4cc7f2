"""One request from its last byte to the end of its answer: plan, dispatch, stream, finish.

Rules kept here:
* `planner.dispatched` and `planner.finished` are paired on every way out, and `_done` makes the end happen once.
* Another target is tried only before the first byte of an answer, only after a failed connect or a kept-alive
  connection that was already dead, and only once. After that byte a failure is passed on as a cut connection: the
  client must see the truncation.
* The client leaving aborts the upstream connection in the same callback.

The straight path (plan at once, pooled connection) makes no task and awaits nothing.
"""

import asyncio
import logging
from collections.abc import Awaitable
from math import inf
from typing import Protocol

from kvatlas.errors import (
    BadUpstreamResponseError,
    KvAtlasError,
    NoWorkerAvailable,
    UpstreamConnectError,
    UpstreamTimeoutError,
)
from kvatlas.fleet import describe_failure
from kvatlas.gateway.attempt import Attempt, report_undispatched
from kvatlas.gateway.context import GatewayContext
from kvatlas.gateway.heads import RequestHead, ends_with_connection, forward_head, insert_response_headers
from kvatlas.gateway.responses import json_response
from kvatlas.gateway.timers import TICK_S, Timer
from kvatlas.gateway.upstream import UpstreamConnection, WorkerSlot
from kvatlas.gateway.values import GatewayRequest, OutcomeKind, Plan, Reply, Target

__all__ = ["Exchange", "ExchangeClient"]

_log = logging.getLogger(__name__)
_MAX_ATTEMPTS = 2


class ExchangeClient(Protocol):
    """What an exchange needs of the client connection it answers."""

    transport: asyncio.Transport
    timer: Timer
    write_paused: bool

    def answer_error(self, request: GatewayRequest, error: Exception, *, close: bool) -> None:
        """Write an error answer in the house's shape; `close` says that no other answer follows it."""
        ...

    def exchange_over(self, *, close: bool, cut: bool = False) -> None:
        """The exchange is over. `close`: no other answer may follow; `cut`: the answer is incomplete, show it."""
        ...


class Exchange:
    """One request and its answer."""

    __slots__ = (
        "_attempt",
        "_attempts",
        "_client",
        "_close_after",
        "_connection",
        "_context",
        "_done",
        "_head",
        "_head_sent",
        "_plan",
        "_request",
        "_started_s",
        "_task",
        "_until_close",
    )

    def __init__(
        self,
        context: GatewayContext,
        client: ExchangeClient,
        request: GatewayRequest,
        head: RequestHead,
        *,
        close_after: bool,
    ) -> None:
        self._context = context
        self._client = client
        self._request = request
        self._head = head
        self._close_after = close_after
        self._plan: Plan | None = None
        self._attempt: Attempt | None = None
        self._attempts = 0
        self._connection: UpstreamConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._done = self._head_sent = self._until_close = False
        self._started_s = context.clock.monotonic_s()

    # -- plan ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Ask the planner and go. May finish before it returns."""
        context = self._context
        stats = context.stats
        stats.in_flight += 1
        stats.requests += 1
        stats.request_bytes += len(self._request.body)
        try:
            planned = context.planner.plan(self._request)
        except Exception as error:  # noqa: BLE001 - whatever a planner does, this connection lives on
            self._planner_failed(error)
            return
        if isinstance(planned, Plan):
            self._planned(planned)
        elif isinstance(planned, Reply):
            self._reply(planned)
        else:
            self._arm(context.config.timeouts.first_byte_s)
            self._task = context.loop.create_task(self._wait_for_plan(planned))

    async def _wait_for_plan(self, pending: Awaitable[Plan]) -> None:
        try:
            plan = await pending
        except Exception as error:  # noqa: BLE001 - as in start; a cancellation passes
            self._task = None
            self._planner_failed(error)
        else:
            self._task = None
            self._planned(plan)

    def _reply(self, reply: Reply) -> None:
        """The planner knows the answer itself."""
        close = self._close_after or self._context.draining
        head_only = self._request.method == "HEAD"
        answer = json_response(reply.status, reply.body, self._request.request_id, close=close, head_only=head_only)
        self._client.transport.write(answer)
        self._context.stats.local += 1
        self._finish(close=close)

    def _planner_failed(self, error: Exception) -> None:
        if self._done:
            return
        if not isinstance(error, KvAtlasError):
            self._context.stats.planner_faults += 1
            _log.error("planning request %s failed", self._request.request_id, exc_info=error)
        self._answer_error(error)

    def _planned(self, plan: Plan) -> None:
        if self._done:
            report_undispatched(self._context, self._request, plan, "client_abort", self._duration_s())
            return
        self._plan = plan
        if not plan.targets:
            report_undispatched(self._context, self._request, plan, "rejected", self._duration_s())
            self._answer_error(NoWorkerAvailable("no worker may take this request now; try again later"))
            return
        try:
            self._dispatch(plan, plan.targets[0], fresh=False)
        except Exception as error:  # noqa: BLE001 - a plan that cannot be carried out is a planner's fault like any other
            self._drop_upstream()
            self._end_attempt("rejected")
            self._planner_failed(error)

    # -- dispatch ------------------------------------------------------------------------------------------------------

    def _dispatch(self, plan: Plan, target: Target, *, fresh: bool) -> None:
        """Begin an attempt; `fresh` leaves pooled connections alone because one of them was just found dead."""
        context, request = self._context, self._request
        self._attempts += 1
        self._attempt = Attempt(context, request, plan, target, self._started_s)
        slot = context.pool.slot(target)
        body = request.body if plan.body is None else plan.body
        added = plan.headers + target.headers if target.headers else plan.headers
        head = forward_head(self._head, request.request_id, slot.where, added, body)
        connection = None if fresh else slot.take()
        if connection is not None:
            self._send(connection, head, body)
        else:
            self._arm(context.config.timeouts.connect_s)
            self._task = context.loop.create_task(self._connect(slot, head, body))

    async def _connect(self, slot: WorkerSlot, head: bytes, body: bytes) -> None:
        try:
            connection = await self._context.pool.connect(slot)
        except Exception as error:  # noqa: BLE001 - refused, unresolvable, unspeakable: all mean no connection
            self._task = None
            target = slot.target
            reason = (
                f"no connection to worker {target.worker_id} at {target.host}:{target.port}: {describe_failure(error)}"
            )
            self._connect_failed(UpstreamConnectError(reason))
            return
        self._task = None
        if self._done:
            connection.abort()
        else:
            self._send(connection, head, body)

    def _send(self, connection: UpstreamConnection, head: bytes, body: bytes) -> None:
        self._connection = connection
        self._arm(self._context.config.timeouts.first_byte_s)
        connection.send(self, head, body, without_body=self._request.method == "HEAD")
        if self._client.write_paused:
            connection.pause()

    def _connect_failed(self, error: KvAtlasError, *, stale: bool = False) -> None:
        """Before any answer: the next target, once; a plan's only target again if just its connection was stale."""
        plan = self._plan
        if self._done or plan is None:
            return
        self._connection = None
        alone = len(plan.targets) == 1
        if self._attempts < _MAX_ATTEMPTS and (stale or not alone):
            self._note_failure("connect_error", error)
            self._end_attempt("connect_error", error.code)
            self._context.stats.retries += 1
            self._dispatch(plan, plan.targets[0 if alone else 1], fresh=alone)
        else:
            self._upstream_failed("connect_error", error)

    # -- the upstream's answer (ResponseReceiver) ----------------------------------------------------------------------

    def on_head(self, status: int, data: bytes, head_end: int, *, keep_alive: bool, complete: bool) -> None:
        """Pass the head on, with our headers in it, and the body bytes that came with it, in one write."""
        attempt, plan = self._attempt, self._plan
        if attempt is None or plan is None:
            return
        self._head_sent = True
        context, target = self._context, attempt.target
        inserted = f"x-request-id: {self._request.request_id}\r\n{context.pool.slot(target).announced}"
        if plan.predicted_tokens is not None and target is plan.targets[0]:
            inserted = f"{inserted}x-kvatlas-predicted-tokens: {plan.predicted_tokens}\r\n"
        if not keep_alive:
            self._until_close = ends_with_connection(data[:head_end])
        if self._close_after or self._until_close or context.draining:
            self._close_after = True
            inserted += "connection: close\r\n"
        out = insert_response_headers(data, head_end, inserted.encode())
        self._client.transport.write(out)
        attempt.head_sent(status, out, with_body=len(data) > head_end)
        if not complete:
            self._arm(context.config.timeouts.idle_s)

    def on_body(self, data: bytes) -> None:
        """Pass body bytes on as they are. Cost: about 1 us beside the write."""
        self._client.transport.write(data)
        if self._attempt is not None:
            self._attempt.body_sent(data)
        self._arm(self._context.config.timeouts.idle_s)

    def on_complete(self) -> None:
        """The answer went through whole."""
        self._connection = None
        self._end_attempt("ok")
        self._finish(close=self._close_after)

    def on_broken(self, reason: str) -> None:
        """The upstream broke HTTP."""
        self._upstream_failed("upstream_error", BadUpstreamResponseError(f"worker {self._worker_id()} {reason}"))

    def on_lost(self, connection: UpstreamConnection, error: Exception | None) -> None:
        """The upstream connection ended early, unless its end was the end of the answer."""
        worker_id = self._worker_id()
        if self._head_sent and self._until_close and error is None:
            self.on_complete()
        elif connection.reused and not connection.got_bytes:
            reason = f"a kept connection to worker {worker_id} was closed before any byte of an answer"
            self._connect_failed(UpstreamConnectError(reason), stale=True)
        else:
            how_far = "before its answer was complete" if connection.got_bytes else "without an answer"
            reason = f"worker {worker_id} closed the connection {how_far}" + (f": {error}" if error else "")
            self._upstream_failed("upstream_error", BadUpstreamResponseError(reason))

    # -- other ways out ------------------------------------------------------------------------------------------------

    def client_gone(self) -> None:
        """The client closed its connection, or stopped reading for too long: cut the upstream's at once."""
        if not self._done:
            self._context.stats.client_aborts += 1
            self._abandon("client_abort")

    def shut_down(self) -> None:
        """The gateway closes before the answer is complete."""
        if not self._done:
            self._abandon("shutdown")

    def expire(self) -> None:
        """The deadline passed: which one, the state says."""
        limits, worker_id = self._context.config.timeouts, self._worker_id()
        if self._client.write_paused and self._head_sent:
            self.client_gone()
        elif limits.total_s is not None and self._duration_s() >= limits.total_s:
            self._timed_out(f"worker {worker_id} did not finish its answer in {limits.total_s} s")
        elif self._attempt is None:
            self._timed_out(f"no worker was chosen in {limits.first_byte_s} s")
        elif self._connection is None:
            self._drop_upstream()
            target = self._attempt.target
            reason = f"no connection to worker {worker_id} at {target.host}:{target.port} in {limits.connect_s} s"
            self._connect_failed(UpstreamConnectError(reason))
        elif not self._head_sent:
            self._timed_out(f"worker {worker_id} sent no answer in {limits.first_byte_s} s")
        else:
            self._timed_out(f"worker {worker_id} paused for more than {limits.idle_s} s within its answer")

    def pause(self) -> None:
        """The client's connection is full: stop reading the upstream."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """The client reads again."""
        if self._connection is not None:
            self._connection.resume()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _worker_id(self) -> str:
        return self._attempt.target.worker_id if self._attempt is not None else ""

    def _duration_s(self) -> float:
        return self._context.clock.monotonic_s() - self._started_s

    def _arm(self, limit_s: float | None) -> None:
        """Set the one deadline: `limit_s` from now, or the total limit when that is nearer.

        The wheel's time may be a tick old, hence the extra tick: late by up to 0.3 s, never early.
        """
        context = self._context
        wheel = context.wheel
        deadline_s = wheel.now_s + limit_s + TICK_S if limit_s is not None else inf
        total_s = context.config.timeouts.total_s
        if total_s is not None:
            deadline_s = min(deadline_s, self._started_s + total_s)
        wheel.arm(self._client.timer, deadline_s)

    def _timed_out(self, reason: str) -> None:
        self._upstream_failed("timeout", UpstreamTimeoutError(reason))

    def _upstream_failed(self, kind: OutcomeKind, error: KvAtlasError) -> None:
        """Answer with an error while that is still possible, else cut the client's connection."""
        if self._done:
            return
        worker_id = self._worker_id()
        self._drop_upstream()
        self._note_failure(kind, error)
        self._end_attempt(kind, error.code)
        if self._head_sent:
            self._finish(close=True, cut=True)
        else:
            self._answer_error(error, worker_id)

    def _note_failure(self, kind: OutcomeKind, error: KvAtlasError) -> None:
        if self._attempt is not None:
            self._context.failures.attempt_failed(
                self._request.request_id, self._worker_id(), kind, error, head_sent=self._head_sent
            )

    def _abandon(self, kind: OutcomeKind) -> None:
        self._drop_upstream()
        self._end_attempt(kind)
        self._finish(close=True, cut=True)

    def _answer_error(self, error: Exception, worker_id: str | None = None) -> None:
        close = self._close_after or self._context.draining
        self._context.failures.answered(self._request.request_id, worker_id, error)
        self._client.answer_error(self._request, error, close=close)
        self._finish(close=close)

    def _drop_upstream(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def _end_attempt(self, kind: OutcomeKind, error_code: str | None = None) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            self._context.stats.response_bytes += attempt.response_bytes
            attempt.end(kind, error_code)

    def _finish(self, *, close: bool, cut: bool = False) -> None:
        if not self._done:
            self._done = True
            self._context.stats.in_flight -= 1
            self._client.exchange_over(close=close, cut=cut)
