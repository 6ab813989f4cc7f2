"""Both links to a publisher of libzmq, TcpLink and ZmqLink, under their one interface: real sockets on loopback."""

import asyncio
import gc
import itertools
import random
from typing import Self

import pytest
import zmq

from kvatlas._native import Run
from kvatlas.errors import ConfigError
from kvatlas.stream import link as links
from support.engines import open_pub, subscribed, until
from support.gateway import on_both_loops
from support.live_links import LINKS, Follower, following, make_link, nothing_left, open_files, quiet_port

pytestmark = pytest.mark.e2e

LAST = 2**64 - 1
_names = itertools.count()
on_both_links = pytest.mark.parametrize("kind", LINKS)


def number(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


def data(seq: int) -> bytes:
    return b"\x93batch %d" % seq


def usual(seq: int, topic: bytes = b"kv") -> list[bytes]:
    return [topic, number(seq), data(seq)]


class Publisher:
    """A publisher by hand, which drops nothing."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:*", **options: int) -> None:
        self.pub = open_pub(zmq.Context.instance())
        self.pub.setsockopt(zmq.LINGER, 0)
        self.pub.set_hwm(0)
        for name, value in options.items():
            self.pub.setsockopt(getattr(zmq, name), value)
        try:
            self.pub.bind(endpoint)
        except zmq.ZMQError:
            self.pub.close()
            raise
        self.endpoint = self.pub.getsockopt_string(zmq.LAST_ENDPOINT)

    @classmethod
    async def again(cls, endpoint: str) -> "Publisher":
        """Another one where one was closed, as soon as the port is free."""
        while True:
            try:
                return cls(endpoint)
            except zmq.ZMQError:
                await asyncio.sleep(0.01)

    def send(self, *messages: list[bytes]) -> None:
        for message in messages:
            self.pub.send_multipart(message)

    async def subscribed(self) -> None:
        await subscribed(self.pub)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pub.close()


class Connected:
    """A link that has subscribed to a publisher."""

    def __init__(self, kind: str, **config: object) -> None:
        self.publisher = Publisher()
        self._following = following(kind, self.publisher.endpoint, **config)

    async def __aenter__(self) -> Self:
        self.follower = await self._following.__aenter__()
        await self.follower.meanwhile(self.publisher.subscribed())
        await self.follower.until_told("connected")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._following.__aexit__(*error)
        self.publisher.__exit__()

    async def read(self, *messages: list[bytes], topic: bytes = b"kv") -> list[Run]:
        """Send these and one more; the runs of these, joined over the calls that they took to come."""
        end = (10**9, [b"end"])
        self.publisher.send(*messages, [topic, number(end[0]), end[1][0]])
        await self.follower.until(lambda: end in self.follower.runs, "all messages")
        runs, self.follower.runs = self.follower.runs, []
        assert runs.pop() == end
        return runs

    @property
    def bad(self) -> int:
        return self.follower.link.bad_messages


ODD = {
    "one frame": [b"alone"],
    "one empty frame": [b""],
    "one frame of 8 bytes": [b"8 bytes!"],
    "two frames, no number": [b"kv", b"\x93 batch of 50"],
    "two frames, 8 bytes behind no number": [b"kv", b"8 bytes!"],
    "a number of 7 bytes": [b"kv", b"7 bytes", b"\x93 batch of 50"],
    "a number of 9 bytes": [b"kv", b"9 bytes..", b"\x93 batch of 50"],
    "no number": [b"kv", b"", b"\x93 batch of 50"],
    "a frame too many behind a batch": [*usual(50), b"more"],
    "five frames, the number too early": [b"", b"kv", number(50), b"", b"\x93 batch of 50"],
}
BATCHES_OF_50 = {
    "two frames": [number(50), data(50)],
    "three frames": usual(50),
    "no topic": usual(50, b""),
    "8 bytes of topic": usual(50, b"8-topic!"),
    "a long topic": usual(50, b"t" * 300),
    "four frames": [b"", *usual(50)],
    "four frames, 8 bytes of topic": [b"", *usual(50, b"8-topic!")],
    "five frames": [b"", number(7), *usual(50)],
}


@pytest.mark.parametrize("name", ODD)
@on_both_links
@on_both_loops
async def test_an_odd_message_is_bad_and_costs_only_itself(kind: str, name: str) -> None:
    """It is counted, and both its neighbours are told; they follow one another, so they are one run."""
    async with Connected(kind) as wire:
        assert await wire.read(usual(1), ODD[name], usual(2)) == [(1, [data(1), data(2)])]
        assert wire.bad == 1


@pytest.mark.parametrize("name", BATCHES_OF_50)
@on_both_links
@on_both_loops
async def test_a_batch_is_found_from_the_end_of_its_message(kind: str, name: str) -> None:
    """Whatever comes before number and payload is the topic or nothing."""
    async with Connected(kind) as wire:
        runs = await wire.read(usual(49), BATCHES_OF_50[name], usual(51))
        assert runs == [(49, [data(49), data(50), data(51)])]
        assert wire.bad == 0


@on_both_links
@on_both_loops
async def test_odd_messages_in_a_row(kind: str) -> None:
    """Whatever follows whatever: each is bad for itself, all batches are told."""
    async with Connected(kind) as wire:
        for first, second in itertools.product(ODD, repeat=2):
            before = wire.bad
            messages = [usual(1), ODD[first], ODD[second], BATCHES_OF_50["four frames"], ODD[first], usual(2)]
            assert await wire.read(*messages) == [(1, [data(1)]), (50, [data(50)]), (2, [data(2)])]
            assert wire.bad - before == 3


@on_both_links
@on_both_loops
async def test_a_message_that_is_bad_and_alone(kind: str) -> None:
    """It is read and counted without a batch to wake for, and nothing is left to read."""
    async with Connected(kind) as wire:
        wire.publisher.send(ODD["one frame"])
        await wire.follower.until(lambda: wire.bad == 1, "the message")
        assert wire.follower.link.receive_runs() == []
        assert wire.follower.link.is_drained
        assert (wire.bad, wire.follower.runs) == (1, [])


@on_both_links
@on_both_loops
async def test_runs_are_what_follows_by_number(kind: str) -> None:
    """A hole, a repetition and a step back each begin another run; the order of arrival is kept."""
    seqs = [5, 6, 7, 9, 10, 10, 11, 3, 4, 0, 1, 7]
    async with Connected(kind) as wire:
        assert await wire.read(*[usual(seq) for seq in seqs]) == [
            (5, [data(5), data(6), data(7)]),
            (9, [data(9), data(10)]),
            (10, [data(10), data(11)]),
            (3, [data(3), data(4)]),
            (0, [data(0), data(1)]),
            (7, [data(7)]),
        ]


@on_both_links
@on_both_loops
async def test_no_number_follows_the_last_one(kind: str) -> None:
    """2**64 - 1 ends its run: 0 behind it is another stream's, and repeated it is no run either."""
    async with Connected(kind) as wire:
        assert await wire.read(*[usual(seq) for seq in (LAST - 1, LAST, 0, 1, LAST, LAST, 0)]) == [
            (LAST - 1, [data(LAST - 1), data(LAST)]),
            (0, [data(0), data(1)]),
            (LAST, [data(LAST)]),
            (LAST, [data(LAST)]),
            (0, [data(0)]),
        ]


@on_both_links
@on_both_loops
async def test_payloads_arrive_as_they_were_sent(kind: str) -> None:
    """Whatever their sizes and whatever lies between; what was read before is not changed by what comes."""
    rng = random.Random(5)
    sizes = [0, 1, 300, 70_000, 3_000_000, 255, 256, 65_535, 65_536, 262_144] * 2
    rng.shuffle(sizes)
    payloads = [rng.randbytes(size) for size in sizes]
    messages = [[b"kv" * (seq % 3), number(seq), payload] for seq, payload in enumerate(payloads)]
    async with Connected(kind) as wire:
        assert await wire.read(*messages) == [(0, payloads)]
        assert await wire.read(*messages[::-1]) == [(seq, [payloads[seq]]) for seq in range(len(payloads))][::-1]


@on_both_links
@on_both_loops
async def test_many_batches_are_read_in_many_calls(kind: str) -> None:
    """However they are cut, each is told once and in its place."""
    async with Connected(kind) as wire:
        runs = await wire.read(*[usual(seq) if seq % 3 else [number(seq), data(seq)] for seq in range(20_000)])
        assert runs == [(0, [data(seq) for seq in range(20_000)])]


@on_both_links
@on_both_loops
async def test_a_topic_is_a_prefix(kind: str) -> None:
    """What does not begin with it does not come, bad or not."""
    topics = [b"kv", b"kv-events", b"k", b"other", b"", b"kv"]
    async with Connected(kind, topic="kv") as wire:
        runs = await wire.read(*[usual(seq, topic) for seq, topic in enumerate(topics)], [b"alone"], [b"kv"])
        assert runs == [(0, [data(0), data(1)]), (5, [data(5)])]
        assert wire.bad == 1


@on_both_links
@on_both_loops
async def test_a_long_topic(kind: str) -> None:
    """A subscription of 300 bytes reaches the publisher whole."""
    topic = "t" * 300
    async with Connected(kind, topic=topic) as wire:
        runs = await wire.read(usual(1, b"t" * 299), usual(2, b"t" * 301), topic=topic.encode())
        assert runs == [(2, [data(2)])]


@on_both_links
@on_both_loops
async def test_nothing_to_read(kind: str) -> None:
    """No batch, and nothing left: before a connection, over a quiet one, and after `close`."""
    link = make_link(kind, "tcp://127.0.0.1:9")
    assert link.receive_runs() == []
    assert link.is_drained
    async with Connected(kind) as wire:
        for _ in range(3):
            assert wire.follower.link.receive_runs() == []
            assert wire.follower.link.is_drained
        assert await wire.read(usual(1)) == [(1, [data(1)])]
    assert wire.follower.link.receive_runs() == []
    assert wire.follower.link.is_drained
    assert wire.follower.link.take_events() == []


@on_both_links
@on_both_loops
async def test_an_unwatched_link_is_read_unasked(kind: str) -> None:
    """It does not wake for data, gives what came when it is read, and wakes again for what came meanwhile."""
    async with Connected(kind) as wire, following(kind, wire.publisher.endpoint) as witness:
        await witness.meanwhile(wire.publisher.subscribed())
        follower, wakes = wire.follower, 0
        for seq in range(0, 30, 3):
            follower.link.unwatch()
            await asyncio.sleep(0)
            follower.woken.clear()
            wire.publisher.send(usual(seq))
            await witness.until(lambda seq=seq: witness.told[-1] == seq, "the witness")
            wakes += follower.woken.is_set()
            await until(lambda: follower.read() or follower.told[-1] == seq, "read unasked")  # noqa: B023 - awaited here
            follower.woken.clear()
            wire.publisher.send(usual(seq + 1))
            await witness.until(lambda seq=seq: witness.told[-1] == seq + 1, "the witness")
            wakes += follower.woken.is_set()
            follower.link.watch()
            await follower.until(lambda seq=seq: follower.told[-1] == seq + 1, "told of what came meanwhile")
            wire.publisher.send(usual(seq + 2))
            await follower.until(lambda seq=seq: follower.told[-1] == seq + 2, "told as it comes")
        assert follower.told == ["connected", *range(30)]
        assert wakes <= (kind == "zmq")  # once libzmq's monitor may still have woken it


@on_both_links
@on_both_loops
async def test_an_unwatched_link_tells_of_its_connection(kind: str) -> None:
    """Watched or not: the connections that it makes are told at once, and are not watched either."""
    publisher = Publisher(endpoint := f"tcp://127.0.0.1:{quiet_port()}")
    async with following(kind, endpoint) as follower:
        follower.link.unwatch()
        await follower.meanwhile(publisher.subscribed())
        await follower.until_told("connected")
        publisher.pub.close()
        await until(lambda: follower.read() or follower.kinds == ["connected", "gone"], "read by the clock")
        with await Publisher.again(endpoint) as second:
            await follower.until_told("connected", "gone", "connected")
            await follower.meanwhile(second.subscribed())
            follower.woken.clear()
            second.send(usual(7))
            await until(lambda: follower.read() or follower.runs == [(7, [data(7)])], "the batch")
            assert kind == "zmq" or not follower.woken.is_set()  # libzmq's monitor may still have woken it


@on_both_links
@on_both_loops
async def test_a_publisher_that_restarts(kind: str) -> None:
    """Each connection is told of before what comes over it, its end after that; attempts in between go on for ever."""
    publisher = Publisher(endpoint := f"tcp://127.0.0.1:{quiet_port()}")
    async with following(kind, endpoint) as follower:
        for life in range(3):
            await follower.meanwhile(publisher.subscribed())
            await follower.until(lambda: follower.told[-1:] == ["connected"], "connected")
            publisher.send(usual(10 * life), usual(10 * life + 1))
            await follower.until(lambda life=life: follower.told[-1] == 10 * life + 1, "both batches")
            publisher.pub.close()
            await follower.until(lambda life=life: follower.kinds.count("gone") == life + 1, "gone")
            await follower.until_failed()
            publisher = await Publisher.again(endpoint)
        told = [each for each in follower.told if each != "failed"]
        assert told[:12] == ["connected", 0, 1, "gone", "connected", 10, 11, "gone", "connected", 20, 21, "gone"]
        assert all(event.reason for event in follower.events if event.kind != "connected")
    publisher.pub.close()


@on_both_links
@on_both_loops
async def test_a_message_that_breaks_off_belongs_to_its_connection(kind: str) -> None:
    """A restart in the middle of a stream leaves nothing of the old connection in what the new one brings."""
    publisher = Publisher(endpoint := f"tcp://127.0.0.1:{quiet_port()}")
    async with following(kind, endpoint) as follower:
        await follower.meanwhile(publisher.subscribed())
        await follower.until_told("connected")
        follower.link.unwatch()
        publisher.send(*[[b"kv", number(seq), b"x" * 3_000_000] for seq in range(10)])
        await until(lambda: follower.read_once() or follower.runs, "the first batch")
        publisher.pub.close()  # most was not sent yet
        follower.link.watch()
        await follower.until(lambda: "gone" in follower.kinds, "gone")
        with await Publisher.again(endpoint) as second:
            await follower.meanwhile(second.subscribed())
            second.send(usual(100), ODD["one frame"], usual(101))
            await follower.until(lambda: follower.told[-1] == 101, "the new ones")
    assert follower.runs[-1] == (100, [data(100), data(101)])
    assert [len(payload) for payload in follower.runs[0][1]] == [3_000_000] * len(follower.runs[0][1])
    assert follower.link.bad_messages == 1
    assert follower.kinds == ["connected", "gone", "connected"]


@on_both_links
@on_both_loops
async def test_a_publisher_that_comes_up_late(kind: str) -> None:
    """Failed attempts are told of until one succeeds."""
    endpoint = f"tcp://127.0.0.1:{quiet_port()}"
    async with following(kind, endpoint) as follower:
        for _ in range(3):
            assert await follower.until_failed()
        with Publisher(endpoint) as publisher:
            await follower.meanwhile(publisher.subscribed())
            await follower.until_told("connected")
            publisher.send(usual(4))
            await follower.until(lambda: follower.runs == [(4, [data(4)])], "a batch")


@on_both_links
@on_both_loops
async def test_a_quiet_connection_stays(kind: str) -> None:
    """A publisher that answers heartbeats may be silent for as long as it likes."""
    async with Connected(kind, heartbeat_s=0.2) as wire:
        await asyncio.sleep(1.0)
        assert await wire.read(usual(1)) == [(1, [data(1)])]
        assert wire.follower.told[:2] == ["connected", 1]


@on_both_links
@on_both_loops
async def test_heartbeats_of_the_publisher_are_answered(kind: str) -> None:
    """A publisher that gives up whoever does not answer its PING keeps us, watched and read."""
    with Publisher(HEARTBEAT_IVL=100, HEARTBEAT_TIMEOUT=600) as publisher:
        async with following(kind, publisher.endpoint) as follower:
            await follower.meanwhile(publisher.subscribed())
            await follower.until_told("connected")
            with pytest.raises(AssertionError, match="in vain"):
                await follower.until(lambda: "gone" in follower.kinds, "an end", seconds=1.2)
            publisher.send(usual(1))
            await follower.until(lambda: follower.told == ["connected", 1], "the batch")


@on_both_links
@on_both_loops
async def test_ipv6(kind: str) -> None:
    """An address in brackets is one like any other."""
    try:
        publisher = Publisher("tcp://[::1]:*", IPV6=1)
    except zmq.ZMQError:
        pytest.skip("no IPv6 here")
    with publisher:
        async with following(kind, publisher.endpoint) as follower:
            await follower.meanwhile(publisher.subscribed())
            publisher.send(usual(1))
            await follower.until(lambda: follower.runs, "the batch")
            assert follower.runs == [(1, [data(1)])]


@pytest.mark.parametrize("endpoint", ["inproc://links-{name}", "ipc://{folder}/events"])
@on_both_loops
async def test_endpoints_within_a_machine(endpoint: str, tmp_path: object) -> None:
    """Ipc and inproc are libzmq's business; inproc has no connection to hear of and counts as connected."""
    with Publisher(endpoint.format(name=next(_names), folder=tmp_path)) as publisher:
        async with following("zmq", publisher.endpoint) as follower:
            await follower.meanwhile(publisher.subscribed())
            await follower.until_told("connected")
            publisher.send(usual(1), ODD["no number"], usual(2))
            await follower.until(lambda: follower.runs == [(1, [data(1), data(2)])], "both batches")
            assert follower.link.bad_messages == 1


@on_both_loops
async def test_a_link_that_listens() -> None:
    """For publishers that connect out: told of each that comes and goes."""
    endpoint = f"tcp://127.0.0.1:{quiet_port()}"
    async with following("zmq", endpoint, bind=True) as follower:
        for seq in range(2):
            pub = open_pub(zmq.Context.instance())
            pub.connect(endpoint)
            await follower.meanwhile(subscribed(pub))
            pub.send_multipart(usual(seq))
            await follower.until(lambda seq=seq: seq in follower.told, "the batch")
            pub.close(linger=0)
            await follower.until(lambda seq=seq: follower.kinds.count("gone") == seq + 1, "gone")
        assert follower.kinds == ["connected", "gone"] * 2


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://127.0.0.1:0", "tcp://host"])
@on_both_loops
async def test_an_endpoint_that_is_none(endpoint: str) -> None:
    """It is refused by name, and closing the link afterwards is harmless."""
    async with nothing_left():
        link = make_link("zmq", endpoint)
        with pytest.raises(ConfigError, match=endpoint):
            link.open(lambda: None)
        link.close()


async def _at_once(_: Follower, __: Publisher) -> None:
    """Before the loop has run once."""


async def _connecting(_: Follower, __: Publisher) -> None:
    await asyncio.sleep(0)


async def _connected(follower: Follower, publisher: Publisher) -> None:
    await follower.meanwhile(publisher.subscribed())
    await follower.until_told("connected")


async def _untold(_: Follower, publisher: Publisher) -> None:
    await publisher.subscribed()  # that it is connected nobody has taken notice of


async def _unread(follower: Follower, publisher: Publisher) -> None:
    await _connected(follower, publisher)
    publisher.send(*[[b"kv", number(seq), bytes(100_000)] for seq in range(10)])
    await asyncio.sleep(0.02)


async def _unwatched(follower: Follower, publisher: Publisher) -> None:
    await _unread(follower, publisher)
    follower.link.unwatch()


async def _gone(follower: Follower, publisher: Publisher) -> None:
    await _connected(follower, publisher)
    publisher.pub.close()
    await follower.until(lambda: "gone" in follower.kinds, "gone")


async def _retrying(follower: Follower, publisher: Publisher) -> None:
    await _gone(follower, publisher)
    await follower.until_failed()


@pytest.mark.parametrize(
    "phase",
    [_at_once, _connecting, _connected, _untold, _unread, _unwatched, _gone, _retrying],
    ids=lambda it: it.__name__,
)
@on_both_links
@on_both_loops
async def test_close_leaves_nothing(kind: str, phase) -> None:
    """Whenever it comes: no socket, no task, no call any more, and no warning that something was not closed."""
    with Publisher() as warm:  # whatever libzmq and the loop open once is open from here on
        async with following(kind, warm.endpoint) as follower:
            await _connected(follower, warm)
    await asyncio.sleep(0.02)
    before = open_files()
    publisher = Publisher(f"tcp://127.0.0.1:{quiet_port()}")
    async with following(kind, publisher.endpoint) as follower:
        await phase(follower, publisher)
        follower.end()
        follower.woken.clear()
        publisher.__exit__()
        await until(lambda: open_files() <= before, "all descriptors closed")
        gc.collect()  # a socket that nobody closed warns now
        assert not follower.woken.is_set()
        assert follower.link.take_events() == follower.link.receive_runs() == []


@on_both_links
def test_a_link_is_what_the_interface_says(kind: str) -> None:
    """Each has all of `LiveLink`'s members."""
    link = make_link(kind, "tcp://127.0.0.1:9")
    members = {name for name in vars(links.LiveLink) if not name.startswith("_")} | set(links.LiveLink.__annotations__)
    assert {"open", "close", "receive_runs", "is_drained"} <= members
    assert [name for name in sorted(members) if not hasattr(link, name)] == []
