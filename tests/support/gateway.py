"""What gateway tests share: a scripted upstream, a planner that keeps books, a raw client, and a run on either event loop."""

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import uvloop

from kvatlas.clock import SystemClock
from kvatlas.gateway import GatewayConfig, GatewayRequest, GatewayServer, Outcome, Plan, Planner, Target, Timeouts
from support.scripted import ScriptedEnd

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
_clients: list["Client"] = []
ANSWER = b'{"ok":true}'


def on_both_loops(test: Callable[..., Awaitable[None]]):
    """Run an async test on asyncio's loop and on uvloop, each at most 30 s."""

    @functools.wraps(test)
    def run(loop_name: str, **fixtures: object) -> None:
        async def bounded() -> None:
            try:
                await asyncio.wait_for(test(**fixtures), 20)
            finally:
                while _clients:
                    _clients.pop().abort()
                await asyncio.sleep(0.01)

        with asyncio.Runner(loop_factory=LOOPS[loop_name]) as runner:
            runner.run(bounded())

    names = [
        *inspect.signature(test).parameters.values(),
        inspect.Parameter("loop_name", inspect.Parameter.KEYWORD_ONLY),
    ]
    run.__signature__ = inspect.Signature(names)
    del run.__wrapped__
    return pytest.mark.parametrize("loop_name", LOOPS)(run)


@dataclass
class Seen:
    """A request as the upstream received it, byte for byte."""

    head: bytes
    body: bytes

    @property
    def line(self) -> bytes:
        """The request line."""
        return self.head.split(b"\r\n")[0]

    @property
    def fields(self) -> list[tuple[bytes, bytes]]:
        """Header fields in order, names in lower case."""
        pairs = [line.partition(b": ") for line in self.head.split(b"\r\n")[1:] if line]
        return [(name.lower(), value) for name, _, value in pairs]

    def values(self, name: bytes) -> list[bytes]:
        """All values of one header field."""
        return [value for field_name, value in self.fields if field_name == name]


class Peer(ScriptedEnd):
    """The upstream's end of one connection, given to its script."""

    async def answer(self, body: bytes = ANSWER, extra: bytes = b"") -> None:
        """A 200 with a body."""
        await self.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%b\r\n%b" % (len(body), extra, body))

    async def sse_head(self) -> None:
        """The head of an event stream."""
        await self.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        """One chunk of a chunked body; an empty one ends it."""
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def abort(self) -> None:
        """Cut the connection."""
        self.writer.transport.abort()


Script = Callable[[Peer, Seen], Awaitable[None]]


