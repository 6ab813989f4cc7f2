"""A relay between a subscriber and a publisher's sockets, which fails the way networks and full queues do.

It runs in a thread of its own, so that tests that block can use it. `cut` closes every connection and refuses new ones.
`drop_messages` keeps the connections and loses whole messages of the publisher, as a publisher does to a reader that is
too slow for its high-water mark: nothing but the numbers of later batches shows the loss.
"""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

GREETING_BYTES = 64
MORE, LONG, COMMAND = 0x01, 0x02, 0x04
CALL_TIMEOUT_S = 10.0


class EventRelay:
    """Relays to a publisher's ports of this machine; `ports` are those to connect to, in the same order."""

    def __init__(self, *target_ports: int) -> None:
        self._targets = target_ports
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._drops = False
        self.dropped_messages = 0
        self.ports: tuple[int, ...] = ()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="event relay", daemon=True)

    def start(self) -> None:
        """Listen on free ports, and relay."""
        self._thread.start()
        self.ports = self._call(self._listen([0] * len(self._targets)))

    def close(self) -> None:
        """Cut, and end the thread."""
        self._call(self._cut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_TIMEOUT_S)
        self._loop.close()

    def cut(self) -> None:
        """Close every connection; new ones are refused until `restore`."""
        self._call(self._cut())

    def drop_messages(self) -> None:
        """Keep the connections, lose the publisher's messages until `restore`."""
        self._drops = True

    def restore(self) -> None:
        """Relay again, on the same ports."""
        self._drops = False
        if not self._servers:
            self._call(self._listen(self.ports))

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_TIMEOUT_S)

    async def _listen(self, ports: Any) -> tuple[int, ...]:
        for port, target in zip(ports, self._targets, strict=True):

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: int = target) -> None:
                task = self._loop.create_task(self._relay(reader, writer, target))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

            self._servers.append(await asyncio.start_server(accept, "127.0.0.1", port))
        return tuple(server.sockets[0].getsockname()[1] for server in self._servers)

    async def _cut(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()
        for writer in self._writers:
            writer.transport.abort()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: int) -> None:
        ours = {writer}
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                publisher_reader, publisher_writer = await asyncio.open_connection("127.0.0.1", target)
                ours.add(publisher_writer)
                self._writers.add(publisher_writer)
                up = self._loop.create_task(_copy(reader, publisher_writer))
                down = self._loop.create_task(self._copy_messages(publisher_reader, writer))
                await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
                for direction in (up, down):
                    direction.cancel()
                await asyncio.gather(up, down, return_exceptions=True)
        finally:
            for one in ours:
                one.transport.abort()
            self._writers -= ours

    async def _copy_messages(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Publisher to subscriber, message by message, so that only whole ones are lost.

        Source: ZMTP 3.0 (rfc.zeromq.org/spec/23): a greeting of 64 bytes, then frames of flags, size (1 or 8 bytes,
        big-endian) and body; commands are frames of their own.
        """
        missing = GREETING_BYTES
        while missing:  # in pieces: each side sends its second one when it has the other's first
            piece = await reader.read(missing)
            if not piece:
                return
            missing -= len(piece)
            writer.write(piece)
        within = drops = False
        while True:
            head = await reader.readexactly(1)
            flags = head[0]
            size = await reader.readexactly(8 if flags & LONG else 1)
            body = await reader.readexactly(int.from_bytes(size, "big"))
            if not flags & COMMAND:
                drops = drops if within else self._drops
                within = bool(flags & MORE)
                self.dropped_messages += drops and not within
            if flags & COMMAND or not drops:
                writer.write(head + size + body)
                await writer.drain()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


@contextlib.contextmanager
def running_relay(*target_ports: int) -> Iterator[EventRelay]:
    """A relay that is closed at the end."""
    relay = EventRelay(*target_ports)
    relay.start()
    try:
        yield relay
    finally:
        relay.close()
