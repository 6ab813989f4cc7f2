"""A publisher's live stream over TCP, read on the event loop itself.

libzmq has a thread read every socket in pieces of 8 KiB, wake at each of them and hand messages over one by one, which
costs as much as all the rest of a batch. A SUB socket without security needs little of it: here bytes are read from the
socket when they are wanted, as many as have come, and scanned for batches natively.
"""

import asyncio
import os
import re
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvatlas._native import Run, scan_zmtp
from kvatlas.errors import StreamPeerError
from kvatlas.stream.endpoints import LAST_PORT
from kvatlas.stream.link import LinkEvent
from kvatlas.stream.spread import Spread
from kvatlas.stream.subscriber_config import SubscriberConfig
from kvatlas.stream.zmtp import SubscriberHandshake, answer_to, error_in, ping

__all__ = ["TcpLink", "tcp_address"]

_ENDPOINT = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:;/\[\]*]+)):([1-9][0-9]{0,4})")
_SCRATCH_BYTES = 256 * 1024
_SMALL_FRAME_BYTES = 64 * 1024  # the begun part of a larger one stays where it is and is not copied at each read


def tcp_address(endpoint: str) -> tuple[str, int] | None:
    """Host and port of `tcp://HOST:PORT`; None for any other endpoint."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or int(match[3]) > LAST_PORT:
        return None
    return match[1] or match[2], int(match[3])


class _Scratch(threading.local):
    """Memory that every link of a thread reads into in turn; nothing stays in it between two reads."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(_SCRATCH_BYTES))


_scratch = _Scratch()


