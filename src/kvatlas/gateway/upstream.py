"""Connections to the workers: an idle pool per worker, and the protocol that carries one response at a time.

The response parser is used for one thing, to know where the head and the message end; bytes go on to the exchange in
the callback they arrive in. A connection that is not exactly at a message boundary is never pooled.
"""

import asyncio
from collections import deque
from typing import Protocol, cast
from urllib.parse import quote

import httptools

from kvatlas.gateway.timers import TimerWheel
from kvatlas.gateway.values import Target

__all__ = ["ResponseReceiver", "UpstreamConnection", "UpstreamPool", "WorkerSlot"]


_HEADER_SAFE = "!#$&'()*+,/:;=?@[]~"


class ResponseReceiver(Protocol):
    """What a connection tells the exchange it serves."""

    def on_head(self, status: int, data: bytes, head_end: int, *, keep_alive: bool, complete: bool) -> None:
        """The head is in: `data` is the head (`head_end` bytes) and what came of the body; `complete`: all of it."""
        ...

    def on_body(self, data: bytes) -> None:
        """More bytes of the body, chunk framing included."""
        ...

    def on_complete(self) -> None:
        """The response is complete and the connection is free again."""
        ...

    def on_broken(self, reason: str) -> None:
        """What arrived is not an HTTP response; the connection has been aborted."""
        ...

    def on_lost(self, connection: "UpstreamConnection", error: Exception | None) -> None:
        """The connection ended before the parser saw the end of the response."""
        ...


class WorkerSlot:
    """One worker's address in wire form and its unused connections, the last used on top."""

    __slots__ = ("announced", "idle", "max_idle", "open_connections", "target", "wheel", "where")

    def __init__(self, target: Target, max_idle: int, wheel: TimerWheel) -> None:
        self.target = target
        self.wheel = wheel
        host = f"[{target.host}]" if ":" in target.host else target.host
        self.where = (f"{host}:{target.port}", target.base_path)
        self.announced = f"x-kvatlas-worker: {quote(target.worker_id, safe=_HEADER_SAFE)}\r\n"
        self.idle: deque[UpstreamConnection] = deque()
        self.max_idle = max_idle
        self.open_connections = 0

    def take(self) -> "UpstreamConnection | None":
        """The most recently used idle connection, or None."""
        while self.idle:
            connection = self.idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None


class UpstreamPool:
    """All worker slots. Lives on one event loop."""

    __slots__ = ("_max_head_bytes", "_max_idle", "_slots", "_wheel")

    def __init__(self, wheel: TimerWheel, *, max_idle_per_worker: int, max_head_bytes: int) -> None:
        self._wheel = wheel
        self._max_idle = max_idle_per_worker
        self._max_head_bytes = max_head_bytes
        self._slots: dict[str, WorkerSlot] = {}

    def slot(self, target: Target) -> WorkerSlot:
        """The slot of a target. When its worker moved to another address, the old idle connections are closed."""
        found = self._slots.get(target.worker_id)
        if found is None or (found.target is not target and found.target != target):
            if found is not None:
                self._close_idle(found)
            found = self._slots[target.worker_id] = WorkerSlot(target, self._max_idle, self._wheel)
        return found

    async def connect(self, slot: WorkerSlot) -> "UpstreamConnection":
        """Open a new connection.

        Raises:
            OSError: refused, unreachable or unresolvable.
        """
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: UpstreamConnection(slot, self._max_head_bytes), slot.target.host, slot.target.port
        )
        return connection

    def close_expired(self, idle_s: float) -> None:
        """Close connections that nobody used for `idle_s`. Cost: O(workers)."""
        before_s = self._wheel.now_s - idle_s
        for slot in self._slots.values():
            while slot.idle and slot.idle[0].idle_since_s < before_s:
                slot.idle.popleft().transport.close()

    def forget(self, worker_id: str) -> None:
        """Close the idle connections of a worker that left the fleet; those in use end with their exchange."""
        slot = self._slots.pop(worker_id, None)
        if slot is not None:
            self._close_idle(slot)

    def close(self) -> None:
        """Close every idle connection."""
        for worker_id in list(self._slots):
            self.forget(worker_id)

    def open_connections(self) -> dict[str, tuple[int, int]]:
        """Per worker: open connections, and how many of them are idle."""
        return {worker_id: (slot.open_connections, len(slot.idle)) for worker_id, slot in self._slots.items()}

    @staticmethod
    def _close_idle(slot: WorkerSlot) -> None:
        slot.max_idle = 0
        while slot.idle:
            slot.idle.pop().transport.close()


