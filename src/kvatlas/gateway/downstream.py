"""The client's side: reads requests off a connection, answers them one at a time and in order.

A request is read whole (its body decides where it goes), up to the configured limit. What may be pipelined behind it
waits in `_ready`; reading pauses when too much waits. Reading is otherwise never paused while an answer is under way,
because the end of the client's stream is how the gateway learns that nobody wants the answer any more: end of file then
counts as "client gone".
"""

import asyncio
import socket
import struct
from collections import deque
from typing import cast

import httptools
import msgspec

from kvatlas.errors import BadRequest, BodyTooLarge, KvAtlasError
from kvatlas.gateway.context import GatewayContext
from kvatlas.gateway.exchange import Exchange
from kvatlas.gateway.heads import METHODS, RequestHead, origin_form, read_request_head
from kvatlas.gateway.responses import CONTINUE, error_response, json_response
from kvatlas.gateway.timers import TICK_S, Timer
from kvatlas.gateway.values import GatewayRequest

__all__ = ["Downstream"]

_MAX_AHEAD_BYTES = 1024 * 1024
_LOCAL_PATHS = frozenset(("/health", "/readyz"))
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class _Ready(msgspec.Struct, frozen=True, gc=False):
    """A request read whole."""

    request: GatewayRequest
    head: RequestHead
    http_1_0: bool
    keep_alive: bool