class TcpLink:
    """A `LiveLink` that speaks ZMTP 3 as a SUB socket without security.

    Args:
        address: host and port.
        config: the topic, patience and bounds; its endpoint is for messages.
        spread: stretches the pauses between attempts to connect.
    """

    def __init__(self, address: tuple[str, int], config: SubscriberConfig, spread: Spread) -> None:
        self._address = address
        self._config = config
        self._spread = spread
        self._socket: socket.socket | None = None
        self._is_watched = True
        self._events: list[LinkEvent] = []
        self._begun = bytearray()  # of the frame that is not whole yet; a large one has room behind it
        self._filled = 0  # how much of that has come
        self._wanted = 0  # how many bytes it takes; 0 before anything of a connection is scanned
        self._pending: int | None = None  # of the message that is not whole yet, as `scan_zmtp` has it
        self._heard_s = 0.0
        self._beat: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self.bad_messages = 0
        self.is_drained = False

    def open(self, wake: Callable[[], None]) -> None:
        """Start to connect."""
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._lost = asyncio.Event()
        self._task = self._loop.create_task(self._stay_connected())

    def watch(self) -> None:
        """Tell of data as it comes."""
        self._is_watched = True
        if self._socket is not None:
            self._loop.add_reader(self._socket.fileno(), self._wake)

    def unwatch(self) -> None:
        """Do not tell of data."""
        self._is_watched = False
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())

    def take_events(self) -> list[LinkEvent]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Give all up. Idempotent."""
        if self._task is not None:
            self._task.cancel()
        self._drop_socket()
        self._events.clear()

    # -- reading --

    def receive_runs(self) -> list[Run]:
        """Some of the batches that wait. One read of up to 256 KiB; natively 0.3 us a batch, where many have come."""
        live, begun = self._socket, self._begun
        self.is_drained = True
        if live is None:
            return []
        if self._wanted > _SMALL_FRAME_BYTES:
            return self._receive_large(live)
        view = _scratch.view
        view[: len(begun)] = begun
        room = view[len(begun) :]
        received = self._receive_into(live, room)
        self.is_drained = received < len(room)
        if not received and self._wanted:
            return []
        return self._scan(view, len(begun) + received)

    def _receive_large(self, live: socket.socket) -> list[Run]:
        """Read on a frame that has memory of its own, which doubles when what really came has filled it."""
        begun = self._begun
        if self._filled == len(begun):
            begun.extend(bytes(min(self._wanted - len(begun), max(len(begun), _SCRATCH_BYTES))))
        with memoryview(begun) as view, view[self._filled :] as room:
            received = self._receive_into(live, room)
            self.is_drained = received < len(room)
            self._filled += received
            return self._scan(view, self._filled) if self._filled == self._wanted else []

    def _receive_into(self, live: socket.socket, room: memoryview) -> int:
        try:
            received = live.recv_into(room)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self._lose(f"broke: {_reason(error)}")
            return 0
        if received:
            self._heard_s = self._loop.time()
        else:
            self._lose("was closed by the other side")
        return received

    def _scan(self, view: memoryview, count: int) -> list[Run]:
        if not count:
            return []
        most = self._config.max_message_bytes
        runs, bad, commands, consumed, wanted, self._pending = scan_zmtp(view, count, self._pending, most)
        self._begun = bytearray(view[consumed:count])
        self._filled, self._wanted = count - consumed, wanted
        self.bad_messages += bad
        for body in commands:
            self._obey(body)
        if not wanted:
            self._lose(f"carried bytes that are no ZMTP frame, or one of more than {most} bytes")
        return runs

    def _obey(self, body: bytes) -> None:
        reason = error_in(body)
        if reason is not None:
            self._lose(f"was given up by the other side: {reason}")
        answer = answer_to(body)
        if answer:
            self._send(answer)

    def _send(self, data: bytes) -> None:
        """Send a few bytes. A peer that has no room for them has not read for long."""
        if self._socket is None:
            return
        try:
            sent = self._socket.send(data)
        except OSError:  # no room now, or the end, of which reading tells, after all that came before it
            return
        if sent < len(data):
            self._lose("takes nothing any more")

    # -- the connection --

    async def _stay_connected(self) -> None:
        first_s, longest_s = (pause_ms / 1000 for pause_ms in self._spread.pauses_ms(self._config))
        pause_s = first_s
        while True:
            try:
                await self._connect()
                pause_s = first_s
                await self._lost.wait()
            except (OSError, StreamPeerError, ValueError) as error:  # the last: a name that can be none
                self._tell(LinkEvent("failed", _reason(error)))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    async def _connect(self) -> None:
        host, port = self._address
        async with asyncio.timeout(self._config.reconnect_max_s):
            found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        live = await self._reach(found)
        try:
            async with asyncio.timeout(self._config.reconnect_max_s):
                rest = await self._shake_hands(live)
        except BaseException as error:
            live.close()
            if isinstance(error, TimeoutError):
                raise StreamPeerError("it takes the connection and does not say what a ZMQ socket says") from error
            raise
        self._begin(live, rest)

    async def _reach(self, found: Sequence[tuple[int, int, int, str, Any]]) -> socket.socket:
        """Connect to the first address that answers; each has its own time, so that a dead one hides no other."""
        problem: OSError = OSError("the name has no address")
        for family, kind, protocol, _, address in found:
            try:
                live = socket.socket(family, kind, protocol)
            except OSError as error:  # addresses of a kind that this machine does not have
                problem = error
                continue
            try:
                live.settimeout(0)  # never wait
                live.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                async with asyncio.timeout(self._config.reconnect_max_s):
                    await self._loop.sock_connect(live, address)
                return live
            except OSError as error:
                live.close()
                problem = error
            except BaseException:
                live.close()
                raise
        raise problem

    async def _shake_hands(self, live: socket.socket) -> bytes:
        """Go through the handshake and subscribe. Returns what came after it."""
        handshake = SubscriberHandshake(self._config.topic.encode())
        answer = handshake.feed(b"")
        while True:
            if answer:
                await self._loop.sock_sendall(live, answer)
            if handshake.rest is not None:
                return handshake.rest
            data = await self._loop.sock_recv(live, 4096)
            if not data:
                raise StreamPeerError("it hung up in the middle of the handshake; does it ask for security?")
            answer = handshake.feed(data)

    def _begin(self, live: socket.socket, rest: bytes) -> None:
        self._socket = live
        self._begun, self._filled, self._wanted, self._pending = bytearray(rest), len(rest), 0, None
        self._heard_s = self._loop.time()
        self._lost.clear()
        if self._is_watched:
            self.watch()
        self._beat = self._loop.call_later(self._config.heartbeat_s, self._on_beat)
        self._tell(LinkEvent("connected"))

    def _on_beat(self) -> None:
        """Ask for a sign of life; end a connection that shows none, unless what came is only not read yet."""
        config = self._config
        patience_s = config.patience_s
        if self._loop.time() - self._heard_s > patience_s and not self._has_unread():
            self._lose(f"showed no life for {patience_s:g} s")
            return
        self._beat = self._loop.call_later(config.heartbeat_s, self._on_beat)
        self._send(ping(patience_s))

    def _has_unread(self) -> bool:
        try:
            return self._socket is not None and bool(self._socket.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _lose(self, what: str) -> None:
        if self._socket is None:
            return
        self._drop_socket()
        self._lost.set()
        self._tell(LinkEvent("gone", f"the connection {what}"))

    def _drop_socket(self) -> None:
        live, self._socket = self._socket, None
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None
        if live is not None:
            self._loop.remove_reader(live.fileno())
            live.close()

    def _tell(self, event: LinkEvent) -> None:
        self._events.append(event)
        self._wake()


def _reason(error: Exception) -> str:
    """Why an attempt failed, in the words of the system."""
    if isinstance(error, StreamPeerError):
        return error.message
    if isinstance(error, socket.gaierror):
        return f"{error.strerror}"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)  # asyncio puts other words in its place
    return str(error) or "no answer in time"
