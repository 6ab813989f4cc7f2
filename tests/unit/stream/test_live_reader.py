"""Messages of a SUB socket, by their frames: each read for what it is, natively and through pyzmq alike."""

import itertools

import pytest
import zmq

from kvatlas._native import receive_runs
from kvatlas.stream import live_channel
from kvatlas.stream.libzmq import libzmq_calls
from kvatlas.stream.live_channel import LiveReader, receive_frames
from kvatlas.stream.runs import Run, append_batch

LAST = 2**64 - 1
FAR = 10**9  # the number of what ends a reading; nothing else is near it
PLENTY = 1 << 20
IS_NATIVE_HERE = receive_runs is not None and libzmq_calls() is not None
_names = itertools.count()


def number(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


def data(seq: int) -> bytes:
    return b"\x93batch %d" % seq


def usual(seq: int, topic: bytes = b"kv") -> list[bytes]:
    return [topic, number(seq), data(seq)]


class Wire:
    """A publisher, and a reader of what it sends."""

    def __init__(self, transport: str) -> None:
        self.context = zmq.Context()
        self.pub, self.sub = self.context.socket(zmq.XPUB), self.context.socket(zmq.SUB)
        for socket in (self.pub, self.sub):
            socket.setsockopt(zmq.LINGER, 0)
            socket.set_hwm(0)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        endpoint = f"inproc://reader-{next(_names)}" if transport == "inproc" else "tcp://127.0.0.1:*"
        self.pub.bind(endpoint)
        self.sub.connect(self.pub.getsockopt_string(zmq.LAST_ENDPOINT))
        assert self.pub.recv() == b"\x01"  # the subscription has come: nothing is lost from now on
        self.reader = LiveReader(self.sub)

    def send(self, *messages: list[bytes]) -> None:
        for message in messages:
            self.pub.send_multipart(message)

    def wait(self) -> None:
        assert self.sub.poll(5_000) & zmq.POLLIN

    def read(self, *messages: list[bytes], most: int = 64, most_bytes: int = PLENTY) -> list[Run]:
        """Send these and one more; the runs of these, joined over the calls that the last one took to come."""
        self.send(*messages, [b"end of test", number(FAR), b""])
        runs: list[Run] = []
        while not runs or runs[-1] != (FAR, [b""]):
            self.wait()
            for first_seq, payloads in self.reader.receive_runs(most, most_bytes):
                assert payloads
                for seq, payload in enumerate(payloads, first_seq):
                    append_batch(runs, seq, payload)
        return runs[:-1]

    def close(self) -> None:
        self.context.destroy(linger=0)


def frames_of_a_closed_socket(socket: live_channel.Socket) -> list[bytes]:
    """What the native path may leave to pyzmq's calls, and nothing else."""
    assert socket.closed
    return receive_frames(socket)


@pytest.fixture(
    name="wire",
    params=[
        pytest.param("native", marks=pytest.mark.skipif(not IS_NATIVE_HERE, reason="no native reader here")),
        "slow",
    ],
)
def _wire(request: pytest.FixtureRequest, transport: str, monkeypatch: pytest.MonkeyPatch):
    if request.param == "slow":
        monkeypatch.setattr(live_channel, "receive_runs", None)
    else:
        monkeypatch.setattr(live_channel, "receive_frames", frames_of_a_closed_socket)
    wire = Wire(transport)
    yield wire
    wire.close()


@pytest.fixture(params=["inproc", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    """How the messages travel."""
    return request.param


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
def test_an_odd_message_is_bad_and_costs_only_itself(wire: Wire, name: str) -> None:
    """It is counted, and both its neighbours are told; they follow one another, so they are one run."""
    assert wire.read(usual(1), ODD[name], usual(2)) == [(1, [data(1), data(2)])]
    assert wire.reader.bad_messages == 1


@pytest.mark.parametrize("name", BATCHES_OF_50)
def test_a_batch_is_found_from_the_end_of_its_message(wire: Wire, name: str) -> None:
    """Whatever comes before number and payload is the topic or nothing."""
    assert wire.read(usual(49), BATCHES_OF_50[name], usual(51)) == [(49, [data(49), data(50), data(51)])]
    assert wire.reader.bad_messages == 0


@pytest.mark.parametrize("transport", ["inproc"])
@pytest.mark.parametrize(
    "names", list(itertools.product(["one frame", "two frames, no number", "a number of 7 bytes"], repeat=2))
)
def test_odd_messages_in_a_row(wire: Wire, names: tuple[str, str]) -> None:
    """Whatever follows whatever: each is bad for itself, all batches are told."""
    messages = [usual(1), *[ODD[name] for name in names], BATCHES_OF_50["four frames"], ODD[names[0]], usual(2)]
    assert wire.read(*messages) == [(1, [data(1)]), (50, [data(50)]), (2, [data(2)])]
    assert wire.reader.bad_messages == 3


def test_a_message_that_is_bad_and_alone(wire: Wire) -> None:
    """No batch, not drained before it is known that nothing follows, and the next call finds nothing."""
    wire.send(ODD["one frame"])
    wire.wait()
    assert wire.reader.receive_runs(1, PLENTY) == []
    assert (wire.reader.bad_messages, wire.reader.is_drained) == (1, False)
    assert wire.reader.receive_runs(1, PLENTY) == []
    assert (wire.reader.bad_messages, wire.reader.is_drained) == (1, True)


@pytest.mark.parametrize("payload", [b"", b"no batch", b"\x00", b"\x93" * 100_000])
def test_a_payload_arrives_as_it_was_sent(wire: Wire, payload: bytes) -> None:
    """Whether it can be read is for others to say: its number belongs to the order of the stream."""
    assert wire.read(usual(1), [b"kv", number(2), payload], usual(3)) == [(1, [data(1), payload, data(3)])]


def test_runs_are_what_follows_by_number(wire: Wire) -> None:
    """A hole, a repetition and a step back each begin another run; the order of arrival is kept."""
    seqs = [5, 6, 7, 9, 10, 10, 11, 3, 4, 0, 1, 7]
    assert wire.read(*[usual(seq) for seq in seqs]) == [
        (5, [data(5), data(6), data(7)]),
        (9, [data(9), data(10)]),
        (10, [data(10), data(11)]),
        (3, [data(3), data(4)]),
        (0, [data(0), data(1)]),
        (7, [data(7)]),
    ]


@pytest.mark.parametrize("transport", ["inproc"])
def test_a_call_groups_its_runs_itself(wire: Wire) -> None:
    """What one call returns is grouped already, whatever bad messages lie between."""
    wire.send(usual(1), usual(2), ODD["no number"], usual(3), usual(8), usual(9), usual(1))
    assert wire.reader.receive_runs(64, PLENTY) == [
        (1, [data(1), data(2), data(3)]),
        (8, [data(8), data(9)]),
        (1, [data(1)]),
    ]
    assert (wire.reader.bad_messages, wire.reader.is_drained) == (1, True)


@pytest.mark.parametrize("transport", ["inproc"])
def test_no_number_follows_the_last_one(wire: Wire) -> None:
    """2**64 - 1 ends its run: 0 behind it is another stream's, and repeated it is no run either."""
    wire.send(*[usual(seq) for seq in (LAST - 1, LAST, 0, 1, LAST, LAST, 0)])
    assert wire.reader.receive_runs(64, PLENTY) == [
        (LAST - 1, [data(LAST - 1), data(LAST)]),
        (0, [data(0), data(1)]),
        (LAST, [data(LAST)]),
        (LAST, [data(LAST)]),
        (0, [data(0)]),
    ]


@pytest.mark.parametrize("transport", ["inproc"])
def test_a_call_reads_as_many_messages_as_it_may(wire: Wire) -> None:
    """Bad ones count; only a call that finds nothing more says that the socket is drained."""
    wire.send(usual(0), ODD["one frame"], *[usual(seq) for seq in (1, 2, 3)])
    told = [(wire.reader.receive_runs(most, PLENTY), wire.reader.is_drained) for most in (2, 0, 2, 1, 1)]
    assert told == [
        ([(0, [data(0)])], False),
        ([], False),
        ([(1, [data(1), data(2)])], False),
        ([(3, [data(3)])], False),
        ([], True),
    ]
    assert wire.reader.bad_messages == 1


@pytest.mark.parametrize("transport", ["inproc"])
def test_a_call_ends_with_the_payload_that_reaches_its_bytes(wire: Wire) -> None:
    """That of bad messages and topics does not count; one larger than all is read all the same."""
    for seq in range(5):
        wire.send([b"t" * 500, number(seq), b"x" * 100], [b"bad " * 100])
    wire.send([b"", number(5), b"x" * 1_000])
    sizes = []
    for most_bytes in (150, 100, 101, 1, 1, 0):
        runs = wire.reader.receive_runs(64, most_bytes)
        sizes.append(([len(payload) for _, payloads in runs for payload in payloads], wire.reader.is_drained))
    assert sizes == [
        ([100, 100], False),
        ([100], False),
        ([100, 100], False),
        ([1_000], False),
        ([], True),
        ([], False),
    ]
    assert wire.reader.bad_messages == 5


def test_nothing_to_read(wire: Wire) -> None:
    """No run, and the socket is drained; the next message is read as ever."""
    for _ in range(2):
        assert wire.reader.receive_runs(64, PLENTY) == []
        assert wire.reader.is_drained
    assert wire.read(usual(1)) == [(1, [data(1)])]


def test_many_batches_are_read_in_many_calls(wire: Wire) -> None:
    """However they are cut, each is told once and in its place."""
    messages = [usual(seq) if seq % 3 else [number(seq), data(seq)] for seq in range(500)]
    assert wire.read(*messages, most=7, most_bytes=40) == [(0, [data(seq) for seq in range(500)])]


def test_what_was_read_outlives_the_socket(wire: Wire) -> None:
    """Payloads are copies: neither later messages nor the end of the socket change them."""
    runs = wire.read(usual(1), [b"", number(2), b"long" * 1_000])
    wire.read(usual(3), [b"", number(4), b"more" * 1_000])
    wire.close()
    assert runs == [(1, [data(1), b"long" * 1_000])]


def test_a_closed_socket_is_an_error(wire: Wire) -> None:
    """As with pyzmq, whose calls answer for it."""
    wire.sub.close(linger=0)
    with pytest.raises(zmq.ZMQError) as caught:
        wire.reader.receive_runs(64, PLENTY)
    assert caught.value.errno == zmq.ENOTSOCK
    assert wire.reader.bad_messages == 0


def test_a_socket_that_cannot_receive_is_an_error(wire: Wire) -> None:
    """The word of libzmq itself is passed on; the socket is not drained."""
    with wire.context.socket(zmq.PUB) as mute:
        reader = LiveReader(mute)
        with pytest.raises(zmq.ZMQError) as caught:
            reader.receive_runs(64, PLENTY)
    assert caught.value.errno == zmq.ENOTSUP
    assert not reader.is_drained