class Upstream:
    """A server on loopback that answers each request by a script and records what it saw."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task] = set()
        self.seen: list[Seen] = []
        self.connections = 0
        self.open = 0
        self.port = 0

    async def start(self) -> "Upstream":
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """Stop, whatever the scripts are doing."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def target(self, worker_id: str, **fields: object) -> Target:
        """This upstream as a planner names it."""
        return Target(worker_id, "127.0.0.1", self.port, **fields)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        self.connections += 1
        self.open += 1
        peer = Peer(reader, writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                seen = Seen(head[:-4], b"")
                length = seen.values(b"content-length")
                seen.body = await reader.readexactly(int(length[0])) if length else b""
                self.seen.append(seen)
                await self._script(peer, seen)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.open -= 1
            writer.transport.abort()
            self._tasks.discard(task)


async def echo_ok(peer: Peer, seen: Seen) -> None:
    """The plainest script: every request gets the same small JSON."""
    await peer.answer()


async def free_port() -> int:
    """A port where nobody listens."""
    server = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port


class BookKeeper:
    """A planner that checks the pairing rule and remembers every outcome."""

    def __init__(self, *targets: Target, predicted_tokens: int | None = None, **plan: object) -> None:
        self.plan_to_return = Plan(targets, predicted_tokens, **plan)
        self.in_flight: dict[str, int] = {}
        self.asked: list[GatewayRequest] = []
        self.first_bytes = 0
        self.outcomes: list[tuple[str | None, Outcome]] = []
        self.is_ready = True

    def plan(self, request: GatewayRequest) -> Plan:
        """The one plan."""
        self.asked.append(request)
        return self.plan_to_return

    def dispatched(self, request: GatewayRequest, plan: Plan, target: Target) -> None:
        """Count one up."""
        self.in_flight[target.worker_id] = self.in_flight.get(target.worker_id, 0) + 1

    def first_byte(self, request: GatewayRequest, plan: Plan, target: Target) -> None:
        """Count."""
        self.first_bytes += 1

    def finished(self, request: GatewayRequest, plan: Plan, target: Target | None, outcome: Outcome) -> None:
        """Count one down and remember."""
        self.outcomes.append((target.worker_id if target else None, outcome))
        if target is not None:
            self.in_flight[target.worker_id] -= 1
            assert self.in_flight[target.worker_id] >= 0, "finished without dispatched"

    def ready(self) -> bool:
        """As set."""
        return self.is_ready

    @property
    def kinds(self) -> list[str]:
        """Outcome kinds in order."""
        return [outcome.kind for _, outcome in self.outcomes]


@dataclass
class Answer:
    """A response as the client received it."""

    status: int
    head: bytes
    body: bytes
    raw_body: bytes = field(default=b"", repr=False)

    def values(self, name: bytes) -> list[bytes]:
        """All values of one header field."""
        return Seen(self.head, b"").values(name)


class Client:
    """A raw HTTP client: bytes out, one parsed answer in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int, **options: object) -> "Client":
        """Open a connection; it is closed when the test ends."""
        client = cls(*await asyncio.open_connection("127.0.0.1", port, **options))
        _clients.append(client)
        return client

    def send(self, data: bytes) -> None:
        """Write bytes."""
        self.writer.write(data)

    async def post(self, body: bytes = b"{}", path: bytes = b"/v1/completions", extra: bytes = b"") -> Answer:
        """Send a POST and read its answer."""
        self.send(post(body, path, extra))
        return await self.answer()

    async def head(self) -> bytes:
        """Read one head."""
        return (await self.reader.readuntil(b"\r\n\r\n"))[:-4]

    async def answer(self, *, to_head: bool = False) -> Answer:
        """Read one answer."""
        head = await self.head()
        status = int(head.split(b" ")[1])
        length = Seen(head, b"").values(b"content-length")
        if to_head:
            return Answer(status, head, b"")
        if b"chunked" in head:
            return await self._chunked(status, head)
        body = await self.reader.readexactly(int(length[0])) if length else await self.reader.read()
        return Answer(status, head, body, body)

    async def _chunked(self, status: int, head: bytes) -> Answer:
        body, raw = b"", b""
        while True:
            line = await self.reader.readuntil(b"\r\n")
            data = await self.reader.readexactly(int(line, 16) + 2)
            raw += line + data
            body += data[:-2]
            if data == b"\r\n":
                return Answer(status, head, body, raw)

    async def at_end(self) -> bool:
        """Whether the gateway closed the connection, within 2 s; a reset counts."""
        try:
            return await asyncio.wait_for(self.reader.read(1), 2) == b""
        except ConnectionError:
            return True

    def abort(self) -> None:
        """Cut the connection."""
        self.writer.transport.abort()


def post(body: bytes, path: bytes = b"/v1/completions", extra: bytes = b"") -> bytes:
    """The bytes of a plain POST."""
    head = b"POST %b HTTP/1.1\r\nHost: gw\r\nContent-Length: %d\r\n%b\r\n" % (path, len(body), extra)
    return head + body


@asynccontextmanager
async def gateway(planner: Planner, **config: object) -> AsyncIterator[tuple[GatewayServer, int]]:
    """A running gateway; `timeouts` may be a dict."""
    timeouts = Timeouts(**config.pop("timeouts", {}))
    server = GatewayServer(GatewayConfig(port=0, timeouts=timeouts, **config), planner, SystemClock())
    port = await server.start()
    try:
        yield server, port
    finally:
        await server.close(0)


@asynccontextmanager
async def upstreams(*scripts: Script) -> AsyncIterator[list[Upstream]]:
    """Running upstreams, one per script."""
    running = [await Upstream(script).start() for script in scripts]
    try:
        yield running
    finally:
        for upstream in running:
            await upstream.stop()


async def until(condition: Callable[[], bool], seconds: float = 2.0) -> bool:
    """Whether a condition became true in time."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + seconds
    while not condition():
        if loop.time() > end_s:
            return False
        await asyncio.sleep(0.005)
    return True
