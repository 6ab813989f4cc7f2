"""Faults of simulated engines as subscribers, clients and the gateway meet them: real sockets, real processes."""

import asyncio
import contextlib
import http.client
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import pytest
import zmq

from kvatlas.clock import SystemClock
from kvatlas.events import decode_batch
from kvatlas.simulator import EngineConfig, LatencyConfig, ServedEngine
from kvatlas.stream import SubscriberConfig, ZmqEventSubscriber
from support.serve import post_json, running_gateway

pytestmark = pytest.mark.e2e

FAST = LatencyConfig(time_scale=0.0)
MARKER = b"\xff" * 8


class Engine:
    """A served engine and its HTTP client."""

    def __init__(self, served: ServedEngine, session: aiohttp.ClientSession) -> None:
        self.served = served
        self.session = session
        self.prompts = 0

    async def complete(self, prompt: list[int] | None = None) -> int:
        """One block in one batch; a prompt of its own unless one is given. Returns the cached tokens."""
        self.prompts += 1
        body = {"prompt": prompt or [self.prompts] * 17, "max_tokens": 1}
        async with self.session.post("/v1/completions", json=body) as response:
            assert response.status == 200
            return (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def status(self, path: str = "/health", timeout_s: float = 5.0) -> int | None:
        """The status of a page; None when nobody listens."""
        try:
            async with self.session.get(path, timeout=aiohttp.ClientTimeout(timeout_s)) as response:
                return response.status
        except aiohttp.ClientConnectorError:
            return None

    async def give(self, **fault: object) -> dict:
        """POST a fault."""
        async with self.session.post("/sim/faults", json=fault) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def faults(self) -> dict:
        """GET the faults."""
        async with self.session.get("/sim/faults") as response:
            return await response.json()


class Sink:
    """Writes down what the subscriber tells."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.payloads: list[bytes] = []
        self.statuses: list[str] = []

    def on_life(self, reason: str) -> None:
        self.seen.append("life")

    def on_batch(self, seq: int, payload: bytes) -> None:
        self.seen.append(seq)
        self.payloads.append(payload)

    def on_gap(self, first_seq: int, last_seq: int | None) -> None:
        self.seen.append((first_seq, last_seq))

    def on_status(self, status: str, reason: str) -> None:
        self.statuses.append(status)


@asynccontextmanager
async def engine(*faults: str, **config: object) -> AsyncIterator[Engine]:
    served = ServedEngine(EngineConfig(faults=faults, **{"latency": FAST} | config))
    async with served, aiohttp.ClientSession(served.address.base_url) as session:
        yield Engine(served, session)


@asynccontextmanager
async def subscriber(
    events: str, replay: str | None, **config: float
) -> AsyncIterator[tuple[Sink, ZmqEventSubscriber]]:
    sink = Sink()
    timing = {"retry_s": 0.05, "reconnect_s": 0.02, "reconnect_max_s": 0.05, "probe_s": 60.0} | config
    follower = ZmqEventSubscriber(SubscriberConfig(events, replay, **timing), sink, SystemClock())
    task = asyncio.create_task(follower.run())
    try:
        await until(lambda: "live" in sink.statuses)
        yield sink, follower
    finally:
        follower.close()
        await task


def follow(one: Engine, **config: float) -> contextlib.AbstractAsyncContextManager[tuple[Sink, ZmqEventSubscriber]]:
    address = one.served.address
    return subscriber(address.events_endpoint, address.replay_endpoint, **config)


async def until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


async def until_served(one: Engine) -> None:
    deadline_s = time.monotonic() + 15
    while await one.status() != 200:
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)


@contextmanager
def sim(*arguments: str) -> Iterator[list[dict]]:
    """`kvatlas sim --json` on free ports: its engines."""
    command = [sys.executable, "-m", "kvatlas", "sim", "--json", "--port", "0", "--time-scale", "0.1", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            text = ""
            for line in process.stdout:
                text += line
                if line.rstrip() == "}":
                    break
            started = json.loads(text)
            yield [engine | {"tokenizer": started["tokenizer"]} for engine in started["engines"]]
        finally:
            process.terminate()


def ask(endpoint: str, timeout_ms: int = 300) -> list[tuple[float, int]]:
    """Replay from 0: when each message came, and its number; -1 is the end marker. Silence ends it too."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        started_s = time.monotonic()
        dealer.send_multipart((b"", bytes(8)))
        found = []
        while dealer.poll(timeout_ms):
            seq = int.from_bytes(dealer.recv_multipart()[-2], "big", signed=True)
            found.append((time.monotonic() - started_s, seq))
            if seq == -1:
                break
        return found


@pytest.mark.asyncio
async def test_a_dropped_batch_is_a_gap_that_replay_mends():
    """`kvatlas sim --fault drop`: the next live batch shows the hole, a replay fills it, in order; only one engine."""
    with sim("--engines", "2", "--fault", "drop:from=1,count=2,engine=1") as engines:
        for number, one in enumerate(engines):
            async with (
                subscriber(one["events"], one["replay"]) as (sink, follower),
                aiohttp.ClientSession(one["url"]) as session,
            ):
                asked = follower.counters.replays
                for prompt in range(4):
                    body = {"prompt": [prompt] * 17, "max_tokens": 1}
                    async with session.post("/v1/completions", json=body) as response:
                        assert response.status == 200
                await until(lambda sink=sink: len(sink.seen) >= 4)
                assert sink.seen == [0, 1, 2, 3]
                assert (follower.counters.replays > asked) is (number == 1)


@pytest.mark.asyncio
async def test_faults_are_given_shown_and_taken_back_while_the_engine_runs():
    """The API: a silence that begins and ends by a call; what was not heard comes by replay."""
    async with engine() as one, follow(one) as (sink, follower):
        await one.complete()
        await until(lambda: sink.seen == [0])
        shown = await one.give(fault="silence")
        assert shown == {"id": 1, "spec": "silence", "state": "active", "hits": 0}
        await one.complete()
        await one.complete()
        async with asyncio.timeout(15):  # batches leave a moment after the answer
            while (page := await one.faults())["batches"] < 3:
                await asyncio.sleep(0.01)
        assert (page["engine"], page["batches"]) == (0, 3)
        assert page["streams"] == [{"life": 0, "boot_id": 0, "next_seq": 3, "is_up": True}]
        assert page["faults"] == [{"id": 1, "spec": "silence", "state": "active", "hits": 2}]
        assert sink.seen == [0]
        async with one.session.delete("/sim/faults") as response:
            assert await response.json() == {"removed": 1}
        await one.complete()
        await until(lambda: sink.seen == [0, 1, 2, 3])
        assert follower.counters.gaps == 0


@pytest.mark.asyncio
async def test_what_the_api_refuses():
    """Bad faults get 400 in the engine's shape and name what is known; unknown ids 404; a plain server has no such page."""
    async with engine() as one:
        for body in (b'{"fault": "dorp"}', b"{", b'{"fault": "drop", "engine": 3}', b'{"fault": "drop", "rank": 1}'):
            async with one.session.post("/sim/faults", data=body) as response:
                assert response.status == 400
                assert (await response.json())["error"]["type"] == "BadRequestError"
        async with one.session.delete("/sim/faults/7") as response:
            assert response.status == 404
        given = await one.give(spec="hang:at=1h")
        async with one.session.delete(f"/sim/faults/{given['id']}") as response:
            assert await response.json() == {"removed": 1}
    async with engine(dev_mode=False) as one:
        assert await one.status("/sim/faults") == 404


@pytest.mark.asyncio
async def test_a_crash_in_mid_stream():
    """The answer ends in a reset after its pieces, the port is gone, then a cold engine of another identity is there."""
    latency = LatencyConfig(decode_step_s=0.005)
    async with engine("crash:after=3,down=600ms", latency=latency) as one, follow(one) as (sink, _):
        prompt = [7] * 33
        await one.complete(prompt)
        assert await one.complete(prompt) == 32
        first_identity = await identity(one)
        await until(lambda: sink.seen == [0])
        body = {"prompt": prompt, "max_tokens": 500, "ignore_eos": True, "stream": True}
        assert await streamed(one, body) == (3, False)
        assert await one.status() is None
        await until_served(one)
        assert await identity(one) > first_identity
        assert await one.complete(prompt) == 0
        await until(lambda: sink.seen == [0, "life", 0])
        assert (await one.faults())["streams"][0] == {"life": 1, "boot_id": 1, "next_seq": 1, "is_up": True}


async def streamed(one: Engine, body: dict) -> tuple[int, bool]:
    """Pieces of an answer that came, and whether it came to its end."""
    pieces = 0
    try:
        async with one.session.post("/v1/completions", json=body) as response:
            async for line in response.content:
                pieces += line.startswith(b"data")
    except aiohttp.ClientError:
        return pieces, False
    return pieces, True


async def identity(one: Engine) -> float:
    """What the engine shows of its start."""
    async with one.session.get("/metrics") as response:
        page = await response.text()
    return float(page.split("\nprocess_start_time_seconds ")[1].split()[0])


@pytest.mark.asyncio
async def test_a_restart_hidden_by_overtaking():
    """Same identity, and the numbers go on where the old life stopped: only the replayed bytes tell."""
    async with engine() as one, follow(one) as (sink, _):
        for _ in range(3):
            await one.complete()
        await until(lambda: sink.seen == [0, 1, 2])
        before = await identity(one)
        await one.give(fault="restart", overtaking=True, down="100ms")
        await until(lambda: "life" in sink.seen)
        await until_served(one)
        await one.complete()
        await until(lambda: sink.seen[-1:] == [3])
        assert sink.seen == [0, 1, 2, "life", 0, 1, 2, 3]
        assert all(decode_batch(payload).batch.events == [] for payload in sink.payloads[3:6])
        assert await identity(one) == before


@pytest.mark.asyncio
async def test_a_cut_network():
    """The event ports are gone, HTTP is not; afterwards the missed batches come by replay and nothing was lost."""
    async with engine() as one, follow(one) as (sink, follower):
        await one.complete()
        given = await one.give(fault="cut")
        await until(lambda: sink.statuses[-1] == "lost")
        await one.complete()
        async with one.session.delete(f"/sim/faults/{given['id']}") as response:
            assert response.status == 200
        await until(lambda: sink.statuses[-1] == "live")
        await one.complete()
        await until(lambda: sink.seen == [0, 1, 2])
        assert follower.counters.connections == 2


@pytest.mark.asyncio
async def test_a_hung_engine():
    """It accepts and does not answer, its steps stand still; then everything that waited is answered."""
    async with engine(latency=LatencyConfig()) as one:
        slow = asyncio.create_task(one.session.post("/v1/completions", json={"prompt": [1] * 17, "max_tokens": 60}))
        await asyncio.sleep(0.05)
        given = await one.give(fault="hang")
        late = asyncio.create_task(one.status(timeout_s=20))
        with pytest.raises(TimeoutError):
            await one.status(timeout_s=0.3)
        assert (slow.done(), late.done()) == (False, False)
        async with one.session.delete(f"/sim/faults/{given['id']}") as response:
            assert response.status == 200
        assert await late == 200
        async with await slow as response:
            assert response.status == 200


@pytest.mark.asyncio
async def test_a_slow_start():
    """Refused, or unhealthy, for a while after the start and after every restart; the port is known at once."""
    async with engine("slow_start:for=400ms") as one:
        assert await one.status() is None
        await until_served(one)
        await one.give(fault="restart", down=0)
        await until_async(one.status, None)
        await until_served(one)
    async with engine("slow_start:for=400ms,mode=unhealthy") as one:
        assert await one.status() == 503
        assert await one.status("/sim/faults") == 200
        await until_served(one)


async def until_async(call: Callable[[], object], value: object) -> None:
    deadline_s = time.monotonic() + 10
    while await call() != value:
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_reset_answers():
    """Every streamed answer breaks at its piece; the engine lives on, whole answers are whole."""
    async with engine("reset:after=2,count=2") as one:
        body = {"prompt": [1] * 17, "max_tokens": 50, "ignore_eos": True, "stream": True}
        assert [await streamed(one, body) for _ in range(3)] == [(2, False), (2, False), (51, True)]
        assert await one.complete([1] * 17) == 16


@pytest.mark.asyncio
async def test_replay_endpoints_that_fail():
    """On the wire: no answer, no marker, a short window, a hole, batches one by one."""
    async with engine() as one:
        for _ in range(4):
            await one.complete()
        endpoint = one.served.address.replay_endpoint
        seen = {}
        for mode, keys in {
            "refused": {},
            "no_marker": {},
            "truncated": {"keep": 2},
            "holes": {"from": 1, "count": 2},
            "slow": {"interval": "50ms"},
        }.items():
            given = await one.give(fault="replay", mode=mode, **keys)
            seen[mode] = await asyncio.to_thread(ask, endpoint)
            async with one.session.delete(f"/sim/faults/{given['id']}") as response:
                assert response.status == 200
        assert {mode: [seq for _, seq in found] for mode, found in seen.items()} == {
            "refused": [],
            "no_marker": [0, 1, 2, 3],
            "truncated": [2, 3, -1],
            "holes": [0, 3, -1],
            "slow": [0, 1, 2, 3, -1],
        }
        assert seen["slow"][-1][0] > 0.24


@pytest.mark.asyncio
async def test_a_clock_that_jumps():
    """Batches are stamped an hour back, and right again afterwards."""
    async with engine() as one, follow(one) as (sink, _):
        await one.complete()
        given = await one.give(fault="clock", jump="-1h")
        await one.complete()
        async with one.session.delete(f"/sim/faults/{given['id']}") as response:
            assert response.status == 200
        await one.complete()
        await until(lambda: len(sink.payloads) >= 3)
        first, second, third = (decode_batch(payload).batch.ts for payload in sink.payloads[-3:])
        assert 3500 < first - second < 3601
        assert 3500 < third - second < 3601


def test_a_crash_behind_the_gateway(tmp_path: Path):
    """The client of the broken stream is told; others are served elsewhere; the engine comes back, empty and trusted."""
    with sim("--engines", "2", "--fault", "crash:after=5,down=1s,engine=0") as engines:
        workers = [f"--worker={one['url']},events={one['events']},replay={one['replay']}" for one in engines]
        options = ("--policy", "round_robin", "--tokenizer", engines[0]["tokenizer"])
        with running_gateway(tmp_path / "log", *options, *workers) as gateway:
            gateway.await_workers(lambda worker: worker["trust"]["level"] == "synced")
            body = {"prompt": [3] * 40, "max_tokens": 200, "ignore_eos": True, "stream": True}
            endings = [stream_ending(gateway.base_url, {**body, "prompt": [n] * 40}) for n in range(1, 5)]
            assert endings.count("broken") == 1
            assert endings.count("whole") == 3
            gateway.await_workers(
                lambda worker: worker["healthy"] and worker["trust"]["level"] == "synced", timeout_s=30
            )
            status, _, _ = post_json(gateway.base_url + "/v1/completions", {"prompt": [9] * 40, "max_tokens": 2})
            assert status == 200


def stream_ending(base_url: str, body: dict) -> str:
    """How a streamed answer ends for a client of the gateway."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(base_url + "/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return "whole" if b"data: [DONE]" in response.read() else "broken"
    except (OSError, http.client.HTTPException):
        return "broken"


def test_a_bad_fault_ends_the_command():
    """`kvatlas sim` says what was given and what is known, before any engine starts."""
    for spec, complaint in (("dorp:p=1", "known faults: drop, duplicate"), ("drop:engine=2", "engines 0 to 1")):
        done = subprocess.run(
            [sys.executable, "-m", "kvatlas", "sim", "--engines", "2", "--fault", spec],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode != 0
        assert spec in done.stderr
        assert complaint in done.stderr
