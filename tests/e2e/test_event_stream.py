"""Publisher and subscriber over real sockets on loopback, with engines that restart, drop, lag and speak old dialects.

Scenario numbers are those that tests/README.md speaks of.
"""

import asyncio
import contextlib
import itertools
import threading
import time

import msgspec
import pytest
import uvloop
import zmq

from kvatlas.clock import SystemClock
from kvatlas.errors import ConfigError, PublisherClosed
from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, decode_batch, encode_batch
from kvatlas.stream import (
    PublisherConfig,
    SubscriberConfig,
    ZmqEventPublisher,
    ZmqEventSubscriber,
)
from support.live_links import LINKS, quiet_port, use_link

pytestmark = pytest.mark.e2e

ANY_PORT = "tcp://127.0.0.1:0"
MARKER = b"\xff" * 8
clock_ticks = itertools.count(1)


def batch(number):
    """A batch that names itself; its clock never stands still."""
    return EventBatch(1_000.0 + next(clock_ticks), [BlockRemoved([number], "GPU")])


def number_of(payload):
    return decode_batch(payload).batch.events[0].block_hashes[0]


def publisher(endpoint=ANY_PORT, replay_endpoint=ANY_PORT, **config):
    return ZmqEventPublisher(PublisherConfig(endpoint, replay_endpoint, bind=True, **config))


def restarted(endpoint, replay_endpoint=None):
    """A publisher where another one just closed: ZMQ gives the port back a moment later."""
    deadline_s = time.monotonic() + 5
    while True:
        try:
            return publisher(endpoint, replay_endpoint)
        except ConfigError:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


def quiet_endpoint():
    """A free endpoint that nobody else takes meanwhile."""
    return f"tcp://127.0.0.1:{quiet_port()}"


class Sink:
    """Writes down what it is told; `seen` has batches as (seq, number), and everything else in between."""

    def __init__(self):
        self.seen = []
        self.statuses = []
        self.reasons = []

    def on_life(self, reason):
        self.seen.append("life")

    def on_batch(self, seq, payload):
        self.seen.append((seq, number_of(payload)))

    def on_gap(self, first_seq, last_seq):
        self.seen.append(("gap", first_seq, last_seq))

    def on_status(self, status, reason):
        self.statuses.append(status)
        self.reasons.append(reason)

    @property
    def status(self):
        return self.statuses[-1] if self.statuses else None


@contextlib.asynccontextmanager
async def following(endpoint, replay_endpoint=None, sink=None, **config):
    """A subscriber that runs for the length of the block."""
    sink = sink or Sink()
    settings = {"replay_timeout_s": 0.3, "retry_s": 0.05, "probe_s": 60.0, "reconnect_max_s": 0.2, **config}
    subscriber = ZmqEventSubscriber(SubscriberConfig(endpoint, replay_endpoint, **settings), sink, SystemClock())
    task = asyncio.create_task(subscriber.run())
    try:
        yield subscriber, sink
    finally:
        subscriber.close()
        await task


async def until(condition, what="", timeout_s=15.0):
    """Wait for a condition; the message of a failure says what is missing."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s in vain: {what}"
        await asyncio.sleep(0.005)


def wait_sent(engine):
    """Wait until the publisher's thread has sent all that was published: who connects from now on hears none of it."""
    sent = threading.Event()

    def reached():
        sent.set()
        return ()

    engine.at_outlet(reached)
    assert sent.wait(5)


class RawEngine:
    """An engine's two sockets, by hand: it drops what it is told to, and answers in the old or the new form."""

    def __init__(self, *, topic_frame=True):
        context = zmq.Context.instance()
        self.pub, self.router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.endpoint = quiet_endpoint()
        self.pub.bind(self.endpoint)
        self.replay_endpoint = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"
        self.ring = []
        self.topic_frame = topic_frame
        self.holes = set()
        self.asked = []
        self.mute = False
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def publish(self, number, *, heard=True):
        seq, payload = len(self.ring).to_bytes(8, "big"), encode_batch(batch(number))
        self.ring.append((seq, payload))
        if heard:
            self.pub.send_multipart((b"kv", seq, payload))

    def serve(self):
        while not self.stopping.is_set():
            if not self.router.poll(20):
                continue
            identity, _, start = self.router.recv_multipart()
            start = int.from_bytes(start, "big")
            self.asked.append(start)
            if self.mute:
                continue
            topic = [b"kv"] if self.topic_frame else []
            for seq, payload in list(self.ring)[start:]:
                if int.from_bytes(seq, "big") not in self.holes:
                    self.router.send_multipart([identity, b"", *topic, seq, payload])
            self.router.send_multipart([identity, b"", *([b""] if self.topic_frame else []), MARKER, b""])

    def close(self):
        self.stopping.set()
        self.thread.join()
        self.pub.close(linger=0)
        self.router.close(linger=0)


