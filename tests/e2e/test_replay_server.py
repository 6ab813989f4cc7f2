"""A replay from disk to readers that are slow, gone, greedy or rude."""

import asyncio
import contextlib
import time

import pytest
import zmq

from kvatlas.clock import SystemClock
from kvatlas.errors import ConfigError
from kvatlas.stream import ReplayServer, ReplayServerConfig, Sent, SubscriberConfig, ZmqEventSubscriber

pytestmark = pytest.mark.e2e

ANY_PORT = "tcp://127.0.0.1:0"
MARKER = b"\xff" * 8
COUNT = 30_000
PAYLOAD = b"p" * 1_000


class Source:
    """A past of many batches; says how far it was read."""

    def __init__(self, count=COUNT):
        self.count = count
        self.read = 0

    def batches_from(self, seq):
        for number in range(seq, self.count):
            self.read = max(self.read, number)
            yield Sent(number, PAYLOAD)


@contextlib.asynccontextmanager
async def serving(source=None, **settings):
    server = ReplayServer(ReplayServerConfig(ANY_PORT, ANY_PORT, topic="kv", **settings), source or Source())
    server.open()
    try:
        yield server
    finally:
        server.close()


def ask(endpoint, first=0, **options):
    """A DEALER as a simple consumer makes one, its question sent."""
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    for name, value in options.items():
        setattr(dealer, name, value)
    dealer.connect(endpoint)
    dealer.send_multipart((b"", first.to_bytes(8, "big")))
    return dealer


def read_all(dealer, wait_ms=10_000):
    """Numbers up to the marker; None at the end when it did not come."""
    numbers = []
    while dealer.poll(wait_ms):
        *_, seq, _ = dealer.recv_multipart()
        if seq == MARKER:
            return numbers
        numbers.append(int.from_bytes(seq, "big"))
    return [*numbers, None]


async def in_thread(function, *arguments):
    return await asyncio.to_thread(function, *arguments)


@pytest.mark.asyncio
async def test_a_reader_that_starts_late_with_a_small_queue_loses_nothing():
    """The server waits for it: every batch comes, then the marker, and little was read from disk before it was taken."""
    source = Source()
    async with serving(source) as server:
        dealer = ask(server.replay_endpoint, rcvhwm=1_000)
        while server.counters.questions == 0 or source.read < 500:
            await asyncio.sleep(0.01)
        before = -1
        while source.read != before:  # until it pauses
            before = source.read
            await asyncio.sleep(0.3)
        assert source.read < COUNT - 1
        assert await in_thread(read_all, dealer) == list(range(COUNT))
        assert server.counters.answers == 1
        dealer.close()


@pytest.mark.asyncio
async def test_a_slow_reader_does_not_hold_up_another_one_nor_the_live_stream():
    """While one reader takes nothing, a second gets all, and live batches go out."""
    async with serving() as server:
        lazy = ask(server.replay_endpoint, rcvhwm=10)
        live = zmq.Context.instance().socket(zmq.SUB)
        live.subscribe(b"kv")
        live.connect(server.endpoint)
        while server.counters.questions == 0:
            await asyncio.sleep(0.01)
        eager = ask(server.replay_endpoint)
        assert await in_thread(read_all, eager) == list(range(COUNT))
        server.send(COUNT, b"live")
        assert await in_thread(live.recv_multipart) == [b"kv", COUNT.to_bytes(8, "big"), b"live"]
        for socket in (lazy, eager, live):
            socket.close(linger=0)


@pytest.mark.asyncio
async def test_an_answer_to_somebody_who_left_or_takes_nothing_ends():
    """Neither keeps its place for ever."""
    async with serving(stalled_s=0.3) as server:
        gone = ask(server.replay_endpoint, rcvhwm=10)
        stalled = ask(server.replay_endpoint, rcvhwm=10)
        while server.counters.questions < 2:
            await asyncio.sleep(0.01)
        gone.close(linger=0)
        while server.counters.broken_answers < 2:
            await asyncio.sleep(0.01)
        assert server.counters.answers_now == 0
        stalled.close(linger=0)


@pytest.mark.asyncio
async def test_questions_of_one_reader_are_answered_in_turn_and_bad_ones_ignored():
    """As a publisher of an engine does it; more readers than `max_answers` ask again."""
    async with serving(Source(5), max_answers=2) as server:
        dealer = ask(server.replay_endpoint)
        dealer.send_multipart((b"", (3).to_bytes(4, "big")))
        dealer.send_multipart((b"no", b"question"))
        dealer.send_multipart((b"one frame",))
        assert await in_thread(read_all, dealer) == [0, 1, 2, 3, 4]
        assert await in_thread(read_all, dealer) == [3, 4]
        while server.counters.ignored_requests < 2:
            await asyncio.sleep(0.01)
        dealer.close(linger=0)


@pytest.mark.asyncio
async def test_closing_and_reopening_keeps_the_ports():
    """Readers find it again where it was; meanwhile it is gone, and live batches go nowhere."""
    async with serving(Source(5)) as server:
        endpoints = server.endpoint, server.replay_endpoint
        server.close()
        server.send(9, b"unheard")
        server.reopen()
        while not server.is_open:
            await asyncio.sleep(0.01)
        assert (server.endpoint, server.replay_endpoint) == endpoints
        dealer = ask(server.replay_endpoint)
        assert await in_thread(read_all, dealer) == [0, 1, 2, 3, 4]
        dealer.close(linger=0)
        assert server.counters.published == 0


@pytest.mark.asyncio
async def test_a_taken_port_is_refused():
    """Before anything is served, and both sockets are given back."""
    async with serving() as first:
        second = ReplayServer(ReplayServerConfig(ANY_PORT, first.replay_endpoint), Source())
        with pytest.raises(ConfigError, match="cannot bind"):
            second.open()
        assert not second.is_open


@pytest.mark.asyncio
async def test_our_own_subscriber_gets_a_long_past_whole():
    """Held live batches and replay meet without a gap."""
    seen, gaps = [], []

    class Sink:
        def on_life(self, reason): ...

        def on_status(self, status, reason): ...

        def on_gap(self, first_seq, last_seq):
            gaps.append((first_seq, last_seq))

        def on_batch(self, seq, payload):
            seen.append(seq)

    source = Source()
    async with serving(source) as server:
        config = SubscriberConfig(server.endpoint, server.replay_endpoint)
        subscriber = ZmqEventSubscriber(config, Sink(), SystemClock())
        task = asyncio.create_task(subscriber.run())
        deadline_s = time.monotonic() + 30
        while len(seen) < 1_000:
            await asyncio.sleep(0.005)
        for number in range(COUNT, COUNT + 50):
            source.count = number + 1
            server.send(number, b"live")
        while len(seen) < COUNT + 50:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.01)
        subscriber.close()
        await task
    assert seen == list(range(COUNT + 50))
    assert gaps == []
