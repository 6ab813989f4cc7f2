"""The client's side: reads requests off a connection, answers them one at a time and in order.

A request is read whole (its body decides where it goes), up to the configured limit. What may be pipelined behind it
waits in the reader; reading pauses when too much waits. Reading is otherwise never paused while an answer is under way,
because the end of the client's stream is how the gateway learns that nobody wants the answer any more: end of file then
counts as "client gone".
"""

import asyncio
import socket
import struct
from typing import cast

from kvatlas.errors import BadRequest, KvAtlasError
from kvatlas.gateway.context import GatewayContext
from kvatlas.gateway.exchange import Exchange
from kvatlas.gateway.reader import ReadyRequest, RequestReader
from kvatlas.gateway.responses import CONTINUE, error_response, json_response
from kvatlas.gateway.timers import TICK_S, Timer
from kvatlas.gateway.values import GatewayRequest

__all__ = ["Downstream"]

_MAX_AHEAD_BYTES = 1024 * 1024
_LOCAL_PATHS = frozenset(("/health", "/readyz"))
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Downstream(asyncio.Protocol):
    """One client connection."""

    __slots__ = (
        "_ahead_bytes",
        "_closing",
        "_connections",
        "_context",
        "_exchange",
        "_pumping",
        "_reader",
        "_reading_paused",
        "timer",
        "transport",
        "write_paused",
    )

    transport: asyncio.Transport

    def __init__(self, context: GatewayContext, connections: "set[Downstream]") -> None:
        config = context.config
        self._context = context
        self._connections = connections
        self._reader = RequestReader(
            context.request_ids, max_head_bytes=config.max_head_bytes, max_body_bytes=config.max_body_bytes
        )
        self._exchange: Exchange | None = None
        self._ahead_bytes = 0
        self._closing = self._pumping = self._reading_paused = False
        self.write_paused = False
        self.timer = Timer(self._expire)

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection and give it its idle deadline."""
        self.transport = cast("asyncio.Transport", transport)
        self._connections.add(self)
        stats = self._context.stats
        stats.connections += 1
        stats.connections_total += 1
        self._arm(self._context.config.timeouts.keep_alive_s)

    def data_received(self, data: bytes) -> None:
        """Read what came; start the next request when it is complete."""
        if self._closing:
            return  # lingering: what a refused client still sends is thrown away
        reader = self._reader
        if self._exchange is not None or self.write_paused:
            self._ahead_bytes += len(data)
            if self._ahead_bytes > _MAX_AHEAD_BYTES and not self._reading_paused:
                self._reading_paused = True
                self.transport.pause_reading()
            reader.feed(data)
            return
        reader.feed(data)
        if reader.ready or reader.refusal is not None:
            self._pump()
            return
        if reader.continue_due:
            reader.continue_due = False
            self.transport.write(CONTINUE)
        if reader.progress:
            reader.progress = False
            self._arm(self._context.config.timeouts.request_read_s)

    def eof_received(self) -> None:
        """End of file is the client leaving: returning None closes the transport."""

    def pause_writing(self) -> None:
        """The client is slower than the worker."""
        self.write_paused = True
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        """The client caught up."""
        self.write_paused = False
        if self._exchange is not None:
            self._exchange.resume()
        else:
            self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left: whatever was under way for it ends now."""
        self._closing = True
        self._connections.discard(self)
        self._context.stats.connections -= 1
        self._context.wheel.cancel(self.timer)
        exchange = self._exchange
        if exchange is not None:
            exchange.client_gone()

    # -- answering -----------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start what can be started: the next whole request, then a due refusal or 100 Continue.

        An exchange that ends at once comes back here; the loop outside goes on then, so that a long row of pipelined
        requests is worked off without recursion.
        """
        if self._pumping:
            return
        reader = self._reader
        self._pumping = True
        while reader.ready and self._exchange is None and not self.write_paused and not self._closing:
            self._start(reader.ready.popleft())
        self._pumping = False
        if self._exchange is not None or self.write_paused or self._closing:
            return
        if reader.refusal is not None:
            self._answer_refusal(reader.refusal)
        else:
            self._wait_for_request()

    def _wait_for_request(self) -> None:
        """Every whole request is answered."""
        reader, limits = self._reader, self._context.config.timeouts
        if reader.continue_due:
            reader.continue_due = False
            self.transport.write(CONTINUE)
        if reader.reading:
            self._arm(limits.request_read_s)
        elif self._context.draining:
            self._close()
        else:
            self._arm(limits.keep_alive_s)
        self._ahead_bytes = 0
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resume_reading()

    def _start(self, ready: ReadyRequest) -> None:
        request = ready.request
        if request.path in _LOCAL_PATHS:
            self._answer_locally(ready)
            return
        exchange = Exchange(self._context, self, request, ready.head, close_after=not ready.keep_alive)
        self._exchange = exchange
        exchange.start()

    def _answer_locally(self, ready: ReadyRequest) -> None:
        request, close = ready.request, not ready.keep_alive
        self._context.stats.local += 1
        status, body = (200, b'{"status":"ok"}') if request.path == "/health" else self._readiness()
        head_only = request.method == "HEAD"
        self.transport.write(json_response(status, body, request.request_id, close=close, head_only=head_only))
        if close:
            self._close()

    def _readiness(self) -> tuple[int, bytes]:
        context = self._context
        try:
            is_ready = not (context.leaving or context.draining) and context.planner.ready()
        except Exception:  # noqa: BLE001 - a planner that cannot tell is not ready
            is_ready = False
        return (200, b'{"status":"ready"}') if is_ready else (503, b'{"status":"not ready"}')

    def _answer_refusal(self, error: KvAtlasError) -> None:
        """Say why, then linger: closing on unread bytes would reset the connection and lose the answer."""
        self._context.stats.refused(error.code)
        self.transport.write(error_response(error, None, close=True))
        self._closing = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._arm(self._context.config.timeouts.linger_s)
        else:
            self.transport.close()

    # -- ExchangeClient ------------------------------------------------------------------------------------------------

    def answer_error(self, request: GatewayRequest, error: Exception, *, close: bool) -> None:
        """Write an error answer in the house's shape."""
        self._context.stats.refused(error.code if isinstance(error, KvAtlasError) else KvAtlasError.code)
        head_only = request.method == "HEAD"
        self.transport.write(error_response(error, request.request_id, close=close, head_only=head_only))

    def exchange_over(self, *, close: bool, cut: bool = False) -> None:
        """Go on with the next request, or close."""
        self._exchange = None
        if self._closing:
            return
        if cut:
            self._cut()
        elif close:
            self._close()
        elif self._reader.ready or self._reader.refusal is not None:
            self._pump()
        elif not self.write_paused:
            self._wait_for_request()

    # -- closing -------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Close now when nothing is under way; otherwise after the answer in hand."""
        if self._exchange is None and not self._reader.ready and not self._reader.reading:
            self._close()

    def shut_down(self) -> None:
        """Close now, whatever is under way."""
        if self._exchange is not None:
            self._exchange.shut_down()
        self._closing = True
        self.transport.abort()

    def _close(self) -> None:
        """Close after what was written has left; the idle deadline bounds that."""
        self._closing = True
        self._arm(self._context.config.timeouts.idle_s or self._context.config.timeouts.keep_alive_s)
        self.transport.close()

    def _cut(self) -> None:
        """Close so that the client notices the missing rest, even of an answer that ends with its connection."""
        self._closing = True
        if self.write_paused:
            self.transport.abort()
            return
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.close()

    def _arm(self, limit_s: float) -> None:
        wheel = self._context.wheel
        wheel.arm(self.timer, wheel.now_s + limit_s + TICK_S)

    def _expire(self) -> None:
        if self._exchange is not None:
            self._exchange.expire()
        elif self._reader.reading and not self._closing:
            limit_s = self._context.config.timeouts.request_read_s
            self._reader.refuse(BadRequest(f"the request was not complete after {limit_s} s: send it faster"))
            self._pump()
        else:
            self._closing = True
            self.transport.abort()
