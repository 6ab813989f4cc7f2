"""`kvatlas keeper` between a real publisher and real subscribers: crashes, restarts, tiny windows, losses."""

import asyncio
import contextlib
import itertools
import json
import signal
import subprocess
import sys
import time
import urllib.request
from functools import partial

import pytest

from kvatlas.clock import SystemClock
from kvatlas.errors import ConfigError
from kvatlas.events import BlockRemoved, BlockStored, EventBatch
from kvatlas.fleet import EventSource, Trust, TrustState
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex
from kvatlas.stream import PublisherConfig, SubscriberConfig, ZmqEventPublisher, ZmqEventSubscriber

pytestmark = pytest.mark.e2e

ANY_PORT = "tcp://127.0.0.1:0"
SIZE = 4
clock_ticks = itertools.count(1)


class Engine:
    """A publisher with a small replay window, and the truth about its blocks: one chain a text."""

    def __init__(self, buffer_steps=10_000, endpoint=ANY_PORT, replay_endpoint=ANY_PORT):
        config = PublisherConfig(endpoint, replay_endpoint, bind=True, buffer_steps=buffer_steps)
        deadline_s = time.monotonic() + 5
        while True:
            try:
                self.publisher = ZmqEventPublisher(config)
                break
            except ConfigError:  # ZMQ gives a port back a moment later
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
        self.endpoint, self.replay_endpoint = self.publisher.endpoint, self.publisher.replay_endpoint
        self.resident = {}
        self.sent = 0

    def publish(self, *events):
        self.sent += 1
        self.publisher.publish(EventBatch(1_000.0 + next(clock_ticks), list(events)))

    def store(self, text):
        """Three blocks whose tokens are the text's number."""
        tokens = [text] * (3 * SIZE)
        hashes = [10 * text + block for block in range(3)]
        self.publish(BlockStored(hashes, None, tokens, SIZE, medium="GPU"))
        self.resident[text] = 3 * SIZE

    def evict(self, text):
        """The last block of a text goes."""
        self.publish(BlockRemoved([10 * text + 2], "GPU"))
        self.resident[text] = 2 * SIZE

    def work(self, *texts):
        """Store some texts, and evict from every second one."""
        for text in texts:
            self.store(text)
            if text % 2:
                self.evict(text)

    def close(self):
        self.publisher.close()


