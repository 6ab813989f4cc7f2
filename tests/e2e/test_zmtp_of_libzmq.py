"""What a SUB socket of libzmq says to a publisher, byte for byte, beside what we say."""

import socket
from collections.abc import Callable, Iterator

import pytest
import zmq

from kvatlas.errors import StreamPeerError
from kvatlas.stream import zmtp
from kvatlas.stream.zmtp import GREETING, SubscriberHandshake

pytestmark = pytest.mark.e2e

PUB_READY = zmtp.ready(b"PUB")
Peers = Callable[..., socket.socket]


@pytest.fixture(name="connect")
def _connect() -> Iterator[Peers]:
    """Has a SUB socket of libzmq connect to us, and returns our end of the connection."""
    context, held = zmq.Context(), []

    def connect(topic: bytes, **options: int) -> socket.socket:
        sub = context.socket(zmq.SUB)
        for name, value in options.items():
            sub.setsockopt(getattr(zmq, name), value)
        sub.setsockopt(zmq.SUBSCRIBE, topic)
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(10)
            sub.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
            end, _ = server.accept()
        end.settimeout(10)
        held.extend((sub, end))
        return end

    yield connect
    for each in held:
        each.close()
    context.destroy(linger=0)


def take(end: socket.socket, count: int) -> bytes:
    """As many bytes as are expected; fewer when no more come in time."""
    data = b""
    while len(data) < count and (more := end.recv(count - len(data))):
        data += more
    return data


def greeting(minor: int) -> bytes:
    return GREETING[:11] + bytes([minor]) + GREETING[12:]


# Not 255 bytes towards ZMTP 3.0: libzmq 4.3.5 then says the message of 256 bytes has none.
@pytest.mark.parametrize(
    ("minor", "size"), [(0, 0), (0, 9), (0, 254), (0, 256), (0, 300), (1, 0), (1, 9), (1, 245), (1, 246), (1, 300)]
)
def test_we_say_what_libzmq_says(connect, minor, size):
    """Greeting but for the filler of its signature, READY and the subscription are those of a SUB of libzmq."""
    topic = b"t" * size
    end, ours = connect(topic), SubscriberHandshake(topic)
    said = ours.feed(b"")
    end.sendall(greeting(minor))  # libzmq goes on when it sees a version
    theirs = take(end, len(said))
    assert theirs[:1] + theirs[9:] == said[:1] + said[9:]
    said = ours.feed(greeting(minor))
    assert take(end, len(said)) == said
    said = ours.feed(PUB_READY)
    end.sendall(PUB_READY)
    assert take(end, len(said)) == said
    assert ours.rest == b""


@pytest.mark.parametrize("context", [b"", b"context", bytes(range(16)), bytes(range(20))])
def test_we_answer_a_ping_as_libzmq_does(connect, context):
    """With its context, cut to what is allowed."""
    end, ours = connect(b""), SubscriberHandshake(b"")
    sent = ours.feed(b"") + ours.feed(greeting(1)) + ours.feed(PUB_READY)
    end.sendall(greeting(1) + PUB_READY)
    take(end, len(sent))
    body = b"\x04PING\x00\x96" + context
    end.sendall(bytes([4, len(body)]) + body)
    answer = zmtp.answer_to(body)
    assert take(end, len(answer)) == answer


def test_we_ping_as_libzmq_does(connect):
    """With our patience in tenths of a second, and no context."""
    end, ours = connect(b"", HEARTBEAT_IVL=20, HEARTBEAT_TTL=3000, HEARTBEAT_TIMEOUT=10_000), SubscriberHandshake(b"")
    sent = ours.feed(b"") + ours.feed(greeting(1)) + ours.feed(PUB_READY)
    end.sendall(greeting(1) + PUB_READY)
    take(end, len(sent))
    assert take(end, len(zmtp.ping(3.0))) == zmtp.ping(3.0)


@pytest.mark.parametrize("kind", [zmq.PUB, zmq.XPUB])
def test_publishers_of_libzmq_take_us(kind):
    """A real PUB and XPUB go through the handshake, hear the subscription and send what it asks for."""
    context = zmq.Context()
    pub = context.socket(kind)
    pub.setsockopt(zmq.SNDTIMEO, 10_000)
    port = pub.bind_to_random_port("tcp://127.0.0.1")
    handshake = SubscriberHandshake(b"kv")
    with socket.create_connection(("127.0.0.1", port), timeout=10) as end:
        end.sendall(handshake.feed(b""))
        while handshake.rest is None:
            end.sendall(handshake.feed(end.recv(4096)))
        wire = b"\x01\x02kv" + b"\x00\x07payload"
        end.settimeout(0.02)
        received, tries = handshake.rest, 0
        while len(received) < len(wire) and tries < 500:  # the subscription is on its way for a moment
            pub.send_multipart([b"other", b"payload"])
            pub.send_multipart([b"kv", b"payload"])
            tries += 1
            try:
                received += end.recv(4096)
            except TimeoutError:
                continue
    context.destroy(linger=0)
    assert received[: len(wire)] == wire


@pytest.mark.parametrize(("kind", "name"), [(zmq.PULL, "PULL"), (zmq.ROUTER, "ROUTER"), (zmq.SUB, "SUB")])
def test_other_sockets_of_libzmq_are_told_apart(kind, name):
    """By what they say themselves; libzmq would try again for ever and say nothing."""
    assert refusal(kind) == f"it is a {name} socket, not a PUB socket"


def test_libzmq_hangs_up_where_it_wants_security():
    """Before it says which, so that only the end of the connection is there to be told."""
    assert refusal(zmq.PUB, PLAIN_SERVER=1) is None


def refusal(kind: int, **options: int) -> str | None:
    """Why a socket of libzmq cannot be followed; None where it hangs up first."""
    context = zmq.Context()
    other = context.socket(kind)
    for name, value in options.items():
        other.setsockopt(getattr(zmq, name), value)
    port = other.bind_to_random_port("tcp://127.0.0.1")
    handshake, said = SubscriberHandshake(b""), None
    with socket.create_connection(("127.0.0.1", port), timeout=10) as end:
        end.sendall(handshake.feed(b""))
        try:
            while data := end.recv(4096):
                end.sendall(handshake.feed(data))
        except StreamPeerError as error:
            said = error.message
    context.destroy(linger=0)
    return said