@pytest.fixture
def raw_engine():
    engines = []

    def start(**options):
        engines.append(RawEngine(**options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def dealer():
    """A client's replay socket; `ask(endpoint, frames)` returns all messages up to the end marker, or until silence."""
    clients = []

    def ask(endpoint, *frames, timeout_ms=2_000):
        client = zmq.Context.instance().socket(zmq.DEALER)
        clients.append(client)
        client.set_hwm(0)
        client.connect(endpoint)
        client.send_multipart(frames)
        answer = []
        while client.poll(timeout_ms):
            answer.append(client.recv_multipart())
            if answer[-1][-2] == MARKER:
                break
        return answer

    yield ask
    for client in clients:
        client.close(linger=0)


@pytest.fixture(params=LINKS)
def link(request, monkeypatch):
    """What subscribers read over: once our own TCP link, once libzmq's, which other endpoints take."""
    use_link(request.param, monkeypatch)


def seq_bytes(seq):
    return seq.to_bytes(8, "big")


# -- following a publisher --


@pytest.mark.usefixtures("link")
@pytest.mark.asyncio
async def test_replay_at_connect_then_live():
    """A late subscriber gets everything from 0, then what is published, each batch once, and says so."""
    with publisher() as engine:
        for number in range(5):
            engine.publish(batch(number))
        async with following(engine.endpoint, engine.replay_endpoint) as (subscriber, sink):
            await until(lambda: sink.statuses == ["connecting", "syncing", "live"], "live")
            assert sink.seen == [(n, n) for n in range(5)]
            for number in range(5, 10):
                engine.publish(batch(number))
            await until(lambda: len(sink.seen) == 10, "five live batches")
            assert sink.seen == [(n, n) for n in range(10)]
            assert (sink.status, subscriber.last_seq, subscriber.counters.gaps) == ("live", 9, 0)


@pytest.mark.asyncio
async def test_payloads_arrive_unchanged():
    """The sink gets the very bytes that were sent, also those of a repeated full report (scenario 57)."""
    report = EventBatch(1.0, [BlockStored([1, 2], None, [1, 2, 3, 4], 2, medium="GPU"), AllBlocksCleared()], 7)
    payloads = []

    class Keep(Sink):
        def on_batch(self, seq, payload):
            payloads.append(payload)

    with publisher() as engine:
        engine.publish(report)
        engine.publish(report)
        async with following(engine.endpoint, engine.replay_endpoint, Keep()):
            await until(lambda: len(payloads) == 2, "both reports")
    assert payloads == [encode_batch(report)] * 2


@pytest.mark.usefixtures("link")
@pytest.mark.asyncio
async def test_a_gap_is_filled(raw_engine):
    """Dropped live batches come by replay, in order, before what came after them (T8)."""
    engine = raw_engine()
    async with following(engine.endpoint, engine.replay_endpoint) as (subscriber, sink):
        await until(lambda: sink.status == "live", "live")
        await heard(engine, sink)
        base = len(engine.ring)
        for number in range(base, base + 5):
            engine.publish(number, heard=number == base + 4)
        await until(lambda: len(sink.seen) == base + 5, "all five")
        assert sink.seen == [(n, n) for n in range(base + 5)]
        assert subscriber.counters.gaps == 0


@pytest.mark.asyncio
async def test_holes_in_a_replay_are_asked_for_again(raw_engine):
    """The end marker came although the answer has a hole: the second question fills it."""
    engine = raw_engine()
    for number in range(5):
        engine.publish(number)
    engine.holes = {2}
    async with following(engine.endpoint, engine.replay_endpoint) as (_, sink):
        await until(lambda: len(engine.asked) >= 2, "a second question")
        engine.holes = set()
        await until(lambda: len(sink.seen) == 5, "the hole")
        assert sink.seen == [(n, n) for n in range(5)]
        assert engine.asked[:2] == [0, 1]
        await until(lambda: sink.status == "live", "live")


@pytest.mark.asyncio
async def test_replies_without_a_topic_frame(raw_engine):
    """Engines that leave out the topic frame of replayed messages are understood."""
    engine = raw_engine(topic_frame=False)
    for number in range(4):
        engine.publish(number)
    async with following(engine.endpoint, engine.replay_endpoint) as (_, sink):
        await until(lambda: sink.status == "live", "live")
        assert sink.seen == [(n, n) for n in range(4)]


@pytest.mark.usefixtures("link")
@pytest.mark.asyncio
async def test_restart_on_the_same_port():
    """A restarted publisher is another life: lost, forgotten, followed from its own 0 (scenario 62)."""
    first = publisher(quiet_endpoint(), quiet_endpoint())
    for number in range(5):
        first.publish(batch(number))
    async with following(first.endpoint, first.replay_endpoint) as (subscriber, sink):
        await until(lambda: len(sink.seen) == 5, "the first life")
        first.close()
        await until(lambda: sink.status == "lost", "lost")
        with restarted(first.endpoint, first.replay_endpoint) as second:
            for number in range(100, 108):
                second.publish(batch(number))
            await until(lambda: len(sink.seen) == 14 and sink.status == "live", "the second life")
            second.publish(batch(108))
            await until(lambda: len(sink.seen) == 15, "live again")
    assert sink.seen[5:] == ["life", *((n, 100 + n) for n in range(9))]
    assert (subscriber.counters.lives, subscriber.counters.connections) == (1, 2)


@pytest.mark.usefixtures("link")
@pytest.mark.asyncio
async def test_restart_without_replay():
    """Without a replay endpoint batch 0 of the new life tells (T9), and the doubt of the reconnect is reported."""
    first = publisher(quiet_endpoint(), None)
    async with following(first.endpoint) as (_, sink):
        await until(lambda: sink.status == "syncing", "connected")
        await heard_by(first, sink)
        last_seq = sink.seen[-1][0]
        first.close()
        await until(lambda: sink.status == "lost", "lost")
        with restarted(first.endpoint) as second:
            await until(lambda: sink.status == "syncing", "connected again")
            assert sink.seen[-1] == ("gap", last_seq + 1, None)
            await asyncio.sleep(0.5)  # the subscription travels on its own; there is no replay to mend its loss
            second.publish(batch(100))
            await until(lambda: sink.seen[-1] == (0, 100), "the new life")
            assert sink.seen[-2] == "life"
            assert sink.status == "live"


@pytest.mark.usefixtures("link")
@pytest.mark.asyncio
async def test_reconnect_to_a_living_publisher_forgets_nothing(raw_engine):
    """The same life answers with the same bytes: what was missed is applied, no life is begun."""
    engine = raw_engine()
    for number in range(3):
        engine.publish(number)
    async with following(engine.endpoint, engine.replay_endpoint) as (subscriber, sink):
        await until(lambda: len(sink.seen) == 3 and sink.status == "live", "live")
        engine.pub.unbind(engine.endpoint)
        engine.pub.close(linger=0)
        await until(lambda: sink.status == "lost", "lost")
        engine.publish(3, heard=False)
        engine.pub = zmq.Context.instance().socket(zmq.PUB)
        await until(lambda: bound(engine.pub, engine.endpoint), "the port")
        await until(lambda: len(sink.seen) == 4 and sink.status == "live", "live again")
        assert sink.seen == [(n, n) for n in range(4)]
        assert subscriber.counters.lives == 0


@pytest.mark.asyncio
async def test_truncated_ring_at_connect():
    """Older than the publisher's memory: the gap is told before the first batch."""
    with publisher(buffer_steps=3) as engine:
        for number in range(8):
            engine.publish(batch(number))
        wait_sent(engine)
        async with following(engine.endpoint, engine.replay_endpoint) as (_, sink):
            await until(lambda: sink.status == "live", "live")
            assert sink.seen == [("gap", 0, 4), (5, 5), (6, 6), (7, 7)]


@pytest.mark.asyncio
async def test_no_replay_endpoint_and_a_late_start():
    """The first live batch is above 0: what is missing is told before it."""
    with publisher(replay_endpoint=None) as engine:
        for number in range(3):
            engine.publish(batch(number))
        wait_sent(engine)
        async with following(engine.endpoint) as (_, sink):
            await until(lambda: sink.status == "syncing", "connected")
            await heard_by(engine, sink)
            first_seq = sink.seen[1][0]
            assert first_seq >= 3
            assert sink.seen[0] == ("gap", 0, first_seq - 1)
            assert sink.status == "live"


@pytest.mark.asyncio
async def test_a_replay_endpoint_that_never_answers(raw_engine):
    """Questions time out and are repeated; a hole is then given up and the stream goes on."""
    engine = raw_engine()
    engine.mute = True
    engine.publish(0, heard=False)
    async with following(engine.endpoint, engine.replay_endpoint, replay_timeout_s=0.1) as (subscriber, sink):
        await until(lambda: subscriber.counters.failed_replays >= 3, "timeouts")
        assert sink.status == "syncing"
        await heard(engine, sink)
        assert sink.seen[0] == ("gap", 0, sink.seen[1][0] - 1)
        await until(lambda: sink.status == "live", "live")


@pytest.mark.asyncio
async def test_a_lost_tail_is_found_when_the_stream_is_quiet(raw_engine):
    """The last batch before silence was dropped: the probe brings it."""
    engine = raw_engine()
    async with following(engine.endpoint, engine.replay_endpoint, probe_s=0.1) as (_, sink):
        await until(lambda: sink.status == "live", "live")
        engine.publish(0, heard=False)
        await until(lambda: sink.seen, "the lost tail")
        assert sink.seen == [(0, 0)]


@pytest.mark.asyncio
async def test_a_lost_tail_after_a_long_rest_is_found_as_soon(raw_engine):
    """Polls had become rare; with the first batch they are due after `probe_s` again, not when the old timer fires."""
    engine = raw_engine()
    async with following(engine.endpoint, engine.replay_endpoint, probe_s=0.1) as (subscriber, sink):
        await until(lambda: subscriber.counters.replays >= 5, "the fourth poll")  # the next one is over a second away
        engine.publish(0)
        engine.publish(1, heard=False)
        await until(lambda: len(sink.seen) == 2, "the lost tail", timeout_s=0.7)
        assert sink.seen == [(0, 0), (1, 1)]


@pytest.mark.usefixtures("link")
@pytest.mark.asyncio
async def test_unreachable_endpoint_is_named_and_retried_without_haste():
    """Nothing listens: the status names the endpoint, the loop stays idle, and a late engine is found."""
    endpoint = quiet_endpoint()
    async with following(endpoint) as (_, sink):
        await until(lambda: len(sink.reasons) >= 2, "a reason")
        assert set(sink.statuses) == {"connecting"}
        assert endpoint in sink.reasons[-1]
        assert "cannot be reached" in sink.reasons[-1]
        before_s = time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - before_s < 0.25
        assert len(sink.statuses) == 2
        with publisher(endpoint, None) as engine:
            await heard_by(engine, sink)


@pytest.mark.usefixtures("link")
@pytest.mark.asyncio
async def test_malformed_messages_are_counted(raw_engine):
    """A message without number, or with a strange one, costs only itself."""
    engine = raw_engine()
    async with following(engine.endpoint, engine.replay_endpoint) as (subscriber, sink):
        await until(lambda: sink.status == "live", "live")
        await heard(engine, sink)
        engine.pub.send_multipart((b"kv", b"short", b"x"))
        engine.pub.send_multipart((b"alone",))
        engine.publish(len(engine.ring))
        await until(lambda: len(sink.seen) == len(engine.ring), "the good one")
        assert subscriber.counters.bad_messages == 2


@pytest.mark.asyncio
async def test_a_failing_sink_does_not_end_the_stream():
    """Exceptions of the receiver are counted and reported; later batches still come."""

    class Failing(Sink):
        def on_batch(self, seq, payload):
            if seq == 1:
                raise RuntimeError("no room")
            super().on_batch(seq, payload)

    with publisher() as engine:
        for number in range(3):
            engine.publish(batch(number))
        async with following(engine.endpoint, engine.replay_endpoint, Failing()) as (subscriber, sink):
            await until(lambda: sink.status == "live", "live")
            assert sink.seen == [(0, 0), (2, 2)]
            assert subscriber.counters.sink_errors == 1
            assert any("batch 1" in reason and "no room" in reason for reason in sink.reasons)


@pytest.mark.asyncio
async def test_a_sink_that_always_fails():
    """Even a receiver whose every call fails cannot end the stream."""

    class Broken(Sink):
        def on_batch(self, seq, payload):
            raise RuntimeError("broken")

        on_life = on_gap = on_status = on_batch

    with publisher() as engine:
        engine.publish(batch(0))
        async with following(engine.endpoint, engine.replay_endpoint, Broken()) as (subscriber, _):
            await until(lambda: subscriber.counters.batches == 1, "the batch")
            assert subscriber.counters.sink_errors >= 2


@pytest.mark.asyncio
async def test_a_long_replay_leaves_the_loop_to_others():
    """5,000 batches at once: other work on the loop runs every few milliseconds meanwhile."""
    with publisher() as engine:
        for number in range(5_000):
            engine.publish(batch(number))
        delays_s = []

        async def tick():
            while True:
                before_s = time.perf_counter()
                await asyncio.sleep(0)
                delays_s.append(time.perf_counter() - before_s)

        async with following(engine.endpoint, engine.replay_endpoint, replay_timeout_s=2.0) as (_, sink):
            ticking = asyncio.create_task(tick())
            await until(lambda: len(sink.seen) == 5_000, "the replay")
            ticking.cancel()
        assert sink.seen == [(n, n) for n in range(5_000)]
        assert sorted(delays_s)[int(len(delays_s) * 0.99)] < 0.02


@pytest.mark.usefixtures("link")
@pytest.mark.asyncio
async def test_close_and_cancel_return_quickly():
    """Both ways out take no time, also while nothing is reachable, and nothing is delivered afterwards."""
    for stop in ("close", "cancel"):
        sink = Sink()
        config = SubscriberConfig("tcp://127.0.0.1:9", "tcp://127.0.0.1:9")
        subscriber = ZmqEventSubscriber(config, sink, SystemClock())
        task = asyncio.create_task(subscriber.run())
        await until(lambda sink=sink: sink.statuses, "started")
        before_s = time.monotonic()
        if stop == "close":
            subscriber.close()
            subscriber.close()
            await task
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert time.monotonic() - before_s < 0.5
        told = len(sink.statuses)
        await asyncio.sleep(0.05)
        assert len(sink.statuses) == told


@pytest.mark.asyncio
@pytest.mark.parametrize("endpoints", [("nonsense", None), ("tcp://127.0.0.1:5557", "nonsense"), (ANY_PORT, None)])
async def test_malformed_endpoints_are_refused(endpoints):
    """An endpoint that is none ends `run` with an error that names it."""
    subscriber = ZmqEventSubscriber(SubscriberConfig(*endpoints), Sink(), SystemClock())
    with pytest.raises(ConfigError, match=r"nonsense|port 0"):
        await subscriber.run()


@pytest.mark.asyncio
async def test_engine_that_connects_out():
    """A concrete host in an engine's endpoint makes it connect; the subscriber then binds."""
    endpoint = quiet_endpoint()
    async with following(endpoint, bind=True) as (_, sink):
        await until(lambda: sink.statuses, "bound")
        with ZmqEventPublisher(PublisherConfig(endpoint)) as engine:
            assert engine.endpoint == endpoint
            await heard_by(engine, sink)
            assert sink.status == "live"


@pytest.mark.asyncio
async def test_inproc_within_one_process():
    """Without TCP there is no connection to hear of; the stream works all the same."""
    with publisher("inproc://test-events", "inproc://test-replay") as engine:
        engine.publish(batch(0))
        async with following(engine.endpoint, engine.replay_endpoint) as (_, sink):
            await until(lambda: sink.status == "live", "live")
            assert sink.seen == [(0, 0)]


@pytest.mark.usefixtures("link")
def test_everything_works_under_uvloop():
    """The gateway's loop: replay, live, restart."""

    async def scenario():
        first = publisher(quiet_endpoint(), quiet_endpoint())
        for number in range(300):
            first.publish(batch(number))
        async with following(first.endpoint, first.replay_endpoint) as (_, sink):
            await until(lambda: len(sink.seen) == 300 and sink.status == "live", "the first life")
            first.publish(batch(300))
            await until(lambda: len(sink.seen) == 301, "live")
            first.close()
            with restarted(first.endpoint, first.replay_endpoint) as second:
                second.publish(batch(0))
                await until(lambda: sink.seen[-2:] == ["life", (0, 0)], "the second life")
        assert sink.seen[:301] == [(n, n) for n in range(301)]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


# -- what a client of vLLM sees of the publisher --


def test_live_frames(dealer):
    """Topic, 8-byte big-endian number from 0, msgpack; a topic prefix selects (scenario 59); the rank is filled in or kept (scenario 60)."""
    with zmq.Context.instance().socket(zmq.SUB) as sub, publisher(topic="kv-events") as engine:
        sub.connect(engine.endpoint)
        sub.setsockopt(zmq.SUBSCRIBE, b"kv")
        while not sub.poll(20):
            engine.publish(EventBatch(1.5, [AllBlocksCleared()]))
        first = sub.recv_multipart()
        assert first[0] == b"kv-events"
        assert len(first[1]) == 8
        assert first[2].hex() == "93cb3ff80000000000009181a474797065b0416c6c426c6f636b73436c656172656400"
        replayed = dealer(engine.replay_endpoint, b"", seq_bytes(0))
        assert replayed[0] == [b"", b"kv-events", b"\0" * 8, first[2]]
        engine.publish(EventBatch(1.5, [AllBlocksCleared()], 7))
        last = dealer(engine.replay_endpoint, b"", seq_bytes(len(replayed) - 1))[0]
        assert last[3].hex().endswith("07")


def test_rank_of_the_publisher(dealer):
    """A publisher of rank 1 listens one port up and stamps its rank (scenario 60, 61)."""
    ports = [int(quiet_endpoint().rpartition(":")[2]) for _ in range(2)]
    config = PublisherConfig(*(f"tcp://127.0.0.1:{port - 1}" for port in ports), bind=True)
    with ZmqEventPublisher(config, data_parallel_rank=1) as engine:
        assert engine.endpoint == f"tcp://127.0.0.1:{ports[0]}"
        engine.publish(EventBatch(1.5, []))
        (message, _) = dealer(f"tcp://127.0.0.1:{ports[1]}", b"", seq_bytes(0))
        assert msgspec.msgpack.decode(message[3]) == [1.5, [], 1]


@pytest.mark.parametrize("start_bytes", [8, 4, 1])
def test_replay_answers(dealer, start_bytes):
    """Ring of 3 after 5 batches: from 0 come 2, 3, 4 and the marker; from 99 the marker only (scenario 58)."""
    with publisher(buffer_steps=3, topic="t") as engine:
        for number in range(5):
            engine.publish(batch(number))
        answer = dealer(engine.replay_endpoint, b"", (0).to_bytes(start_bytes, "big"))
        assert [message[:3] for message in answer[:-1]] == [[b"", b"t", seq_bytes(seq)] for seq in (2, 3, 4)]
        assert [number_of(message[3]) for message in answer[:-1]] == [2, 3, 4]
        assert answer[-1] == [b"", b"", MARKER, b""]
        assert dealer(engine.replay_endpoint, b"", (4).to_bytes(start_bytes, "big"))[0][2] == seq_bytes(4)
        assert dealer(engine.replay_endpoint, b"", (99).to_bytes(start_bytes, "big")) == [[b"", b"", MARKER, b""]]


@pytest.mark.parametrize("frames", [[seq_bytes(0)], [b"", seq_bytes(0), b""]])
def test_odd_replay_requests_get_no_answer(dealer, frames):
    """Any other number of frames, a missing empty one included, is ignored (scenario 58); the next request is answered."""
    with publisher() as engine:
        engine.publish(batch(0))
        assert dealer(engine.replay_endpoint, *frames, timeout_ms=150) == []
        assert engine.ignored_requests == 1
        assert len(dealer(engine.replay_endpoint, b"", seq_bytes(0))) == 2


def test_replay_is_prompt(dealer):
    """An idle publisher answers at once, not after a poll interval."""
    with publisher() as engine:
        dealer(engine.replay_endpoint, b"", seq_bytes(0))
        before_s = time.monotonic()
        for _ in range(10):
            dealer(engine.replay_endpoint, b"", seq_bytes(0))
        assert time.monotonic() - before_s < 0.5


class Stalled(ZmqEventPublisher):
    """A publisher whose thread does not send before it may."""

    def __init__(self, config):
        self.may_send = threading.Event()
        super().__init__(config)

    def _send_queued(self):
        self.may_send.wait()
        return super()._send_queued()


def test_a_full_queue_blocks_and_drops_nothing(dealer):
    """`publish` waits for room as engines do; every batch is sent in the end (scenario 63)."""
    with Stalled(PublisherConfig(ANY_PORT, ANY_PORT, max_queue_size=2, bind=True)) as engine:
        producer = threading.Thread(target=lambda: [engine.publish(batch(n)) for n in range(8)])
        producer.start()
        producer.join(0.3)
        assert producer.is_alive()
        engine.may_send.set()
        producer.join(5)
        assert not producer.is_alive()
        deadline_s = time.monotonic() + 5
        while len(answer := dealer(engine.replay_endpoint, b"", seq_bytes(0))) < 9:
            assert time.monotonic() < deadline_s
        assert [number_of(message[3]) for message in answer[:-1]] == list(range(8))


def test_a_slow_subscriber_sees_a_gap_in_the_numbers():
    """Over the high-water mark PUB drops silently for that subscriber: only the numbers tell (scenario 63)."""
    big = EventBatch(1.5, [BlockStored([b"\x01" * 32], None, list(range(100_000, 300_000)), 16)])
    with zmq.Context.instance().socket(zmq.SUB) as sub, publisher(hwm=1) as engine:
        sub.setsockopt(zmq.RCVHWM, 1)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(engine.endpoint)
        while not sub.poll(20):
            engine.publish(EventBatch(1.5, []))
        for _ in range(60):
            engine.publish(big)
        time.sleep(0.5)
        numbers = []
        while sub.poll(300):
            numbers.append(int.from_bytes(sub.recv_multipart()[1], "big"))
        engine.publish(EventBatch(1.5, []))
        assert sub.poll(5_000)
        numbers.append(int.from_bytes(sub.recv_multipart()[1], "big"))
        assert numbers == sorted(set(numbers))
        assert len(numbers) < numbers[-1] - numbers[0] + 1


def test_a_closed_publisher_refuses():
    """After `close` nothing is queued for nobody; closing twice is harmless."""
    engine = publisher()
    engine.publish(batch(0))
    engine.close()
    engine.close()
    with pytest.raises(PublisherClosed, match="after close"):
        engine.publish(batch(1))


def test_an_event_that_cannot_be_encoded_costs_no_number(dealer):
    """The caller gets the error; the stream has no hole."""
    with publisher() as engine:
        with pytest.raises((TypeError, OverflowError)):
            engine.publish(EventBatch(1.5, [BlockRemoved([2**70])]))
        engine.publish(batch(5))
        (message, _) = dealer(engine.replay_endpoint, b"", seq_bytes(0))
        assert (message[2], number_of(message[3])) == (seq_bytes(0), 5)


def test_publisher_endpoints_that_cannot_work():
    """A taken port, and port 0 without binding, are refused by name, and no socket is left behind."""
    with publisher() as engine, pytest.raises(ConfigError, match=engine.endpoint):
        publisher(engine.endpoint)
    with pytest.raises(ConfigError, match="port 0"):
        ZmqEventPublisher(PublisherConfig(ANY_PORT))
    with publisher() as engine, pytest.raises(ConfigError, match=engine.replay_endpoint):
        publisher(ANY_PORT, engine.replay_endpoint)


def test_wildcard_endpoint_keeps_its_form():
    """`tcp://*:0` is resolved to the wildcard with the real port, as others must put their own host there."""
    with ZmqEventPublisher(PublisherConfig("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", bind=True)) as engine:
        for endpoint in (engine.endpoint, engine.replay_endpoint):
            host, _, port = endpoint.rpartition(":")
            assert host == "tcp://127.0.0.1"
            assert int(port) > 0


def bound(zmq_socket, endpoint):
    """Try to bind; a port that was just closed comes free a moment later."""
    try:
        zmq_socket.bind(endpoint)
    except zmq.ZMQError:
        return False
    return True


async def heard(engine, sink):
    """Publish until the sink hears a live batch: a subscription takes a moment to reach the publisher."""
    known = len(sink.seen)
    while len(sink.seen) == known:
        engine.publish(len(engine.ring))
        await asyncio.sleep(0.02)
    await until(lambda: sink.seen[-1] == (len(engine.ring) - 1,) * 2, "the last one")


async def heard_by(engine, sink):
    """The same for a ZmqEventPublisher."""
    known = len(sink.seen)
    while len(sink.seen) == known or not isinstance(sink.seen[-1][0], int):
        engine.publish(batch(0))
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