class UpstreamConnection(asyncio.Protocol):
    """One connection to a worker, serving one exchange at a time."""

    __slots__ = (
        "_complete",
        "_excess",
        "_final_head",
        "_head",
        "_head_sent",
        "_interim",
        "_interims",
        "_keep_alive",
        "_max_head_bytes",
        "_parser",
        "_paused",
        "_receiver",
        "_slot",
        "_status",
        "_without_body",
        "got_bytes",
        "idle_since_s",
        "reused",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, slot: WorkerSlot, max_head_bytes: int) -> None:
        self._slot = slot
        self._max_head_bytes = max_head_bytes
        self._parser = httptools.HttpResponseParser(self)
        self._receiver: ResponseReceiver | None = None
        self._paused = False
        self.reused = False
        self.idle_since_s = 0.0
        self._head = b""
        self._interims = 0
        self._final_head = self._head_sent = self._interim = self._complete = self._excess = self._keep_alive = False
        self._without_body = self.got_bytes = False

    # -- used by the exchange ------------------------------------------------------------------------------------------

    def send(self, receiver: ResponseReceiver, head: bytes, body: bytes, *, without_body: bool) -> None:
        """Send a request; its response goes to `receiver`. `without_body` says it answers a HEAD.

        A small body goes out in one write with the head; a large one is handed over uncopied.
        """
        self._receiver = receiver
        self._without_body = without_body
        if len(body) < 65_536:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)

    def pause(self) -> None:
        """Stop reading: the client is slower than the worker."""
        self._paused = True
        self.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._paused:
            self._paused = False
            self.transport.resume_reading()

    def abort(self) -> None:
        """Cut the connection at once; the receiver hears nothing more. This is what makes an engine stop generating."""
        self._receiver = None
        self.transport.abort()

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)
        self._slot.open_connections += 1

    def data_received(self, data: bytes) -> None:
        """Pass bytes on. Cost: about 1 us beside the write."""
        receiver = self._receiver
        if receiver is None:  # bytes nobody asked for: the connection cannot be trusted with a request
            self.transport.abort()
            return
        self.got_bytes = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(receiver, f"sent what is not an HTTP response: {error}")
            return
        if self._excess:
            self._break(receiver, "sent more than one response to one request")
        elif self._head_sent:
            receiver.on_body(data)
            if self._complete:
                self._finish(receiver)
        else:
            self._collect_head(receiver, data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the exchange, or leave the pool."""
        self._slot.open_connections -= 1
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.on_lost(self, exc)
        elif self in self._slot.idle:
            self._slot.idle.remove(self)

    # -- httptools callbacks: flags only, an exception here would be swallowed into a parser error ---------------------

    def on_message_begin(self) -> None:
        """A second message after the final one is a fault."""
        self._excess = self._complete

    def on_headers_complete(self) -> None:
        """Remember whether this head is the final one."""
        parser = self._parser
        status = self._status = parser.get_status_code()
        if status < 200 and status != 101:
            self._interim = True
        else:
            self._final_head = True
            self._keep_alive = parser.should_keep_alive()

    def on_message_complete(self) -> None:
        """The end of an interim response, or of the response."""
        if self._interim:
            self._interim = False
            self._interims += 1
        else:
            self._complete = True

    # -- inside --------------------------------------------------------------------------------------------------------

    def _collect_head(self, receiver: ResponseReceiver, data: bytes) -> None:
        head = self._head + data if self._head else data
        if not self._final_head:
            if len(head) > self._max_head_bytes:
                self._break(receiver, f"sent a response head of more than {self._max_head_bytes} bytes")
            else:
                self._head = head
            return
        head_end = head.find(b"\r\n\r\n") + 4
        while self._interims:  # 100 Continue and early hints are for us, not for the client
            self._interims -= 1
            head = head[head_end:]
            head_end = head.find(b"\r\n\r\n") + 4
        self._head_sent = True
        if self._head:
            self._head = b""
        if self._without_body:  # the parser waits for the body a GET would have had
            self._complete, self._keep_alive = True, False
            head = head[:head_end]
        complete = self._complete
        receiver.on_head(self._status, head, head_end, keep_alive=self._keep_alive, complete=complete)
        if complete:
            self._finish(receiver)

    def _finish(self, receiver: ResponseReceiver) -> None:
        """Pool the connection before the exchange ends, so that the client's next request finds it."""
        self._receiver = None
        transport, slot = self.transport, self._slot
        if (
            self._keep_alive
            and len(slot.idle) < slot.max_idle
            and not transport.get_write_buffer_size()
            and not transport.is_closing()
        ):
            self._final_head = self._head_sent = self._complete = self.got_bytes = False
            if self._paused:
                self.resume()
            self.reused = True
            self.idle_since_s = slot.wheel.now_s
            slot.idle.append(self)
        else:
            transport.close()
        receiver.on_complete()

    def _break(self, receiver: ResponseReceiver, reason: str) -> None:
        self.abort()
        receiver.on_broken(reason)
