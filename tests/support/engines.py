"""Engines for fleet tests: side pages to be changed while they run, and an event stream by hand."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import zmq
from aiohttp import web

from kvatlas.clock import SystemClock
from kvatlas.config import ServeConfig, WorkerConfig
from kvatlas.events import BlockStored, EventBatch, encode_batch
from kvatlas.fleet import Fleet
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex

BLOCK = 16
MARKER = b"\xff" * 8


def open_pub(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    """A publisher's socket that can be asked whether somebody has subscribed: see `subscribed`."""
    pub = context.socket(zmq.XPUB)
    pub.setsockopt(zmq.XPUB_VERBOSE, 1)
    return pub


async def subscribed(pub: "zmq.Socket[bytes]") -> None:
    """Wait for the next subscription. It travels after the handshake: what is sent before it came goes nowhere."""
    await until(lambda: bool(pub.poll(0)) and pub.recv()[:1] == b"\x01", "a subscription")


class Stream:
    """An engine's event sockets, served from the test's event loop; `batches` is what replay returns."""

    def __init__(self) -> None:
        context = zmq.Context.instance()
        self.pub, self.router = open_pub(context), context.socket(zmq.ROUTER)
        for socket in (self.pub, self.router):
            socket.setsockopt(zmq.LINGER, 0)
        self.port = self.pub.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.batches: list[bytes] = []
        self.asked = 0
        self.mute = False
        self._task = asyncio.get_running_loop().create_task(self._serve())

    @property
    def source(self) -> dict[str, object]:
        """Its entry in /kv_event_sources."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.port}",
            "replay_endpoint": f"tcp://0.0.0.0:{self.replay_port}",
            "topic": "kv",
        }

    def store(self, number: int, *, heard: bool = True, rank: int = 0) -> None:
        """Publish one block of tokens `number`; unheard ones come by replay only."""
        event = BlockStored(
            block_hashes=[number], parent_block_hash=None, token_ids=[number] * BLOCK, block_size=BLOCK, medium="GPU"
        )
        payload = encode_batch(EventBatch(ts=1.0 + len(self.batches), events=[event], data_parallel_rank=rank))
        self.batches.append(payload)
        if heard:
            self.pub.send_multipart([b"kv", (len(self.batches) - 1).to_bytes(8, "big"), payload])

    async def subscribed(self) -> None:
        """One more subscription than at the last call has reached the publisher: what it sends now is heard."""
        await subscribed(self.pub)

    async def _serve(self) -> None:
        while True:
            if self.router.poll(0):
                identity, _, start = self.router.recv_multipart()
                self.asked += 1
                if not self.mute:
                    for seq in range(int.from_bytes(start, "big"), len(self.batches)):
                        self.router.send_multipart([identity, b"", b"", seq.to_bytes(8, "big"), self.batches[seq]])
                    self.router.send_multipart([identity, b"", b"", MARKER, b""])
            await asyncio.sleep(0.002)

    @classmethod
    async def at(cls, port: int) -> "Stream":
        """Another engine at the port of one that was closed, as soon as the port is free."""
        while True:
            stream = cls()
            try:
                stream.pub.bind(f"tcp://127.0.0.1:{port}")
            except zmq.ZMQError:
                stream.close()
                await asyncio.sleep(0.01)
            else:
                stream.port = port
                return stream

    def close(self) -> None:
        """Close the sockets; the ports are free a moment later."""
        self._task.cancel()
        self.pub.close(linger=0)
        self.router.close(linger=0)


class Pages:
    """An engine's HTTP side, to be changed while it runs. None for a page is 404."""

    def __init__(self) -> None:
        self.status = 200
        self.hangs = False
        self.hanging = 0
        """Health checks that came while it hung."""
        self.started_s: float | None = 1_000.0
        self.computed = 0
        self.ended = 0
        self.sources: object | None = None
        self.server_info: object | None = None
        self.asked = 0
        self.scraped = 0
        self.url = ""

    async def health(self, _: web.Request) -> web.Response:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + 30
        self.hanging += self.hangs
        while self.hangs and loop.time() < end_s:
            await asyncio.sleep(0.005)
        return web.Response(status=self.status)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "parent": None}]})

    async def scrapes(self, count: int) -> None:
        """Wait until the metrics were read that often, and what was read last had its effect."""
        wanted = self.scraped + count + 1  # the next scrape begins when the last one was worked up
        await until(lambda: self.scraped >= wanted, f"{count} scrapes")

    async def metrics(self, _: web.Request) -> web.Response:
        self.scraped += 1
        ranks = range(4)
        lines = [f'vllm:cache_config_info{{block_size="{BLOCK}",engine="{rank}"}} 1.0' for rank in ranks]
        lines += [
            f'vllm:prompt_tokens_by_source_total{{engine="0",source="local_compute"}} {self.computed}',
            f'vllm:request_success_total{{engine="0"}} {self.ended}',
        ]
        if self.started_s is not None:
            lines.append(f"process_start_time_seconds {self.started_s}")
        return web.Response(text="\n".join(lines) + "\n")

    async def kv_event_sources(self, _: web.Request) -> web.Response:
        self.asked += 1
        return self._page(self.sources)

    async def info(self, _: web.Request) -> web.Response:
        return self._page(self.server_info)

    @staticmethod
    def _page(page: object | None) -> web.Response:
        if page is None:
            raise web.HTTPNotFound
        return web.Response(text=page if isinstance(page, str) else json.dumps(page))


@asynccontextmanager
async def serving(*engines: Pages) -> AsyncIterator[None]:
    """The pages on loopback; `url` says where."""
    runners = []
    for engine in engines:
        app = web.Application()
        app.router.add_get("/health", engine.health)
        app.router.add_get("/v1/models", engine.models)
        app.router.add_get("/metrics", engine.metrics)
        app.router.add_get("/kv_event_sources", engine.kv_event_sources)
        app.router.add_get("/server_info", engine.info)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        runners.append(runner)
    try:
        yield
    finally:
        for runner in runners:
            await runner.cleanup()


@asynccontextmanager
async def fleet_of(*workers: WorkerConfig, **settings: object) -> AsyncIterator[tuple[Fleet, PrefixIndex]]:
    """A running fleet that looks at its engines every 20 ms, unless told otherwise."""
    index = PrefixIndex(BlockKeyHasher(1))
    config = ServeConfig(workers=workers, **{"health_interval_s": 0.02, **settings})
    fleet = Fleet(config, index, SystemClock())
    await fleet.start()
    try:
        yield fleet, index
    finally:
        await fleet.close()


async def until(condition: Callable[[], bool], what: str = "", seconds: float = 10.0) -> None:
    """Wait for a condition; the message of a failure says what is missing."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + seconds
    while not condition():
        assert loop.time() < end_s, f"waited {seconds} s in vain: {what}"
        await asyncio.sleep(0.005)
