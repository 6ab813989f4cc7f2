"""A subscriber under load: faster streams than it can take, slow and damaged replays, many at once, and idle."""

import asyncio
import random
import threading
import time

import pytest
import zmq

from kvatlas.clock import SystemClock
from kvatlas.events import BlockRemoved, EventBatch, encode_batch
from kvatlas.stream import Spread, SubscriberConfig, ZmqEventSubscriber
from kvatlas.stream.zmq_link import ZmqLink
from support.engines import open_pub, subscribed, until
from support.live_links import LINKS, use_link

pytestmark = pytest.mark.e2e

MARKER = b"\xff" * 8


class Publisher:
    """A PUB and a ROUTER on a thread of their own; how replay answers can be changed."""

    def __init__(self, *, ring: int = 100_000) -> None:
        context = zmq.Context.instance()
        self.pub, self.router = open_pub(context), context.socket(zmq.ROUTER)
        self.router.set_hwm(0)
        self.endpoint = f"tcp://127.0.0.1:{self.pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay_endpoint = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"
        self.ring: list[tuple[int, bytes]] = []
        self.most = ring
        self.count = 0
        self.pause_s = 0.0
        self.markers_lost = 0
        self.questions: list[int] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def publish(self, *, heard: bool = True) -> None:
        seq, self.count = self.count, self.count + 1
        payload = encode_batch(EventBatch(1_000.0 + seq, [BlockRemoved([seq], "GPU")]))
        self.ring = [*self.ring[-self.most + 1 :], (seq, payload)] if len(self.ring) >= self.most else self.ring
        if not self.ring or self.ring[-1][0] != seq:
            self.ring.append((seq, payload))
        if heard:
            self.pub.send_multipart([b"", seq.to_bytes(8, "big"), payload])

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if not self.router.poll(10):
                continue
            identity, _, start_bytes = self.router.recv_multipart()
            start = int.from_bytes(start_bytes, "big")
            self.questions.append(start)
            for seq, payload in [entry for entry in self.ring if entry[0] >= start]:
                if self.pause_s and self._stopping.wait(self.pause_s):
                    return
                self.router.send_multipart([identity, b"", b"", seq.to_bytes(8, "big"), payload])
            if self.markers_lost:
                self.markers_lost -= 1
            else:
                self.router.send_multipart([identity, b"", b"", MARKER, b""])

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self.pub.close(linger=0)
        self.router.close(linger=0)


@pytest.fixture(name="publisher")
def _publisher():
    publishers = []

    def start(**options: int) -> Publisher:
        publishers.append(Publisher(**options))
        return publishers[-1]

    yield start
    for publisher in publishers:
        publisher.close()


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What subscribers read over: once our own TCP link, once libzmq's, which other endpoints take."""
    use_link(request.param, monkeypatch)


class Sink:
    """What was applied, what was lost, and the statuses in order; it may take its time over each batch."""

    def __init__(self) -> None:
        self.applied: list[int] = []
        self.lost: list[tuple[int, int | None]] = []
        self.lives = 0
        self.statuses: list[tuple[str, str]] = []
        self.batch_s = 0.0

    def on_life(self, reason: str) -> None:
        self.lives += 1

    def on_batch(self, seq: int, payload: bytes) -> None:
        self.applied.append(seq)
        if self.batch_s:
            time.sleep(self.batch_s)

    def on_gap(self, first_seq: int, last_seq: int | None) -> None:
        self.lost.append((first_seq, last_seq))

    def on_status(self, status: str, reason: str) -> None:
        self.statuses.append((status, reason))

    @property
    def status(self) -> str:
        return self.statuses[-1][0]


def known(sink: Sink, count: int) -> set[int]:
    """Numbers of batches that were applied or reported lost."""
    numbers = set(sink.applied)
    for first, last in sink.lost:
        numbers.update(range(first, count if last is None else last + 1))
    return numbers


class Following:
    """A subscriber that runs inside the `async with`."""

    def __init__(self, publisher: Publisher, *, replay: bool = True, **config: object) -> None:
        self.publisher = publisher
        self.sink = Sink()
        settings = {"replay_timeout_s": 0.3, "retry_s": 0.02, "probe_s": 30.0, "reconnect_max_s": 0.2, **config}
        replay_endpoint = publisher.replay_endpoint if replay else None
        self.subscriber = ZmqEventSubscriber(
            SubscriberConfig(publisher.endpoint, replay_endpoint, **settings), self.sink, SystemClock()
        )

    async def __aenter__(self) -> tuple[ZmqEventSubscriber, Sink]:
        self.task = asyncio.create_task(self.subscriber.run())
        await until(lambda: self.subscriber.counters.connections == 1, "connected")
        await subscribed(self.publisher.pub)
        return self.subscriber, self.sink

    async def __aexit__(self, *_: object) -> None:
        self.subscriber.close()
        await self.task