class KeeperProcess:
    """The command as a user runs it."""

    def __init__(self, engine, folder, *arguments, publish=ANY_PORT, serve_replay=ANY_PORT):
        self.arguments = [
            sys.executable, "-m", "kvatlas", "keeper", "--events", engine.endpoint, "--replay", engine.replay_endpoint,
            "--data", str(folder), "--publish", publish, "--serve-replay", serve_replay, "--status-port", "0",
            "--probe-s", "0.5", "--json", *arguments,
        ]  # fmt: skip
        self.log = folder.with_suffix(".log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.arguments, stdout=subprocess.PIPE, stderr=log)
        text = b""
        while not text.rstrip().endswith(b"}"):
            line = self.process.stdout.readline()
            assert line, self.log.read_text()
            text += line
        self.ready = json.loads(text)

    @property
    def status(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ready['status_port']}/status", timeout=5) as answer:
            return json.load(answer)

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        status = self.process.wait(timeout=10)
        self.process.stdout.close()
        return status


@contextlib.contextmanager
def keeping(engine, folder, *arguments, **endpoints):
    keeper = KeeperProcess(engine, folder, *arguments, **endpoints)
    try:
        yield keeper
    finally:
        if keeper.process.poll() is None:
            keeper.end(signal.SIGKILL)


class Consumer:
    """A subscriber with an index behind it, as the gateway has one."""

    def __init__(self, ready):
        self.index = PrefixIndex(BlockKeyHasher(3))
        self.index.add_worker("w", block_size=SIZE)
        self.trust = TrustState()
        self.source = EventSource("w", self.index, self.trust, SystemClock())
        config = SubscriberConfig(
            ready["publish"], ready["replay"], replay_timeout_s=1.0, retry_s=0.05, probe_s=0.5, reconnect_max_s=0.2
        )
        self.subscriber = ZmqEventSubscriber(config, self.source, SystemClock())
        self.task = asyncio.create_task(self.subscriber.run())

    def knows(self, engine):
        """Whether its index answers what is true, about every text."""
        return self.trust.level is Trust.SYNCED and self.held(engine) == engine.resident

    def held(self, engine):
        found = {}
        for text in engine.resident:
            match = self.index.match([text] * (3 * SIZE + 1)).get("w")
            found[text] = match.hit_tokens if match else 0
        return found


@contextlib.asynccontextmanager
async def consuming(ready):
    consumer = Consumer(ready)
    try:
        yield consumer
    finally:
        consumer.subscriber.close()
        await consumer.task


async def until(condition, what="", timeout_s=20.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s in vain: {what}"
        await asyncio.sleep(0.02)


async def kept(keeper, engine):
    """The keeper has all that the engine sent."""
    await until(lambda: keeper.status["last_engine_seq"] == engine.sent - 1, "the keeper to catch up")


@pytest.fixture(name="engine")
def _engine():
    engine = Engine(buffer_steps=8)
    yield engine
    engine.close()


@pytest.mark.asyncio
async def test_late_subscribers_get_everything_although_the_engine_keeps_eight_batches(engine, tmp_path):
    """Two that come when the engine has long forgotten the beginning are synced, without a gap, and follow live."""
    with keeping(engine, tmp_path / "data") as keeper:
        await until(lambda: keeper.status["serving"], "the keeper to be live")
        for text in range(1, 200):
            engine.work(text)
        await kept(keeper, engine)
        async with consuming(keeper.ready) as first, consuming(keeper.ready) as second:
            await until(lambda: first.knows(engine) and second.knows(engine), "both to know everything")
            engine.work(500, 501)
            await until(lambda: first.knows(engine) and second.knows(engine), "both to follow")
            assert first.source.stats.gaps == second.source.stats.gaps == 0
            assert first.source.stats.batches == engine.sent
        assert keeper.end() == 0


@pytest.mark.asyncio
async def test_a_keeper_killed_in_the_middle_goes_on_and_its_consumer_ends_right(tmp_path):
    """Killed with -9, batches meanwhile, start again on the same ports: same numbers, no new life, no gap."""
    engine = Engine(buffer_steps=1_000)
    try:
        with keeping(engine, tmp_path / "data") as keeper:
            await until(lambda: keeper.status["serving"], "the keeper to be live")
            async with consuming(keeper.ready) as consumer:
                engine.work(*range(1, 100))
                await until(lambda: consumer.knows(engine), "the consumer to know everything")
                keeper.end(signal.SIGKILL)
                engine.work(*range(100, 150))
                with (folder := tmp_path / "data" / "0000000001-000000.kvj").open("ab") as file:
                    file.write(b"a record that the crash tore")
                ports = {"publish": keeper.ready["publish"], "serve_replay": keeper.ready["replay"]}
                with keeping(engine, tmp_path / "data", **ports) as again:
                    assert again.ready["resumed"]
                    assert again.status["cut_bytes"] == 28
                    await until(lambda: consumer.knows(engine), "the consumer to know everything again")
                    assert again.status["life"] == 1
                    assert consumer.source.stats.lives == 1
                    assert consumer.source.stats.gaps == 0
                    assert consumer.source.stats.batches == engine.sent
                    assert again.end() == 0
                assert folder.exists()
    finally:
        engine.close()


@pytest.mark.asyncio
async def test_kills_at_any_moment_of_a_running_stream_lose_nothing(tmp_path):
    """Killed four times while batches flow and compactions run: the consumer ends right, and was never told of a gap."""
    engine = Engine(buffer_steps=5_000)
    stop = asyncio.Event()

    async def flow():
        for text in itertools.count(1):
            if stop.is_set():
                return
            engine.work(text % 60 + 60 * (text // 600))
            if text % 60 == 59:
                for old in [each for each, tokens in engine.resident.items() if tokens]:
                    engine.publish(BlockRemoved([10 * old + block for block in range(3) for _ in range(9)], "GPU"))
                    engine.resident[old] = 0
            await asyncio.sleep(0.003)

    flowing = asyncio.create_task(flow())
    folder, ports, consumer = tmp_path / "data", {}, None
    try:
        for wait_s in (0.7, 1.2, 0.9, 1.4, 1.0):
            with keeping(engine, folder, "--max-bytes", "60000", **ports) as keeper:
                ports = {"publish": keeper.ready["publish"], "serve_replay": keeper.ready["replay"]}
                consumer = consumer or Consumer(keeper.ready)
                await asyncio.sleep(wait_s)
                if wait_s == 1.0:
                    stop.set()
                    await flowing
                    await until(partial(consumer.knows, engine), "the consumer to know everything")
                    assert consumer.source.stats.gaps == 0
                    assert keeper.status["life"] > 1  # compactions there were
                keeper.end(signal.SIGKILL)
    finally:
        stop.set()
        await flowing
        engine.close()
        if consumer is not None:
            consumer.subscriber.close()
            await consumer.task


@pytest.mark.asyncio
async def test_an_engine_that_restarts_is_a_new_life_for_everybody(engine, tmp_path):
    """Also when it happens while the keeper is down, and the new life has more batches than the old one had."""
    with keeping(engine, tmp_path / "data") as keeper:
        await until(lambda: keeper.status["serving"], "the keeper to be live")
        async with consuming(keeper.ready) as consumer:
            engine.work(1, 2, 3)
            await until(lambda: consumer.knows(engine), "the first life")
            engine.close()
            second = Engine(8, engine.endpoint, engine.replay_endpoint)
            second.work(4)
            await until(lambda: consumer.knows(second), "the second life")
            assert keeper.status["life"] == 2
            keeper.end(signal.SIGKILL)
            second.close()
            third = Engine(1_000, engine.endpoint, engine.replay_endpoint)
            third.work(*range(5, 40))
            ports = {"publish": keeper.ready["publish"], "serve_replay": keeper.ready["replay"]}
            with keeping(third, tmp_path / "data", **ports) as again:
                await until(lambda: consumer.knows(third), "the third life")
                assert again.status["life"] == 3
                third.resident |= {1: 0, 2: 0, 3: 0, 4: 0}
                assert consumer.held(third) == third.resident
            third.close()


@pytest.mark.asyncio
async def test_what_the_engine_cannot_return_stays_a_gap(engine, tmp_path):
    """The keeper comes when the engine kept only its last eight batches: consumers are told so, and are not synced."""
    engine.work(*range(1, 50))
    with keeping(engine, tmp_path / "data") as keeper:
        await kept(keeper, engine)
        async with consuming(keeper.ready) as consumer:
            await until(lambda: consumer.trust.level is Trust.PARTIAL, "the consumer to be partial")
            assert consumer.source.stats.gaps == 1
            assert keeper.status["keeper"]["lost_batches"] == engine.sent - 8


@pytest.mark.asyncio
async def test_a_full_journal_is_compacted_under_a_running_consumer(engine, tmp_path):
    """Disk use stays bounded, the consumer ends right each time, a late one gets the resident blocks and no gap."""
    with keeping(engine, tmp_path / "data", "--max-bytes", "20000") as keeper:
        await until(lambda: keeper.status["serving"], "the keeper to be live")
        async with consuming(keeper.ready) as consumer:
            for wanted in (1, 2):
                for text in range(200 * wanted, 200 * wanted + 200):
                    engine.store(text)
                    engine.publish(BlockRemoved([10 * text + block for block in range(3)], "GPU"))
                    engine.resident[text] = 0
                    if text % 40 == 0:
                        engine.work(text + 1_000)
                await kept(keeper, engine)
                await until(lambda: keeper.status["keeper"]["compactions"] >= wanted, "a compaction")  # noqa: B023
            await until(lambda: keeper.status["journal_bytes"] < 25_000, "the journal to be small")
            await until(lambda: consumer.knows(engine), "the consumer to know everything")
            async with consuming(keeper.ready) as late:
                await until(lambda: late.knows(engine), "the late consumer to know everything")
                assert late.source.stats.gaps == 0
                assert late.source.stats.batches < 200
            engine.work(5_000)
            await until(lambda: consumer.knows(engine), "the consumer to follow")
        used = sum(path.stat().st_size for path in (tmp_path / "data").iterdir())
        assert used < 30_000
        keeper.end(signal.SIGKILL)
    with keeping(engine, tmp_path / "data") as again:
        await until(lambda: again.status["serving"], "the restarted keeper to be live")
        async with consuming(again.ready) as consumer:
            await until(lambda: consumer.knows(engine), "a consumer of the restarted keeper")
            assert consumer.source.stats.gaps == 0


@pytest.mark.asyncio
async def test_consumers_are_not_left_believing_in_an_engine_that_is_gone(engine, tmp_path):
    """When the keeper loses the engine, its consumers become stale; when it is back, unchanged, they are synced."""
    with keeping(engine, tmp_path / "data") as keeper:
        await until(lambda: keeper.status["serving"], "the keeper to be live")
        async with consuming(keeper.ready) as consumer:
            engine.work(1, 2)
            await until(lambda: consumer.knows(engine), "the consumer to know everything")
            engine.close()
            await until(lambda: consumer.trust.level is Trust.STALE, "the consumer to be stale")
            assert not keeper.status["serving"]


def test_the_status_page_speaks_prometheus_too(engine, tmp_path):
    """Every number of the status has a metric with a type."""
    with keeping(engine, tmp_path / "data") as keeper:
        url = f"http://127.0.0.1:{keeper.ready['status_port']}/metrics"
        with urllib.request.urlopen(url, timeout=5) as answer:
            text = answer.read().decode()
    assert "# TYPE kvatlas_keeper_next_seq gauge\nkvatlas_keeper_next_seq 0\n" in text
    assert "# TYPE kvatlas_keeper_compactions_total counter\n" in text


def test_the_resident_blocks_can_be_printed(engine, tmp_path):
    """`--dump` prints events that make an empty cache hold what the journal says, a line each."""
    with keeping(engine, tmp_path / "data") as keeper:
        engine.work(1, 2)
        asyncio.run(kept(keeper, engine))
        assert keeper.end() == 0
    shown = subprocess.run([*keeper.arguments, "--dump"], capture_output=True, check=True, timeout=30)
    events = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [event["block_hashes"] for event in events] == [[10, 11], [20, 21, 22]]
    assert events[0]["token_ids"] == [1] * 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--publish", "nonsense"], "cannot bind 'nonsense'"),
        (["--events", "tcp://*:5"], "--events 'tcp://*:5' cannot be connected to"),
    ],
)
def test_bad_arguments_end_the_command_with_one_line(engine, tmp_path, arguments, message):
    """Exit code 2, and the message names the option's value."""
    command = [
        sys.executable, "-m", "kvatlas", "keeper", "--events", engine.endpoint, "--data", str(tmp_path / "data"),
        "--serve-replay", ANY_PORT, "--publish", ANY_PORT,
    ]  # fmt: skip
    done = subprocess.run([*command, *arguments], check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
