"""Streams too busy to be woken for: read by the clock while batches come thick and fast, watched again when they rest."""

import asyncio
import gc
import itertools
import time
import weakref
from contextlib import asynccontextmanager

import pytest
import zmq

from kvatlas.clock import SystemClock
from kvatlas.events import BlockRemoved, EventBatch, encode_batch
from kvatlas.stream import SubscriberConfig, ZmqEventSubscriber
from kvatlas.stream.pacer import ReadPacer
from support.engines import MARKER, open_pub, subscribed, until
from support.gateway import LOOPS, on_both_loops

pytestmark = pytest.mark.e2e

PROMPTLY_S = 1.0  # a slow machine's; a batch takes a millisecond or two
_names = itertools.count()


def payload(seq: int) -> bytes:
    return encode_batch(EventBatch(1_000.0 + seq, [BlockRemoved([seq], "GPU")]))


class Engine:
    """A publisher by hand; `answer` returns what replay is asked for."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:*") -> None:
        context = zmq.Context.instance()
        self.pub, self.router = open_pub(context), context.socket(zmq.ROUTER)
        for socket in (self.pub, self.router):
            socket.setsockopt(zmq.LINGER, 0)
            socket.set_hwm(0)
        self.pub.bind(endpoint)
        self.endpoint = self.pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"
        self.count = 0

    def publish(self, *, heard: bool = True) -> None:
        seq, self.count = self.count, self.count + 1
        if heard:
            self.pub.send_multipart([b"kv", seq.to_bytes(8, "big"), payload(seq)])

    async def be_busy(self, seconds: float = 0.1) -> None:
        """Four batches or so a millisecond."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            for _ in range(4):
                self.publish()
            await asyncio.sleep(0.001)

    def answer(self) -> bool:
        """Answer a question, if there is one."""
        if not self.router.poll(0):
            return False
        identity, _, start = self.router.recv_multipart()
        for seq in range(int.from_bytes(start, "big"), self.count):
            self.router.send_multipart([identity, b"", b"", seq.to_bytes(8, "big"), payload(seq)])
        self.router.send_multipart([identity, b"", b"", MARKER, b""])
        return True

    def close(self) -> None:
        self.pub.close(linger=0)
        self.router.close(linger=0)


class Sink:
    """Numbers as they came, with what was told besides; it may take its time over each batch."""

    def __init__(self) -> None:
        self.seqs: list[int] = []
        self.told: list[object] = []
        self.status = ""
        self.batch_s = 0.0
        self.on_each = lambda: None

    def on_batch(self, seq: int, data: bytes) -> None:
        assert data == payload(seq)
        self.seqs.append(seq)
        if self.batch_s:
            time.sleep(self.batch_s)
        self.on_each()

    def on_life(self, reason: str) -> None:
        self.told.append(reason)

    def on_gap(self, first_seq: int, last_seq: int | None) -> None:
        self.told.append((first_seq, last_seq))

    def on_status(self, status: str, reason: str) -> None:
        self.status = status