@pytest.mark.asyncio
async def test_a_slow_replay_is_waited_for_and_live_batches_wait_too(publisher) -> None:
    """Longer than the timeout as a whole, never silent for as long: one question; nothing is lost nor out of order."""
    engine = publisher()
    for _ in range(10):
        engine.publish()
    engine.pause_s = 0.1
    async with Following(engine) as (subscriber, sink):
        for _ in range(5):
            engine.publish()
            await asyncio.sleep(0.01)
        await until(lambda: sink.status == "live", "live")
        assert sink.applied == list(range(15))
        assert (sink.lost, subscriber.counters.failed_replays) == ([], 0)
        assert engine.questions == [0]


@pytest.mark.asyncio
async def test_a_lost_end_marker_costs_a_timeout_and_nothing_else(publisher) -> None:
    """All batches came, the marker did not: after the timeout the rest is asked for, and the stream is live."""
    engine = publisher()
    for _ in range(5):
        engine.publish()
    engine.markers_lost = 1
    async with Following(engine) as (subscriber, sink):
        await until(lambda: sink.status == "live", "live")
        assert (sink.applied, sink.lost) == ([0, 1, 2, 3, 4], [])
        assert subscriber.counters.failed_replays == 1
        assert engine.questions == [0, 4]


@pytest.mark.asyncio
async def test_a_window_that_was_cut_off_is_reported_and_what_is_left_applies(publisher) -> None:
    """The engine keeps three batches; of a longer gap the older ones are lost, with their numbers."""
    engine = publisher(ring=3)
    engine.publish()
    async with Following(engine) as (_, sink):
        await until(lambda: sink.status == "live", "live")
        for _ in range(9):
            engine.publish(heard=False)
        engine.publish()
        await until(lambda: sink.applied[-1] == 10, "the newest")
        assert sink.applied == [0, 8, 9, 10]
        assert sink.lost == [(1, 7)]


@pytest.mark.usefixtures("link")
@pytest.mark.asyncio
async def test_what_the_own_queue_drops_is_counted_told_and_fetched_again(publisher) -> None:
    """A burst of 3,000 into a queue of 100: not live meanwhile, each batch once and in order in the end."""
    engine = publisher()
    async with Following(engine, max_queue_batches=100) as (subscriber, sink):
        await until(lambda: sink.status == "live", "live")
        sink.batch_s = 0.0005
        for _ in range(3_000):
            engine.publish()
        await until(lambda: subscriber.counters.overflowed > 0, "overflow")
        assert sink.status == "syncing"
        assert "dropped here" in sink.statuses[-1][1]
        sink.batch_s = 0.0
        await until(lambda: sink.status == "live", "live again", 20)
        assert sink.applied == list(range(3_000))
        assert (sink.lost, sink.lives) == ([], 0)


@pytest.mark.usefixtures("link")
@pytest.mark.asyncio
async def test_what_the_own_queue_drops_is_lost_without_replay(publisher) -> None:
    """The same without a replay endpoint: reported as gaps, by the time the queue is empty at the latest; each is applied or lost."""
    engine = publisher()
    async with Following(engine, replay=False, max_queue_batches=100) as (subscriber, sink):
        sink.batch_s = 0.0005
        for _ in range(3_000):
            engine.publish()
        await until(lambda: subscriber.counters.overflowed > 0, "overflow")
        sink.batch_s = 0.0
        await until(lambda: sink.status == "live" and not len(subscriber._inbox), "live again")
        assert sink.applied == sorted(set(sink.applied))
        assert len(sink.applied) < 3_000
        assert known(sink, 3_000) == set(range(3_000))


