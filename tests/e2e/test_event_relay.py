"""The relay that the tests on real engines break streams with: it must lose what it is told to, and nothing else."""

import time
from collections.abc import Iterator

import pytest
import zmq

from support.event_relay import EventRelay, running_relay

pytestmark = pytest.mark.e2e

WAIT_S = 10.0
Sockets = tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]", EventRelay]


@pytest.fixture(name="relayed")
def _relayed() -> Iterator[Sockets]:
    """A publisher, a subscriber that hears it, and the relay between them."""
    with (
        zmq.Context() as context,
        context.socket(zmq.PUB) as publisher,
        context.socket(zmq.SUB) as subscriber,
    ):
        for socket in (publisher, subscriber):
            socket.setsockopt(zmq.LINGER, 0)
        with running_relay(publisher.bind_to_random_port("tcp://127.0.0.1")) as relay:
            subscriber.setsockopt(zmq.RECONNECT_IVL, 20)
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")
            subscriber.connect(f"tcp://127.0.0.1:{relay.ports[0]}")
            await_subscription(publisher, subscriber)
            yield publisher, subscriber, relay


def await_subscription(publisher: "zmq.Socket[bytes]", subscriber: "zmq.Socket[bytes]") -> None:
    """Publish until something arrives, and read all of it."""
    deadline_s = time.monotonic() + WAIT_S
    while not subscriber.poll(50):
        assert time.monotonic() < deadline_s, "nothing comes through the relay"
        publisher.send_multipart([b"topic", b"hello"])
    assert heard(subscriber, publisher)[-1] == b"mark"


def heard(subscriber: "zmq.Socket[bytes]", publisher: "zmq.Socket[bytes]") -> list[bytes]:
    """Every message up to a mark that is sent now; the mark is the last."""
    publisher.send_multipart([b"topic", b"mark"])
    messages: list[bytes] = []
    while not messages or messages[-1] != b"mark":
        assert subscriber.poll(int(WAIT_S * 1000)), f"after {messages} nothing came"
        topic, message = subscriber.recv_multipart()
        assert topic == b"topic"
        messages.append(message)
    return messages


def test_messages_are_lost_whole_and_the_connection_stays(relayed: Sockets) -> None:
    """Short and long messages pass; those sent while it drops never come; later ones do, on the same connection."""
    publisher, subscriber, relay = relayed
    publisher.send_multipart([b"topic", bytes(100_000)])
    assert heard(subscriber, publisher) == [bytes(100_000), b"mark"]
    relay.drop_messages()
    for size in (1, 300):
        publisher.send_multipart([b"topic", bytes(size)])
    deadline_s = time.monotonic() + WAIT_S
    while relay.dropped_messages < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    relay.restore()
    assert heard(subscriber, publisher) == [b"mark"]
    assert relay.dropped_messages == 2


def test_a_cut_ends_the_connection_until_restored(relayed: Sockets) -> None:
    """Nothing comes through a cut relay; restored, it is found again on the same port."""
    publisher, subscriber, relay = relayed
    relay.cut()
    publisher.send_multipart([b"topic", b"unheard"])
    assert not subscriber.poll(200)
    relay.restore()
    await_subscription(publisher, subscriber)