class RunSink(Sink):
    """The same in runs, of which it keeps the lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[int] = []

    def on_batches(self, first_seq: int, payloads: list[bytes]) -> None:
        self.runs.append(len(payloads))
        for seq, data in enumerate(payloads, first_seq):
            self.on_batch(seq, data)


@asynccontextmanager
async def following(engine: Engine, sink: Sink, *, replay: bool = False, **config: object):
    """A subscriber that has subscribed. No exception may reach the loop meanwhile, nor just after it ended."""
    failures: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    settings = {"probe_s": 30.0, "reconnect_max_s": 0.2, **config}
    subscriber = ZmqEventSubscriber(
        SubscriberConfig(engine.endpoint, engine.replay_endpoint if replay else None, **settings), sink, SystemClock()
    )
    task = asyncio.create_task(subscriber.run())
    try:
        await subscribed(engine.pub)
        await until(lambda: subscriber.counters.connections == 1, "connected")
        yield subscriber
    finally:
        subscriber.close()
        await task
        await asyncio.sleep(4 * ReadPacer.of(loop).interval_s)
        engine.close()
        assert failures == []


async def paced(subscriber: ZmqEventSubscriber, engine: Engine) -> None:
    """Publish until the stream is read by the clock."""
    await engine.be_busy(0.02)
    deadline_s = time.monotonic() + 10
    while not subscriber._is_paced:
        assert time.monotonic() < deadline_s, "never read by the clock"
        await engine.be_busy(0.005)


async def arrives_promptly(engine: Engine, sink: Sink) -> None:
    """One batch, and no other to bring it along."""
    begun_s = time.monotonic()
    engine.publish()
    await until(lambda: len(sink.seqs) == engine.count, "the batch")
    assert time.monotonic() - begun_s < PROMPTLY_S


@pytest.mark.parametrize("sink_class", [Sink, RunSink])
@on_both_loops
async def test_a_busy_stream_is_read_by_the_clock_until_it_rests(sink_class) -> None:
    """All arrives once and in order; quiet again, its socket is watched and a single batch arrives at once."""
    engine, sink = Engine(), sink_class()
    async with following(engine, sink) as subscriber:
        for _ in range(3):
            await paced(subscriber, engine)
            assert not asyncio.get_running_loop().remove_reader(subscriber._link._socket.fileno())
            await engine.be_busy()
            await until(lambda: len(sink.seqs) == engine.count, "all batches")
            await until(lambda: not subscriber._is_paced, "watched again")
            for _ in range(5):
                await asyncio.sleep(0.02)  # alone, each of them
                assert not subscriber._is_paced
                await arrives_promptly(engine, sink)
        assert sink.seqs == list(range(engine.count))
        assert sink.told == []
        assert sink.status == "live"
        assert subscriber.counters.batches == engine.count
        if isinstance(sink, RunSink):
            assert max(sink.runs) > 1


@on_both_loops
async def test_idle_streams_beside_a_busy_one() -> None:
    """They stay watched, and what they bring waits for nobody."""
    busy, idle = Engine(), [Engine() for _ in range(3)]
    sinks = [Sink() for _ in idle]
    async with (
        following(busy, Sink()) as subscriber,
        following(idle[0], sinks[0]) as first,
        following(idle[1], sinks[1]) as second,
        following(idle[2], sinks[2]) as third,
    ):
        await paced(subscriber, busy)
        traffic = asyncio.create_task(busy.be_busy(20.0))
        for engine, sink in zip(idle, sinks, strict=True):
            await arrives_promptly(engine, sink)
            await asyncio.sleep(0.05)
            await arrives_promptly(engine, sink)
        assert subscriber._is_paced
        assert not any(each._is_paced for each in (first, second, third))
        traffic.cancel()


@on_both_loops
async def test_busy_streams_share_a_timer() -> None:
    """All of them complete, each in its order."""
    engines, sinks = [Engine() for _ in range(3)], [RunSink() for _ in range(3)]
    async with (
        following(engines[0], sinks[0]) as first,
        following(engines[1], sinks[1]) as second,
        following(engines[2], sinks[2]) as third,
    ):
        await asyncio.gather(*[engine.be_busy(0.2) for engine in engines])
        await until(
            lambda: all(len(sink.seqs) == engine.count for sink, engine in zip(sinks, engines, strict=True)), "all"
        )
        for sink in sinks:
            assert sink.seqs == list(range(len(sink.seqs)))
        await until(lambda: not any(each._is_paced for each in (first, second, third)), "watched again")
        await arrives_promptly(engines[1], sinks[1])


@on_both_loops
async def test_a_hole_in_a_busy_stream_is_filled() -> None:
    """Answers of replay are heard of at once although the live socket is not watched; nothing overtakes them."""
    engine, sink = Engine(), RunSink()
    async with following(engine, sink, replay=True) as subscriber:
        await until(engine.answer, "the first question")
        await until(lambda: sink.status == "live", "live")
        await paced(subscriber, engine)
        for _ in range(3):
            engine.publish(heard=False)
        traffic = asyncio.create_task(engine.be_busy(0.2))
        await until(engine.answer, "the question about the hole")
        await traffic
        await until(lambda: len(sink.seqs) == engine.count and sink.status == "live", "all batches")
        assert sink.seqs == list(range(engine.count))
        assert sink.told == []


@on_both_loops
async def test_the_end_of_a_busy_publisher_is_noticed() -> None:
    """The connection is watched all the while: all that was sent is delivered, then the stream is lost."""
    engine, sink = Engine(), Sink()
    async with following(engine, sink) as subscriber:
        await paced(subscriber, engine)
        await until(lambda: len(sink.seqs) == engine.count, "all batches")
        engine.pub.close(linger=0)
        await until(lambda: sink.status == "lost", "lost")
        await until(lambda: not subscriber._is_paced, "watched again")
        assert sink.seqs == list(range(engine.count))


@on_both_loops
async def test_close_while_read_by_the_clock() -> None:
    """Nothing is delivered afterwards and no timer is left, neither of its own nor with the others' reading."""
    engine, sink = Engine(), Sink()
    loop = asyncio.get_running_loop()
    async with following(engine, sink) as subscriber:
        await paced(subscriber, engine)
        subscriber.close()
        seen = len(sink.seqs)
        engine.publish()
        await asyncio.sleep(0.05)
        assert len(sink.seqs) == seen
        assert all(timer.cancelled() for timer in subscriber._timers.values())
        assert not ReadPacer.of(loop)._waiting


