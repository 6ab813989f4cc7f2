"""What tests of live links share: a link that is read when it asks for it, and the publisher's end of a connection by hand."""

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Self

import pytest
import zmq

from kvatlas._native import Run, append_batch
from kvatlas.stream import subscriber
from kvatlas.stream.link import LinkEvent, LiveLink
from kvatlas.stream.spread import Spread
from kvatlas.stream.subscriber_config import SubscriberConfig
from kvatlas.stream.tcp_link import TcpLink, tcp_address
from kvatlas.stream.zmq_link import ZmqLink
from support.engines import until
from support.scripted import ScriptedEnd

LINKS = ("tcp", "zmq")

# What a publisher says, byte for byte. Source: RFC 37/ZMTP (3.1) of the ZeroMQ project.
GREETING = b"\xff\0\0\0\0\0\0\0\0\x7f" + b"\x03\x01" + b"NULL" + bytes(16) + b"\0" + bytes(31)
READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB"
# What a subscriber to everything says before the first message.
SUBSCRIBER_SAYS = GREETING + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB" + b"\x04\x0a\x09SUBSCRIBE"


def use_link(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have subscribers read TCP endpoints over that link."""
    if kind == "zmq":
        monkeypatch.setattr(subscriber, "tcp_address", lambda _: None)


def frame(data: bytes, *, more: bool = False) -> bytes:
    """One frame of a message."""
    if len(data) < 256:
        return bytes([more, len(data)]) + data
    return bytes([2 + more]) + struct.pack(">Q", len(data)) + data


def message(seq: int, payload: bytes, topic: bytes = b"kv") -> bytes:
    """A batch as it travels."""
    return frame(topic, more=True) + frame(seq.to_bytes(8, "big"), more=True) + frame(payload)


def quiet_port() -> int:
    """A free port outside the range from which the system hands out ports: nobody else takes it meanwhile."""
    while True:
        with socket.socket() as probe:
            port = random.randrange(20_000, 30_000)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port


def make_link(kind: str, endpoint: str, **config: object) -> LiveLink:
    """A link that is not open yet; quick to try again, and with pauses that nothing stretches."""
    settings = SubscriberConfig(endpoint, **{"reconnect_s": 0.01, "reconnect_max_s": 0.5, **config})
    spread = Spread(most=1.0)
    if kind == "zmq":
        return ZmqLink(zmq.Context.instance(), settings, spread)
    return TcpLink(tcp_address(endpoint), settings, spread)


class Follower:
    """Reads a link whenever it wakes, and never unasked."""

    def __init__(self, link: LiveLink) -> None:
        self.link = link
        self.events: list[LinkEvent] = []
        self.runs: list[Run] = []
        """Joined over the calls they took to come."""
        self.told: list[str | int] = []
        """Kinds of events and numbers of batches, in order."""
        self.woken = asyncio.Event()
        self._failures: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self._failures.append(context))
        link.open(self.woken.set)

    @property
    def kinds(self) -> list[str]:
        """What became of the connection, without the attempts in between."""
        return [event.kind for event in self.events if event.kind != "failed"]

    def read(self) -> None:
        """Take all there is."""
        self.read_once()
        while not self.link.is_drained:
            self.read_once()
        self._take_events()  # the end of a connection is found in reading

    def read_once(self) -> None:
        """Take what happened, and some of what waits."""
        self._take_events()
        self._keep(self.link.receive_runs())

    def _take_events(self) -> None:
        events = self.link.take_events()
        self.events += events
        self.told += [event.kind for event in events]

    def _keep(self, runs: list[Run]) -> None:
        joined: list[Run] = []
        for first_seq, payloads in runs:
            assert payloads
            for seq, payload in enumerate(payloads, first_seq):
                append_batch(joined, seq, payload)
                append_batch(self.runs, seq, payload)
                self.told.append(seq)
        assert joined == runs, "one call groups its runs itself"

    async def until(self, condition: Callable[[], object], what: str, seconds: float = 10.0) -> None:
        """Read as the link wakes, until that is so."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    self.woken.clear()
                    self.read()
                    if condition():
                        return
                    await self.woken.wait()
        except TimeoutError:
            raise AssertionError(
                f"waited {seconds} s in vain: {what}; told: {self.told[-20:]}, {self.events[-3:]}"
            ) from None

    async def meanwhile(self, other: Coroutine[object, object, None]) -> None:
        """Read as the link wakes, until this is done: libzmq subscribes within the calls that read."""
        task = asyncio.create_task(other)
        task.add_done_callback(lambda _: self.woken.set())
        try:
            await self.until(task.done, "what goes on meanwhile")
        finally:
            task.cancel()
        await task

    async def until_told(self, *kinds: str) -> None:
        """Until the connection has been through just this."""
        await self.until(lambda: self.kinds == list(kinds), f"{kinds}")

    async def until_failed(self) -> str:
        """Why the next attempt that fails does."""
        known = len(self.events)
        await self.until(lambda: "failed" in [event.kind for event in self.events[known:]], "a failure")
        return next(event.reason for event in self.events[known:] if event.kind == "failed")

    def end(self) -> None:
        """Close the link. Nothing may have gone wrong behind its back."""
        self.link.close()
        self.link.close()
        assert self._failures == []


@contextlib.asynccontextmanager
async def following(kind: str, endpoint: str, **config: object) -> AsyncIterator[Follower]:
    """A link that is read, for the length of the block; it leaves nothing behind."""
    async with nothing_left():
        follower = Follower(make_link(kind, endpoint, **config))
        try:
            yield follower
        finally:
            follower.end()


@contextlib.asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """No task begun inside outlives the block by more than a few turns of the loop."""
    before = asyncio.all_tasks()
    yield
    await until(lambda: asyncio.all_tasks() <= before, "all tasks ended")


def open_files() -> int:
    """How many descriptors this process has."""
    return sum(1 for _ in Path("/dev/fd").iterdir())


class Remote(ScriptedEnd):
    """The publisher's end of one connection, given to its script."""

    async def send_pieces(self, data: bytes, size: int) -> None:
        """Write in pieces between which the other side runs."""
        for at in range(0, len(data), size):
            self.writer.write(data[at : at + size])
            await asyncio.sleep(0)
        await self.writer.drain()

    async def shake_hands(self, says: bytes = b"") -> None:
        """Go through the handshake up to the subscription, and say this behind READY in the same segment."""
        await self.send(GREETING)
        await self.reader.readexactly(len(GREETING))
        await self.send(READY + says)
        await self.reader.readexactly(len(SUBSCRIBER_SAYS) - len(GREETING))

    async def wait_end(self) -> bytes:
        """Until the other side closes; what it said until then."""
        return await self.reader.read()

    def reset(self) -> None:
        """Break the connection without a farewell."""
        end = self.writer.get_extra_info("socket")
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Script = Callable[[Remote], Awaitable[object]]


class ScriptedPublisher:
    """A server on loopback that treats each connection by its script and closes it when the script ends."""

    def __init__(self, script: Script, port: int = 0) -> None:
        self.script = script
        self.port = port
        self.accepted_s: list[float] = []
        """When each connection came."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: list[AssertionError] = []

    @property
    def endpoint(self) -> str:
        """Where it is, as a subscriber names it."""
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._tasks)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # transports close a turn later
        assert self._failures == []

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        self.accepted_s.append(asyncio.get_running_loop().time())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            try:
                await self.script(Remote(reader, writer))
            except AssertionError as error:
                self._failures.append(error)
            finally:
                writer.close()
                self._tasks.discard(task)