@pytest.mark.usefixtures("link")
@pytest.mark.asyncio
async def test_a_stream_at_five_times_the_receivers_speed_blocks_nobody(publisher) -> None:
    """For two seconds: the publisher never waits, what is held is bounded, loss is told; afterwards it is caught up."""
    engine = publisher(ring=2_000)
    async with Following(engine, max_queue_batches=500) as (subscriber, sink):
        await until(lambda: sink.status == "live", "live")
        sink.batch_s, most_held, slowest_s = 0.001, 0, 0.0
        end_s = time.monotonic() + 2.0
        while time.monotonic() < end_s:
            for _ in range(25):
                begun_s = time.monotonic()
                engine.publish()
                slowest_s = max(slowest_s, time.monotonic() - begun_s)
            most_held = max(most_held, len(subscriber._inbox))
            await asyncio.sleep(0.005)
        assert slowest_s < 0.1
        assert most_held <= 500
        assert subscriber.counters.overflowed > 0
        assert "syncing" in [status for status, _ in sink.statuses[-20:]]
        sink.batch_s = 0.0
        await until(lambda: sink.status == "live" and sink.applied[-1] == engine.count - 1, "caught up", 20)
        assert known(sink, engine.count) == set(range(engine.count))
        assert sink.applied == sorted(set(sink.applied))


@pytest.mark.asyncio
async def test_a_distrusted_stream_is_lost_until_it_brings_a_batch(publisher) -> None:
    """Answers of replay without a batch prove nothing; a batch in order does."""
    engine = publisher()
    engine.publish()
    async with Following(engine) as (subscriber, sink):
        await until(lambda: sink.status == "live", "live")
        subscriber.distrust("the counters move")
        subscriber.probe_soon()
        await until(lambda: len(engine.questions) == 2, "asked")
        await asyncio.sleep(0.1)
        assert sink.statuses[-1] == ("lost", "the counters move")
        engine.publish()
        await until(lambda: sink.status == "live", "live again")
        assert sink.applied == [0, 1]


@pytest.mark.asyncio
async def test_a_hundred_and_fifty_subscribers_at_once(publisher) -> None:
    """More sockets than ZMQ allows by default would take 1,000: all live within seconds, no file left open after."""
    engines = [publisher() for _ in range(5)]
    for engine in engines:
        engine.publish()
    following = [Following(engines[number % 5]) for number in range(150)]
    tasks = [asyncio.create_task(one.subscriber.run()) for one in following]
    await until(lambda: all(one.sink.statuses and one.sink.status == "live" for one in following), "all live", 20)
    assert all(one.sink.applied == [0] for one in following)
    for one in following:
        one.subscriber.close()
    await asyncio.gather(*tasks)


@pytest.mark.asyncio
async def test_idle_subscribers_cost_next_to_nothing(publisher) -> None:
    """Forty subscribers without traffic: less than 5 % of a core, and no more questions than one each in 2 s."""
    engine = publisher()
    engine.publish()
    following = [Following(engine, probe_s=5.0) for _ in range(40)]
    tasks = [asyncio.create_task(one.subscriber.run()) for one in following]
    await until(lambda: all(one.sink.statuses and one.sink.status == "live" for one in following), "all live", 20)
    asked, cpu_s = len(engine.questions), time.process_time()
    await asyncio.sleep(2.0)
    cpu_s = time.process_time() - cpu_s
    assert len(engine.questions) == asked
    assert cpu_s < 0.1
    for one in following:
        one.subscriber.close()
    await asyncio.gather(*tasks)


@pytest.mark.asyncio
async def test_tail_polls_become_rarer_while_a_stream_stays_quiet(publisher) -> None:
    """From every 50 ms down to every 400 ms: in two seconds at most a dozen questions, not forty."""
    engine = publisher()
    engine.publish()
    async with Following(engine, probe_s=0.05, probe_max_s=0.4) as (_, sink):
        await until(lambda: sink.status == "live", "live")
        await asyncio.sleep(2.0)
        assert 4 <= len(engine.questions) - 1 <= 12
        assert sink.applied == [0]


@pytest.mark.asyncio
async def test_queues_inside_zmq(publisher) -> None:
    """Replay is read without a limit, or the publisher drops in the middle of its answer; live is bounded."""
    async with Following(publisher()) as (subscriber, _):
        assert subscriber._replay_socket.getsockopt(zmq.RCVHWM) == 0
    config = SubscriberConfig("inproc://a-queue", max_queue_batches=123)
    link = ZmqLink(zmq.Context.instance(), config, Spread())
    link.open(lambda: None)
    assert link._live.getsockopt(zmq.RCVHWM) == 123
    link.close()


def test_pauses_are_spread_by_up_to_a_half() -> None:
    """Two subscribers draw different pauses, none shorter than configured: reconnects do not come in step."""
    config = SubscriberConfig("tcp://h:1", reconnect_s=0.1, reconnect_max_s=5.0)
    pauses = [Spread(random.Random(seed)).pauses_ms(config) for seed in range(50)]
    assert all(100 <= first <= 150 and 5_000 <= longest <= 7_500 for first, longest in pauses)
    assert len(set(pauses)) > 40