class Downstream(asyncio.Protocol):
    """One client connection."""

    __slots__ = (
        "_ahead_bytes",
        "_body",
        "_body_bytes",
        "_closing",
        "_connections",
        "_context",
        "_continue_due",
        "_exchange",
        "_head",
        "_headers",
        "_http_1_0",
        "_keep_alive",
        "_message_bytes",
        "_parser",
        "_pumping",
        "_raw_left",
        "_reading",
        "_reading_paused",
        "_ready",
        "_refusal",
        "_target",
        "timer",
        "transport",
        "write_paused",
    )

    transport: asyncio.Transport

    def __init__(self, context: GatewayContext, connections: "set[Downstream]") -> None:
        self._context = context
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._exchange: Exchange | None = None
        self._ready: deque[_Ready] = deque()
        self._refusal: KvAtlasError | None = None
        self._ahead_bytes = 0
        self._closing = self._pumping = self._reading_paused = False
        self.write_paused = False
        self.timer = Timer(self._expire)
        self.on_message_begin()
        self._reading = False

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
        """Parse what came; start the next request when it is complete."""
        if self._refusal is not None or self._closing:
            return  # lingering: what a refused client still sends is thrown away
        if self._exchange is not None or self.write_paused:
            self._ahead_bytes += len(data)
            if self._ahead_bytes > _MAX_AHEAD_BYTES and not self._reading_paused:
                self._reading_paused = True
                self.transport.pause_reading()
        if self._reading:
            self._message_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._refuse(BadRequest(f"the bytes sent are not a valid HTTP/1.1 request: {error}"))
        if self._exchange is None:
            self._pump()

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
        self._ready.clear()
        exchange = self._exchange
        if exchange is not None:
            exchange.client_gone()

    # -- httptools callbacks: no exception may leave them --------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A new request head begins."""
        self._reading = True
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head: RequestHead | None = None
        self._body: list[bytes] = []
        self._body_bytes = self._message_bytes = self._raw_left = 0
        self._continue_due = self._http_1_0 = False
        self._keep_alive = True

    def on_url(self, fragment: bytes) -> None:
        """A piece of the request target."""
        self._target += fragment

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field; trailer fields of a chunked body are ignored."""
        if self._head is None:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Judge the head before any of the body is kept."""
        if self._refusal is not None:
            return
        try:
            self._head = self._read_head()
        except KvAtlasError as error:
            self._refuse(error)

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if self._refusal is not None:
            return
        self._body_bytes += len(data)
        if self._body_bytes > self._context.config.max_body_bytes:
            self._refuse(self._too_large(f"more than {self._body_bytes}"))
        else:
            self._body.append(data)

    def on_message_complete(self) -> None:
        """The request is whole: queue it."""
        if self._raw_left or self._refusal is not None or self._head is None:
            return
        self._reading = self._continue_due = False
        head, body = self._head, self._body
        request = GatewayRequest(
            head.request_id or self._context.request_ids.next(),
            self._parser.get_method().decode("ascii"),
            self._target,
            self._target.partition(b"?")[0].decode("ascii"),
            self._headers,
            body[0] if len(body) == 1 else b"".join(body),
        )
        self._ready.append(_Ready(request, head, self._http_1_0, self._keep_alive))

    # -- reading -------------------------------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        """Feed the parser, taking the body of a request with `Upgrade` past it.

        llhttp ends such a request at its head and calls the rest another protocol. The upgrade is not taken here, so by
        RFC 9110 7.8 the request counts as if it had not been asked for: its body is read by its length.
        """
        while data:
            if self._raw_left:
                piece, data = data[: self._raw_left], data[self._raw_left :]
                self._raw_left -= len(piece)
                self.on_body(piece)
                self.on_message_complete()
                continue
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                continue
            break
        if self._reading and self._message_bytes > self._byte_limit():
            self._refuse(
                self._too_large(f"{self._message_bytes} with its framing")
                if self._head
                else BadRequest("the request head is too large")
            )

    def _byte_limit(self) -> int:
        """Bytes one request may take on the wire: a head; or a body and as much chunk framing again."""
        config = self._context.config
        return config.max_head_bytes if self._head is None else 2 * config.max_body_bytes + config.max_head_bytes

    def _read_head(self) -> RequestHead:
        parser = self._parser
        version = parser.get_http_version()
        self._http_1_0 = version == "1.0"
        if version != "1.1" and not self._http_1_0:
            raise BadRequest(f"HTTP/{version} is not spoken here: use HTTP/1.1")
        method = parser.get_method().decode("ascii")
        if method not in METHODS:
            raise BadRequest(f"method {method} is not supported: expected one of {', '.join(sorted(METHODS))}")
        self._target = origin_form(self._target)
        head = read_request_head(self._headers, http_1_0=self._http_1_0)
        self._keep_alive = parser.should_keep_alive() and not self._http_1_0
        length = head.content_length or 0
        if length > self._context.config.max_body_bytes:
            raise self._too_large(str(length))
        if head.upgrade and parser.should_upgrade():
            if head.chunked:
                raise BadRequest("a chunked body beside `upgrade` cannot be read safely: leave one of them out")
            self._raw_left = length
        self._continue_due = head.expects_continue and not self._http_1_0
        return head

    def _too_large(self, given: str) -> BodyTooLarge:
        limit = self._context.config.max_body_bytes
        return BodyTooLarge(
            f"the request body is {given} bytes: at most {limit} are taken; send less or raise max_body_bytes"
        )

    def _refuse(self, error: KvAtlasError) -> None:
        if self._refusal is None:
            self._refusal = error
            self._reading = False
            self._body = []

    # -- answering -----------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start what can be started: the next whole request, then a due refusal or 100 Continue.

        An exchange that ends at once comes back here; the loop outside goes on then, so that a long row of pipelined
        requests is worked off without recursion.
        """
        if self._pumping:
            return
        self._pumping = True
        while self._ready and self._exchange is None and not self.write_paused and not self._closing:
            self._start(self._ready.popleft())
        self._pumping = False
        if self._exchange is not None or self.write_paused or self._closing:
            return
        if self._refusal is not None:
            self._answer_refusal(self._refusal)
            return
        limits = self._context.config.timeouts
        if self._continue_due:
            self._continue_due = False
            self.transport.write(CONTINUE)
        if not self._reading:
            if self._context.draining:
                self._close()
            else:
                self._arm(limits.keep_alive_s)
        elif self._head is not None or self._message_bytes == 0:
            self._arm(limits.request_read_s)  # a head has this long as a whole, a body between two reads
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resume_reading()
        self._ahead_bytes = 0

    def _start(self, ready: _Ready) -> None:
        request = ready.request
        if request.path in _LOCAL_PATHS:
            self._answer_locally(ready)
            return
        exchange = Exchange(
            self._context, self, request, ready.head, http_1_0=ready.http_1_0, close_after=not ready.keep_alive
        )
        self._exchange = exchange
        exchange.start()

    def _answer_locally(self, ready: _Ready) -> None:
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
            is_ready = not context.draining and context.planner.ready()
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
        else:
            if self._reading:
                self._arm(self._context.config.timeouts.request_read_s)
            self._pump()

    # -- closing -------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Close now when nothing is under way; otherwise after the answer in hand."""
        if self._exchange is None and not self._ready and not self._reading:
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
        elif self._reading and not self._closing:
            limit_s = self._context.config.timeouts.request_read_s
            self._refuse(BadRequest(f"the request was not complete after {limit_s} s: send it faster"))
            self._pump()
        else:
            self._closing = True
            self.transport.abort()
