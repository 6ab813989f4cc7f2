"""Messages of a SUB socket, by their frames: the usual ones read fast, odd ones counted, the way back found."""

import itertools

import pytest
import zmq

from kvatlas.stream.live_channel import LiveReader

PROOF = 8  # messages of three frames in a row after which the next ones are taken to be such
FIRST_END, LAST_END = 10**9, 10**9 + 1
_names = itertools.count()


def number(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


def usual(seq: int, topic: bytes = b"kv") -> list[bytes]:
    return [topic, number(seq), b"\x93batch %d" % seq]


class Counting:
    """A socket that counts how often it is asked whether another frame follows."""

    def __init__(self, socket) -> None:
        self._socket = socket
        self.asked = 0

    def recv(self, flags: int = 0, copy: bool = True):
        self.asked += not copy
        return self._socket.recv(flags, copy)

    def getsockopt(self, option: int) -> int:
        self.asked += option == zmq.RCVMORE
        return self._socket.getsockopt(option)


class Wire:
    """A publisher, and a reader of what it sends."""

    def __init__(self, transport: str) -> None:
        context = zmq.Context.instance()
        self.pub, self.sub = context.socket(zmq.XPUB), context.socket(zmq.SUB)
        for socket in (self.pub, self.sub):
            socket.setsockopt(zmq.LINGER, 0)
            socket.set_hwm(0)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        endpoint = f"inproc://reader-{next(_names)}" if transport == "inproc" else "tcp://127.0.0.1:*"
        self.pub.bind(endpoint)
        self.sub.connect(self.pub.getsockopt_string(zmq.LAST_ENDPOINT))
        assert self.pub.recv() == b"\x01"  # the subscription has come: nothing is lost from now on
        self.socket = Counting(self.sub)
        self.reader = LiveReader(self.socket)

    def receive(self) -> tuple[int, bytes] | tuple[()] | None:
        """One message: () for one that is no batch, None when there is none."""
        bad = self.reader.bad_messages
        run = self.reader.receive_run(1, 1 << 20)
        if run:
            assert not self.reader.is_drained
            return run[0]
        if self.reader.is_drained and self.reader.bad_messages == bad:
            return None
        assert self.reader.bad_messages == bad + 1
        return ()

    def read(self, *messages: list[bytes]) -> list[object]:
        """Send these and two more, of which a short one before may take the first. What was read of these, then."""
        ends = [[b"end of test", number(seq), b"\x93"] for seq in (FIRST_END, LAST_END)]
        for message in [*messages, *ends]:
            self.pub.send_multipart(message)
        got: list[object] = []
        while (LAST_END, b"\x93") not in got:
            assert self.sub.poll(5_000) & zmq.POLLIN
            while (message := self.receive()) is not None:
                got.append(message)
        return [message for message in got if message not in {(FIRST_END, b"\x93"), (LAST_END, b"\x93")}]

    def proved(self) -> "Wire":
        """The reader has come to expect three frames."""
        self.read(*[usual(seq) for seq in range(PROOF)])
        return self

    def is_fast(self) -> bool:
        """Whether the next message is read fast: nobody asks whether another frame follows."""
        asked = self.socket.asked
        self.pub.send_multipart(usual(77))
        assert self.sub.poll(5_000) & zmq.POLLIN
        assert self.receive() == (77, b"\x93batch 77")
        return self.socket.asked == asked

    def close(self) -> None:
        self.pub.close(linger=0)
        self.sub.close(linger=0)


@pytest.fixture(name="wire", params=["inproc", "tcp"])
def _wire(request):
    wire = Wire(request.param)
    yield wire
    wire.close()


def test_runs_end_at_their_bounds_and_where_nothing_is_left(wire: Wire) -> None:
    """As many as asked for, the one that exceeds the bytes is the last; only what is not there drains the socket."""
    wire.proved()
    for seq in range(8):
        wire.pub.send_multipart([b"kv", number(seq), b"\x93" * 100])
    wire.pub.send_multipart([b"last", number(9), b""])
    assert wire.sub.poll(5_000) & zmq.POLLIN
    sizes, seqs = [], []
    while not seqs or seqs[-1] != 9:
        run = wire.reader.receive_run(3, 150)
        sizes.append(len(run))
        seqs += [seq for seq, _ in run]
    assert seqs == [*range(8), 9]
    assert max(sizes) <= 2  # the second one is more than 150 bytes
    assert wire.reader.receive_run(3, 150) == []
    assert wire.reader.is_drained


ODD = {
    "one frame": [b"alone"],
    "one frame of 8 bytes": [b"8 bytes!"],
    "two frames": [number(50), b"\x93 batch of 50"],
    "two frames, 8 bytes of payload": [number(50), b"8 bytes!"],
    "four frames": [b"", b"kv", number(50), b"\x93 batch of 50"],
    "four frames, 8 bytes of topic": [b"", b"8-topic!", number(50), b"\x93 batch of 50"],
    "five frames": [b"", b"", b"kv", number(50), b"\x93 batch of 50"],
    "a number of 7 bytes": [b"kv", b"7 bytes", b"\x93 batch of 50"],
    "a number of 9 bytes": [b"kv", b"9 bytes..", b"\x93 batch of 50"],
    "no number": [b"kv", b"", b"\x93 batch of 50"],
}
IS_A_BATCH = {
    "two frames",
    "two frames, 8 bytes of payload",
    "four frames",
    "four frames, 8 bytes of topic",
    "five frames",
}
SHORT = {name for name in ODD if name.startswith(("one", "two"))}


@pytest.mark.parametrize("topic", [b"kv", b"", b"8-topic!", b"a longer topic"])
def test_usual_messages(wire: Wire, topic: bytes) -> None:
    """Numbers and payloads arrive unchanged, before and after the reader takes three frames for granted."""
    messages = [usual(seq, topic) for seq in range(30)]
    assert wire.read(*messages) == [(seq, b"\x93batch %d" % seq) for seq in range(30)]
    assert wire.read([topic, number(2**64 - 1), b""]) == [(2**64 - 1, b"")]


def test_nothing_to_read(wire: Wire) -> None:
    """None, fast or not."""
    assert wire.receive() is None
    assert wire.proved().receive() is None


def test_three_frames_are_taken_for_granted_after_a_row(wire: Wire) -> None:
    """Eight messages prove it; then no frame is asked whether another follows."""
    fast = [wire.is_fast() for _ in range(PROOF + 3)]
    assert fast == [False] * PROOF + [True] * 3


@pytest.mark.parametrize("name", ODD)
def test_odd_messages_before_the_proof(wire: Wire, name: str) -> None:
    """Every message is taken for what it is; none of another form counts for the row."""
    got = wire.read(usual(1), ODD[name], usual(2))
    odd = (int.from_bytes(ODD[name][-2], "big"), ODD[name][-1]) if name in IS_A_BATCH else ()
    assert got == [(1, b"\x93batch 1"), odd, (2, b"\x93batch 2")]
    for _ in range(PROOF - 3):  # 2 and the two at the end of the reading count
        assert not wire.is_fast()
    assert wire.is_fast()


@pytest.mark.parametrize("name", ODD)
def test_odd_messages_after_the_proof(wire: Wire, name: str) -> None:
    """One bad message, nothing wrong told, all after it read; a short one may take its neighbour with it."""
    got = wire.proved().read(usual(1), ODD[name], *[usual(seq) for seq in range(2, 40)])
    assert got[0] == (1, b"\x93batch 1")
    assert got[1] == ()
    kept = [(seq, b"\x93batch %d" % seq) for seq in range(2, 40)]
    assert got[2:] == kept or (name in SHORT and got[2:] == kept[1:])
    assert wire.is_fast()


@pytest.mark.parametrize("name", ODD)
def test_an_odd_message_alone_after_the_proof(wire: Wire, name: str) -> None:
    """Nothing waits behind it: it is bad, no call blocks, and what comes later is read from its first frame."""
    wire.proved()
    wire.pub.send_multipart(ODD[name])
    assert wire.sub.poll(5_000) & zmq.POLLIN
    assert wire.receive() == ()
    assert wire.receive() is None
    assert not wire.is_fast()


@pytest.mark.parametrize(
    "names", list(itertools.product(["one frame", "two frames", "four frames", "a number of 7 bytes"], repeat=2))
)
def test_odd_messages_in_a_row_after_the_proof(wire: Wire, names: tuple[str, str]) -> None:
    """Whatever follows whatever: batches told are batches sent, and the way back is found."""
    got = wire.proved().read(*[ODD[name] for name in names], *[usual(seq) for seq in range(1, 20)])
    batches = [message for message in got if message]
    assert set(batches) <= {(50, b"\x93 batch of 50"), *((seq, b"\x93batch %d" % seq) for seq in range(1, 20))}
    assert batches[-18:] == [(seq, b"\x93batch %d" % seq) for seq in range(2, 20)]
    assert wire.is_fast()


def test_a_stream_without_topic_frames(wire: Wire) -> None:
    """Two frames a message, as older engines send: all read, never fast."""
    assert wire.read(*[[number(seq), b"\x93batch %d" % seq] for seq in range(30)]) == [
        (seq, b"\x93batch %d" % seq) for seq in range(30)
    ]


def test_a_publisher_that_stops_sending_topics(wire: Wire) -> None:
    """A restart may change the form: at most two messages are lost, then all are read."""
    got = wire.proved().read(*[[number(seq), b"\x93batch %d" % seq] for seq in range(30)])
    assert got[0] == ()
    kept = [(seq, b"\x93batch %d" % seq) for seq in range(1, 30)]
    assert got[1:] in (kept, kept[1:])  # alone in the socket the first one takes no other with it


@pytest.mark.parametrize("data", [b"", b"no batch", b"\x00"])
def test_a_payload_that_is_no_batch_is_told_all_the_same(wire: Wire, data: bytes) -> None:
    """Its number belongs to the order of the stream; whether it can be read is for others to say."""
    got = wire.proved().read(usual(1), [b"kv", number(50), data], *[usual(seq) for seq in range(2, 20)])
    expected = [(seq, b"\x93batch %d" % seq) for seq in range(1, 20)]
    assert got == [expected[0], (50, data), *expected[1:]]
    assert wire.is_fast()


def test_a_frame_too_many_behind_a_batch(wire: Wire) -> None:
    """It passes for the next message's first frame: that message may go with it, no more."""
    got = wire.proved().read(usual(1), [*usual(50), b"more"], *[usual(seq) for seq in range(2, 20)])
    kept = [(seq, b"\x93batch %d" % seq) for seq in range(2, 20)]
    assert got[1] in {(50, b"\x93batch 50"), ()}
    assert [message for message in got[2:] if message][-17:] == kept[1:]
    assert wire.is_fast()