@on_both_loops
async def test_close_by_the_sink_in_the_midst_of_a_run() -> None:
    """Nothing is delivered afterwards: the rest of the run stays."""
    engine, sink = Engine(), Sink()
    async with following(engine, sink) as subscriber:
        await paced(subscriber, engine)
        await until(lambda: len(sink.seqs) == engine.count, "all batches")
        last = engine.count + 10
        sink.on_each = lambda: subscriber.close() if sink.seqs[-1] == last else None
        for _ in range(50):
            engine.publish()
        await until(lambda: sink.seqs[-1] >= last, "the batch at which it closes")
        await asyncio.sleep(0.02)
        assert sink.seqs[-1] == last
        assert subscriber.last_seq == last


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_ends_while_its_stream_is_busy_is_forgotten(name: str) -> None:
    """Neither the loop nor its subscriber stays in memory for a reading that was due."""

    async def follow_for_a_moment() -> list[weakref.ref]:
        engine = Engine()
        subscriber = ZmqEventSubscriber(SubscriberConfig(engine.endpoint), Sink(), SystemClock())
        task = asyncio.create_task(subscriber.run())
        await subscribed(engine.pub)
        await paced(subscriber, engine)
        subscriber.close()
        await task  # the loop ends before the clock strikes
        engine.close()
        return [weakref.ref(each) for each in (subscriber, asyncio.get_running_loop())]

    with asyncio.Runner(loop_factory=LOOPS[name]) as runner:
        ends = runner.run(follow_for_a_moment())
    del runner
    gc.collect()
    assert [end() for end in ends] == [None, None]


@on_both_loops
async def test_what_comes_during_a_long_delivery_is_read() -> None:
    """A slow receiver's backlog waits here, where it is bounded and counted, and not with the publisher."""
    engine, sink = Engine(f"inproc://busy-{next(_names)}"), Sink()
    async with following(engine, sink) as subscriber:
        await paced(subscriber, engine)
        sink.batch_s = 0.005
        for _ in range(200):
            engine.publish()
        await until(lambda: len(subscriber._inbox) > 50 and not subscriber._live_is_ready, "a backlog, all read")
        delivered = len(sink.seqs)
        assert subscriber._is_paced
        for _ in range(50):
            engine.publish()
        await until(lambda: len(sink.seqs) + len(subscriber._inbox) == engine.count, "all read")
        assert len(sink.seqs) - delivered < 30
        sink.batch_s = 0.0
        await until(lambda: len(sink.seqs) == engine.count, "all delivered")
