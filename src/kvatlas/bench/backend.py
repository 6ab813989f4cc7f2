"""The engine stand-in of the gateway benchmark: answers in about 10 us so that the proxy under test is what costs.

The process prints its port and serves until it is stopped. A POST whose body asks for a stream
gets one event per tick; any other request the same 500-byte completion.
"""

import asyncio
import sys

import httptools
import msgspec

from kvatlas.bench.processes import Ready, yield_to_the_measured
from kvatlas.gateway import event_loop_factory

__all__ = ["CACHED_TOKENS", "EVENT_BYTES", "PROMPT_TOKENS", "TICK_S", "main", "serve"]

TICK_S = 0.005
_JSON_BYTES = 500
PROMPT_TOKENS, CACHED_TOKENS = 861, 848
"""What the repeated request of the load is to the tiny model, and how much of that a worker of the benchmark holds."""
_USAGE = b'"usage":{"prompt_tokens":%d,"completion_tokens":16,"prompt_tokens_details":{"cached_tokens":%d}}' % (
    PROMPT_TOKENS,
    CACHED_TOKENS,
)


def _answer(usage: bytes) -> bytes:
    """A completion of 500 bytes, behind its head."""
    start = b'{"id":"cmpl-1","object":"chat.completion","created":1,"model":"bench","choices":[{"index":0,"message":'
    text = b"t" * (_JSON_BYTES - len(start) - len(usage) - 18)
    body = start + b'{"content":"' + text + b'"}}]' + (b"," + usage if usage else b" ") + b"}"
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


_JSON_ANSWER = _answer(_USAGE)
_TURN_ANSWER = _answer(b"")
_SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT = b'data: {"id":"cmpl-1","object":"chat.chunk","model":"bench","choices":[{"delta":{"content":"tok"}}]}\n\n'
EVENT_BYTES = len(_EVENT)
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_SSE_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class _Backend(asyncio.Protocol):
    """One connection. `streams` holds those that owe events, with how many."""

    __slots__ = ("_body", "_parser", "_streams", "transport")

    def __init__(self, streams: "dict[_Backend, int]") -> None:
        self._streams = streams
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        body, self._body = self._body, b""
        if b'"stream":true' in body:
            self.transport.write(_SSE_HEAD)
            self._streams[self] = int(body.rpartition(b'"max_tokens":')[2].partition(b"}")[0])
        else:
            # How many tokens the turn of a conversation has, nobody here knows.
            self.transport.write(_TURN_ANSWER if b'"turn":' in body else _JSON_ANSWER)

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.pop(self, None)


async def serve() -> None:
    """Serve until cancelled."""
    loop = asyncio.get_running_loop()
    streams: dict[_Backend, int] = {}

    def tick() -> None:
        loop.call_later(TICK_S, tick)
        for connection, left in list(streams.items()):
            connection.transport.write(_CHUNK if left else _SSE_END)
            if left:
                streams[connection] = left - 1
            else:
                del streams[connection]

    tick()
    server = await loop.create_server(lambda: _Backend(streams), "127.0.0.1", 0, backlog=1024)
    sys.stdout.write(msgspec.json.encode(Ready(server.sockets[0].getsockname()[1])).decode() + "\n")
    sys.stdout.flush()
    await server.serve_forever()


def main() -> None:
    """Entry of the process."""
    yield_to_the_measured()
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(serve())
