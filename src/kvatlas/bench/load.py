"""The load of the gateway benchmark: closed loops over kept connections, each sending on when its answer is whole."""

import asyncio
import random
import string
import sys
import time
from collections.abc import Iterator
from itertools import repeat

import msgspec

from kvatlas.bench.backend import TICK_S
from kvatlas.bench.processes import yield_to_the_measured
from kvatlas.gateway import event_loop_factory

__all__ = ["TURN_BYTES", "LoadResult", "conversations", "drive", "main", "request_bytes"]

TURN_BYTES = 300
"""Of each new text in a conversation."""
_FIRST_TEXT = "w" * 850
_END_OF_CHUNKS = b"0\r\n\r\n"


class LoadResult(msgspec.Struct):
    """What one run saw. `events` are SSE events; latencies are of whole answers."""

    requests: int
    events: int
    errors: int
    seconds: float
    p50_ms: float
    p99_ms: float


def request_bytes(*, stream: bool, events: int = 0) -> bytes:
    """A chat completion request of 1 kB: body and a usual head."""
    body = (
        f'{{"model":"bench","messages":[{{"role":"user","content":"{_FIRST_TEXT}"}}],'
        f'"stream":{"true" if stream else "false"},"max_tokens":{events}}}'
    ).encode()
    return _post(body)


def _post(body: bytes) -> bytes:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: gateway.local\r\nUser-Agent: bench/1\r\nAccept: */*\r\n"
        f"Authorization: Bearer sk-none\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def conversations(turns: int, source: random.Random) -> Iterator[bytes]:
    """Requests of one conversation after the other, without end.

    All begin with the text of `request_bytes`; every further turn brings a question, and the answer to the one before,
    of `TURN_BYTES` each, which nobody has seen before.
    """
    words = ["".join(source.choices(string.ascii_lowercase, k=source.randint(2, 8))) for _ in range(2000)]

    def text() -> str:
        return " ".join(source.choices(words, k=TURN_BYTES // 4))[:TURN_BYTES]

    while True:
        messages = [{"role": "user", "content": _FIRST_TEXT}]
        for turn in range(turns):
            messages.append({"role": "assistant", "content": text()})
            messages.append({"role": "user", "content": text()})
            body = {"model": "bench", "messages": messages, "stream": False, "metadata": {"turn": turn}}
            yield _post(msgspec.json.encode(body))


class _Client(asyncio.Protocol):
    """One closed loop."""

    def __init__(self, requests: Iterator[bytes], until_s: float, *, stream: bool) -> None:
        self._requests = requests
        self._until_s = until_s
        self._stream = stream
        self._buffer = b""
        self._sent_s = 0.0
        self.latencies_s: list[float] = []
        self.events = 0
        self.failed = False
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._send()

    def _send(self) -> None:
        self._buffer = b""
        request = next(self._requests)
        self._sent_s = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self._stream:
            self.events += data.count(b"data: {")
            self._buffer = (self._buffer + data)[-512:]
            whole = self._buffer.endswith(_END_OF_CHUNKS)
        else:
            self._buffer += data
            head, found, body = self._buffer.partition(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            whole = bool(found) and len(body) >= int(length)
            self.failed = self.failed or not self._buffer.startswith(b"HTTP/1.1 200")
        if whole:
            now_s = time.perf_counter()
            self.latencies_s.append(now_s - self._sent_s)
            if now_s < self._until_s and not self.failed:
                self._send()
            else:
                self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.failed = self.failed or exc is not None or time.perf_counter() < self._until_s
        if not self.done.done():
            self.done.set_result(None)


async def drive(port: int, *, stream: bool, connections: int, seconds: float, turns: int = 0) -> LoadResult:
    """Load a port on loopback for about `seconds`; a stream is as long as the whole run.

    Args:
        turns: with 1 or more, conversations of so many turns instead of the same request again.
    """
    loop = asyncio.get_running_loop()
    request = request_bytes(stream=stream, events=int(seconds / TICK_S))

    def requests() -> Iterator[bytes]:
        return conversations(turns, random.Random()) if turns else repeat(request)

    start_s = time.perf_counter()
    until_s = start_s if stream else start_s + seconds
    clients = []
    for _ in range(connections):
        _, client = await loop.create_connection(lambda: _Client(requests(), until_s, stream=stream), "127.0.0.1", port)
        clients.append(client)
    await asyncio.wait_for(asyncio.gather(*(client.done for client in clients)), seconds * 5 + 20)
    elapsed_s = time.perf_counter() - start_s
    latencies_s = sorted(latency for client in clients for latency in client.latencies_s) or [0.0]
    return LoadResult(
        requests=sum(len(client.latencies_s) for client in clients),
        events=sum(client.events for client in clients),
        errors=sum(client.failed for client in clients),
        seconds=elapsed_s,
        p50_ms=1000 * latencies_s[len(latencies_s) // 2],
        p99_ms=1000 * latencies_s[len(latencies_s) * 99 // 100],
    )


def main() -> None:
    """Entry of the process: PORT, `json`, `sse` or `turns`, CONNECTIONS, SECONDS, TURNS; prints one `LoadResult`."""
    port, mode, connections, seconds, turns = sys.argv[1:]
    yield_to_the_measured()
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        run = drive(
            int(port),
            stream=mode == "sse",
            connections=int(connections),
            seconds=float(seconds),
            turns=int(turns) if mode == "turns" else 0,
        )
        sys.stdout.write(msgspec.json.encode(runner.run(run)).decode() + "\n")
