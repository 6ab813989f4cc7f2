"""TcpLink against a peer that says what a script tells it: the wrong ones, the slow ones, and those that break off."""

import asyncio
import contextlib
import gc
import re
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from support.engines import until
from support.gateway import on_both_loops
from support.live_links import (
    GREETING,
    READY,
    SUBSCRIBER_SAYS,
    Follower,
    Remote,
    ScriptedPublisher,
    following,
    frame,
    message,
    open_files,
    quiet_port,
)

pytestmark = pytest.mark.e2e

TOO_OLD = b"\xff\0\0\0\0\0\0\0\x01\x7f" + b"\x01\x02\0\0"
CURVE = GREETING.replace(b"NULL\0", b"CURVE")
PULL = READY.replace(b"\x19\x05", b"\x1a\x05").replace(b"\x03PUB", b"\x04PULL")
PONG = b"\x04\x05\x04PONG"


async def stay(remote: Remote) -> None:
    """A publisher that is right, and quiet."""
    await remote.shake_hands()
    await remote.wait_end()


def saying(*replies: bytes):
    """A peer that says one of these per piece it hears, then listens until the other side gives up."""

    async def script(remote: Remote) -> None:
        for reply in replies:
            await remote.send(reply)
            await remote.reader.read(4096)
        await remote.wait_end()

    return script


def publishing(*pieces: bytes):
    """A publisher that sends this after the handshake and then stays."""

    async def script(remote: Remote) -> None:
        await remote.shake_hands()
        for piece in pieces:
            await remote.send(piece)
        await remote.wait_end()

    return script


# -- attempts that fail --


@on_both_loops
async def test_a_refused_connection() -> None:
    """It is told as such, and the next attempts go on until somebody listens."""
    port = quiet_port()
    async with following("tcp", f"tcp://127.0.0.1:{port}") as follower:
        for _ in range(3):
            assert await follower.until_failed() == "Connection refused"
        async with ScriptedPublisher(publishing(message(5, b"x")), port):
            await follower.until(lambda: follower.told[-2:] == ["connected", 5], "connected")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (saying(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "does not speak ZMTP.*HTTP/1.1 400"),
        (saying(b"H"), "does not speak ZMTP.*H"),
        (saying(b"\x01\0"), "does not speak ZMTP"),
        (saying(TOO_OLD), "ZMTP 2, older"),
        (saying(CURVE), "security mechanism CURVE"),
        (saying(GREETING, PULL), "a PULL socket, not a PUB"),
        (saying(GREETING, b"\x04\x06\x05READY"), "a nameless socket"),
        (saying(GREETING, b"\x04\x0b\x05ERROR\x04busy"), "refuses: busy"),
        (saying(GREETING, message(0, b"x")), "a message before it was ready"),
    ],
    ids=["http", "one letter", "zmtp1", "zmtp2", "curve", "pull", "nameless", "error", "message"],
)
@on_both_loops
async def test_a_peer_that_is_no_publisher(script, reason: str) -> None:
    """What it is instead is told, attempt after attempt; once a publisher is there instead, it is followed."""
    async with ScriptedPublisher(script) as peer, following("tcp", peer.endpoint) as follower:
        for _ in range(2):
            assert re.search(reason, await follower.until_failed())
        peer.script = publishing(message(5, b"x"))
        await follower.until(lambda: follower.told[-2:] == ["connected", 5], "connected")


@pytest.mark.parametrize("heard", [0, 1, len(GREETING), len(GREETING) + 27])
@pytest.mark.parametrize("said", [0, 1, 11, len(GREETING), len(GREETING) + 5, len(GREETING + READY) - 1])
@on_both_loops
async def test_a_peer_that_closes_during_the_handshake(said: int, heard: int) -> None:
    """At whatever stage, and whatever it had heard until then: an attempt that failed, and others follow."""

    async def script(remote: Remote) -> None:
        await remote.send((GREETING + READY)[:said])
        if said >= len(GREETING) or heard <= len(GREETING):
            await remote.reader.readexactly(heard)

    async with ScriptedPublisher(script) as peer, following("tcp", peer.endpoint) as follower:
        assert re.search(r"hung up|reset|Broken pipe", await follower.until_failed())
        peer.script = stay
        await follower.until(lambda: follower.told[-1] == "connected", "connected")
        assert follower.kinds == ["connected"]


@pytest.mark.parametrize("said", [b"", GREETING[:20], GREETING, GREETING + READY[:9]])
@on_both_loops
async def test_a_peer_that_falls_silent_during_the_handshake(said: bytes) -> None:
    """It has as long as the longest pause, each time."""
    async with (
        ScriptedPublisher(saying(said)) as peer,
        following("tcp", peer.endpoint, reconnect_max_s=0.1) as follower,
    ):
        for _ in range(2):
            assert await follower.until_failed() == "it takes the connection and does not say what a ZMQ socket says"
        peer.script = stay
        await follower.until(lambda: "connected" in follower.told, "connected")


@on_both_loops
async def test_a_handshake_byte_by_byte() -> None:
    """A peer may take its time, within the patience."""

    async def script(remote: Remote) -> None:
        await remote.send_pieces(GREETING + READY + message(3, b"three"), 1)
        assert (await remote.wait_end()) == SUBSCRIBER_SAYS

    async with ScriptedPublisher(script) as peer, following("tcp", peer.endpoint) as follower:
        await follower.until(lambda: 3 in follower.told, "the batch")
        assert follower.told == ["connected", 3]


@on_both_loops
async def test_pauses_grow_up_to_the_longest() -> None:
    """20, 40, 80 ms, and from then on 160 ms each, at least; a machine under load may add to them."""

    async def close(_: Remote) -> None:
        pass

    async with (
        ScriptedPublisher(close) as peer,
        following("tcp", peer.endpoint, reconnect_s=0.02, reconnect_max_s=0.16) as follower,
    ):
        await follower.until(lambda: len(peer.accepted_s) >= 9, "nine attempts")
    pauses_s = [after - before for before, after in zip(peer.accepted_s, peer.accepted_s[1:], strict=False)]
    wanted_s = [0.02, 0.04, 0.08, *[0.16] * 5]
    assert all(pause >= 0.9 * wanted - 0.01 for pause, wanted in zip(pauses_s, wanted_s, strict=False)), pauses_s
    assert min(pauses_s[-4:]) < 0.3, pauses_s  # without a bound they would be 0.32, 0.64, 1.28, 2.56


@on_both_loops
async def test_pauses_begin_anew_with_a_connection() -> None:
    """A publisher that was there is tried again soon, however long it took to find it."""

    async def close(_: Remote) -> None:
        pass

    async def connect_and_close(remote: Remote) -> None:
        await remote.shake_hands()

    async with (
        ScriptedPublisher(close) as peer,
        following("tcp", peer.endpoint, reconnect_s=0.01, reconnect_max_s=30.0) as follower,
    ):
        await follower.until(lambda: len(peer.accepted_s) >= 6, "six attempts")  # the next pause: 0.32 s
        peer.script = connect_and_close
        await follower.until(lambda: follower.kinds.count("gone") >= 6, "six connections")
    pauses_s = [after - before for before, after in zip(peer.accepted_s[6:], peer.accepted_s[7:], strict=False)]
    assert min(pauses_s) < 0.15, pauses_s


# -- names and addresses --


def resolves_to(follower: Follower, addresses: object) -> None:
    """From now on the name `engine` has these addresses, or brings that error."""
    loop = follower.link._loop

    async def getaddrinfo(host: str, port: int, **options: object) -> object:
        if host != "engine":  # uvloop asks for addresses too
            return await type(loop).getaddrinfo(loop, host, port, **options)
        if isinstance(addresses, Exception):
            raise addresses
        return addresses

    loop.getaddrinfo = getaddrinfo


def tcp4(port: int) -> tuple[object, ...]:
    return socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", port)


@contextlib.contextmanager
def deaf_port() -> Iterator[int]:
    """A port that answers nothing, not even with a refusal: its queue of connections is full and nobody takes them."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@on_both_loops
async def test_a_name_that_nobody_knows() -> None:
    """The resolver's words are told; once it knows the name, all is well."""
    async with ScriptedPublisher(stay) as peer, following("tcp", "tcp://engine:5557") as follower:
        resolves_to(follower, socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
        for _ in range(2):
            assert await follower.until_failed() == "Name or service not known"
        resolves_to(follower, [])
        await follower.until(lambda: follower.events[-1].reason == "the name has no address", "no address")
        resolves_to(follower, [tcp4(peer.port)])
        await follower.until_told("connected")


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".invalid", "a\0b"])
@on_both_loops
async def test_a_name_that_can_be_none(host: str) -> None:
    """It fails like any other, and does not end the attempts."""
    async with following("tcp", f"tcp://{host}:5557") as follower:
        for _ in range(3):
            assert await follower.until_failed()


@on_both_loops
async def test_a_name_of_the_machine_itself() -> None:
    """The system's own resolver is asked."""
    async with ScriptedPublisher(stay) as peer, following("tcp", f"tcp://localhost:{peer.port}") as follower:
        await follower.until_told("connected")
        assert len(peer.accepted_s) == 1


@on_both_loops
async def test_the_first_address_that_answers() -> None:
    """One that refuses, one of a kind that this machine does not have, one that is silent: none hides the next."""
    unknown = (12_345, socket.SOCK_STREAM, 0, "", ("::1", 1, 0, 0))
    with deaf_port() as deaf:
        async with ScriptedPublisher(stay) as peer, following("tcp", "tcp://engine:1", reconnect_max_s=0.2) as follower:
            resolves_to(follower, [tcp4(quiet_port()), unknown, tcp4(deaf), tcp4(peer.port)])
            await follower.until_told("connected")
            assert [event.kind for event in follower.events] == ["connected"]


@on_both_loops
async def test_an_address_that_does_not_answer() -> None:
    """It is given up after the longest pause, and tried again."""
    with deaf_port() as deaf:
        async with following("tcp", f"tcp://127.0.0.1:{deaf}", reconnect_max_s=0.1) as follower:
            for _ in range(2):
                assert await follower.until_failed() == "no answer in time"


# -- the stream --


@on_both_loops
async def test_what_a_subscriber_says() -> None:
    """Byte for byte: the greeting, what it is, and what it wants."""
    said = []

    async def script(remote: Remote) -> None:
        await remote.send(GREETING + READY)
        said.append(await remote.reader.readexactly(len(SUBSCRIBER_SAYS) + 1))
        await remote.wait_end()

    async with ScriptedPublisher(script) as peer, following("tcp", peer.endpoint, topic="k"):
        await until(lambda: said, "the subscription")
    assert said == [SUBSCRIBER_SAYS.replace(b"\x0a\x09SUBSCRIBE", b"\x0b\x09SUBSCRIBEk")]


@on_both_loops
async def test_a_publisher_of_an_older_minor_version() -> None:
    """ZMTP 3.0 has no SUBSCRIBE: the subscription is a message of one byte and the topic."""
    said = []

    async def script(remote: Remote) -> None:
        await remote.send(GREETING.replace(b"\x03\x01NULL", b"\x03\0NULL") + READY)
        said.append((await remote.reader.readexactly(64 + 27 + 5))[64 + 27 :])
        await remote.wait_end()

    async with ScriptedPublisher(script) as peer, following("tcp", peer.endpoint, topic="kv"):
        await until(lambda: said, "the subscription")
    assert said == [b"\0\x03\x01kv"]


@on_both_loops
async def test_a_stream_byte_by_byte() -> None:
    """Wherever its pieces end: batches, what is none, commands in between."""
    stream = (
        message(1, b"one")
        + frame(b"alone")
        + message(2, b"")
        + b"\x04\x09\x04PING\0\x64ab"
        + frame(b"kv", more=True)
        + b"\x04\x06\x04PING\0"
        + frame((3).to_bytes(8, "big"), more=True)
        + frame(b"x" * 300)
        + message(9, b"nine")
    )
    answers = []

    async def script(remote: Remote) -> None:
        await remote.shake_hands()
        await remote.send_pieces(stream, 1)
        answers.append(await remote.wait_end())

    async with ScriptedPublisher(script) as peer:
        async with following("tcp", peer.endpoint) as follower:
            await follower.until(lambda: 9 in follower.told, "the last batch")
            assert follower.runs == [(1, [b"one", b"", b"x" * 300]), (9, [b"nine"])]
            assert follower.link.bad_messages == 1
        await until(lambda: answers, "the answers")
    assert answers == [b"\x04\x07\x04PONGab" + PONG]


@pytest.mark.parametrize("cut", [0, 1, 5, 12, 20])
@on_both_loops
async def test_data_in_the_same_segment_as_ready(cut: int) -> None:
    """What comes with the handshake's end is read without another byte having to come, whole or begun."""
    whole, begun = message(1, b"one") + message(2, b"two"), message(3, b"three")

    async def script(remote: Remote) -> None:
        await remote.shake_hands(whole + begun[:cut])
        await go_on.wait()
        await remote.send(begun[cut:])
        await remote.wait_end()

    go_on = asyncio.Event()
    async with ScriptedPublisher(script) as peer, following("tcp", peer.endpoint) as follower:
        await follower.until(lambda: 2 in follower.told, "what came along")
        assert follower.told == ["connected", 1, 2]
        go_on.set()
        await follower.until(lambda: follower.runs == [(1, [b"one", b"two", b"three"])], "the rest")


@on_both_loops
async def test_data_with_ready_and_the_end() -> None:
    """A publisher that closes right behind it: connected, the batch, gone."""

    async def script(remote: Remote) -> None:
        await remote.shake_hands(message(1, b"one"))

    async with ScriptedPublisher(script) as peer, following("tcp", peer.endpoint, reconnect_s=30.0) as follower:
        await follower.until(lambda: "gone" in follower.told, "gone")
        assert follower.told == ["connected", 1, "gone"]
        assert follower.events[-1].reason == "the connection was closed by the other side"


@pytest.mark.parametrize("piece", [1_000, 10_000])
@on_both_loops
async def test_a_long_frame_in_small_pieces(piece: int) -> None:
    """Costs what its bytes cost, not its pieces times its bytes; what follows in the same piece is read as well."""
    payload = bytes(range(256)) * (32 * 1024)  # 8 MB; copied at each of the pieces that would take many seconds

    async def script(remote: Remote) -> None:
        await remote.shake_hands()
        await remote.send_pieces(message(1, b"one") + message(2, payload) + message(3, b"three"), piece)
        await remote.wait_end()

    async with ScriptedPublisher(script) as peer, following("tcp", peer.endpoint) as follower:
        before_s = time.process_time()
        await follower.until(lambda: follower.runs == [(1, [b"one", payload, b"three"])], "the frame")
        assert time.process_time() - before_s < 3.0


@on_both_loops
async def test_a_connection_that_ends_within_a_long_frame() -> None:
    """What had come of it is forgotten."""

    async def script(remote: Remote) -> None:
        await remote.shake_hands()
        await remote.send(message(1, b"one") + message(2, bytes(1_000_000))[:-1])

    async with ScriptedPublisher(script) as peer, following("tcp", peer.endpoint) as follower:
        await follower.until(lambda: "gone" in follower.told, "gone")
        peer.script = publishing(message(7, b"seven"))
        await follower.until(lambda: 7 in follower.told, "the new connection's batch")
        assert set(follower.told) == {"connected", 1, "gone", 7}


@pytest.mark.parametrize(
    "last",
    [
        frame(b"kv", more=True) + b"\x02" + struct.pack(">Q", 1_000_001),
        b"\x02" + struct.pack(">Q", 2**64 - 1),
        b"\x06" + struct.pack(">Q", 1_000_001),
        b"\x08\x01x",
        b"\x05\x01x",
        b"\xff",
    ],
    ids=["large", "largest", "large command", "unknown flag", "more of a command", "all flags"],
)
@pytest.mark.parametrize("with_ready", [False, True])
@on_both_loops
async def test_bytes_that_are_no_frame_end_the_connection(last: bytes, with_ready: bool) -> None:
    """Or one above the bound: the batches before it are delivered, the reason names the bound, another attempt follows."""
    stream = message(1, b"one") + message(2, b"two") + last

    async def script(remote: Remote) -> None:
        if with_ready:
            await remote.shake_hands(stream)
        else:
            await remote.shake_hands()
            await remote.send(stream)
        await remote.wait_end()

    async with (
        ScriptedPublisher(script) as peer,
        following("tcp", peer.endpoint, max_message_bytes=1_000_000) as follower,
    ):
        await follower.until(lambda: "gone" in follower.told, "gone")
        assert follower.told == ["connected", 1, 2, "gone"]
        assert re.search("no ZMTP frame, or one of more than 1000000 bytes", follower.events[-1].reason)
        peer.script = publishing(message(3, bytes(1_000_000)))
        await follower.until(lambda: 3 in follower.told, "a frame within the bound")


@on_both_loops
async def test_a_publisher_that_gives_up() -> None:
    """An ERROR command ends the connection with its reason."""
    async with (
        ScriptedPublisher(publishing(message(1, b"one") + b"\x04\x0b\x05ERROR\x04busy")) as peer,
        following("tcp", peer.endpoint, reconnect_s=30.0) as follower,
    ):
        await follower.until(lambda: "gone" in follower.told, "gone")
        assert follower.told == ["connected", 1, "gone"]
        assert follower.events[-1].reason == "the connection was given up by the other side: busy"


@pytest.mark.parametrize("context", [b"", b"c", b"sixteen bytes it"])
@on_both_loops
async def test_a_ping_is_answered(context: bytes) -> None:
    """With its own context, at once, and although nobody asked for batches."""
    answers = []

    async def script(remote: Remote) -> None:
        await remote.shake_hands()
        await remote.send(bytes([4, 7 + len(context)]) + b"\x04PING\0\x0a" + context)
        answers.append(await remote.reader.readexactly(len(PONG) + 2 + len(context) - 2))
        await remote.wait_end()

    async with ScriptedPublisher(script) as peer, following("tcp", peer.endpoint) as follower:
        await follower.meanwhile(until(lambda: answers, "the answer"))
    assert answers == [bytes([4, 5 + len(context)]) + b"\x04PONG" + context]


# -- signs of life, and the end --


@on_both_loops
async def test_no_life_for_three_heartbeats() -> None:
    """A peer that answers no PING is given up, and tried again."""
    heard = []

    async def script(remote: Remote) -> None:
        await remote.shake_hands()
        heard.append(await remote.wait_end())

    async with ScriptedPublisher(script) as peer, following("tcp", peer.endpoint, heartbeat_s=0.05) as follower:
        await follower.until(lambda: follower.kinds[:3] == ["connected", "gone", "connected"], "connected again")
        assert follower.events[1].reason == "the connection showed no life for 0.15 s"
    assert re.fullmatch(rb"(\x04\x07\x04PING\0\x01){2,}", heard[0])


@pytest.mark.parametrize("sign", [PONG, message(0, b""), b"\0"])
@on_both_loops
async def test_any_byte_is_a_sign_of_life(sign: bytes) -> None:
    """An answer to PING, a batch, or a part of one."""

    async def script(remote: Remote) -> None:
        await remote.shake_hands()
        for at in range(60):
            await remote.send(sign if sign != b"\0" else message(0, bytes(100))[at : at + 1])
            await asyncio.sleep(0.02)
        done.set()
        await remote.wait_end()

    done = asyncio.Event()
    async with ScriptedPublisher(script) as peer, following("tcp", peer.endpoint, heartbeat_s=0.1) as follower:
        await follower.meanwhile(_wait(done))
        assert follower.kinds == ["connected"]


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


@on_both_loops
async def test_data_that_waits_unread_is_life() -> None:
    """A receiver that is slow to read does not take that for the publisher's death."""
    async with (
        ScriptedPublisher(publishing(message(1, b"one"))) as peer,
        following("tcp", peer.endpoint, heartbeat_s=0.05) as follower,
    ):
        follower.link.unwatch()
        await until(lambda: follower.link._socket is not None, "a connection")
        await asyncio.sleep(0.6)
        assert [event.kind for event in follower.link.take_events()] == ["connected"]
        follower.read()
        assert follower.told == [1]
        follower.link.watch()
        await follower.until(lambda: "gone" in follower.told, "silent once all is read")
        assert "no life" in follower.events[0].reason


@on_both_loops
async def test_a_peer_that_resets() -> None:
    """The system's word for it is told after the batches."""

    async def script(remote: Remote) -> None:
        await remote.shake_hands()
        await remote.send(message(1, b"one"))
        await read.wait()
        remote.reset()

    read = asyncio.Event()
    async with ScriptedPublisher(script) as peer, following("tcp", peer.endpoint, reconnect_s=30.0) as follower:
        await follower.until(lambda: follower.told == ["connected", 1], "the batch")
        read.set()
        await follower.until(lambda: "gone" in follower.told, "gone")
        assert follower.told == ["connected", 1, "gone"]
        assert follower.events[-1].reason == "the connection broke: Connection reset by peer"


@on_both_loops
async def test_what_came_before_the_end_is_read_after_it() -> None:
    """Though heartbeats find that the peer is gone: all it had sent is delivered before that is told."""

    async def script(remote: Remote) -> None:
        await remote.shake_hands()
        await remote.send(b"".join(message(seq, bytes(1_000)) for seq in range(50)))
        remote.reader._transport.pause_reading()  # what is not read when it closes makes a reset of the end
        await closing.wait()

    closing = asyncio.Event()
    async with (
        ScriptedPublisher(script) as peer,
        following("tcp", peer.endpoint, heartbeat_s=0.05, reconnect_s=30.0) as follower,
    ):
        follower.link.unwatch()
        await until(lambda: follower.link._socket is not None, "a connection")
        await asyncio.sleep(0.2)
        closing.set()
        await asyncio.sleep(0.3)  # a few heartbeats go to nobody
        follower.link.watch()
        await follower.until(lambda: "gone" in follower.told, "gone")
        assert follower.told == ["connected", *range(50), "gone"]


# -- close --


@pytest.mark.parametrize(
    "script",
    [saying(b""), saying(GREETING), saying(GREETING + READY[:5]), stay, publishing(message(1, bytes(1_000_000))[:-1])],
    ids=["silent", "greeted", "ready", "connected", "within a frame"],
)
@on_both_loops
async def test_close_at_each_stage(script) -> None:
    """The peer sees the end, and neither a task nor a descriptor is left."""
    async with ScriptedPublisher(script) as peer:
        await asyncio.sleep(0)
        before = open_files()
        async with following("tcp", peer.endpoint) as follower:
            await until(lambda: peer.accepted_s, "a connection")
            await asyncio.sleep(0.02)
            follower.end()
            await until(lambda: not peer.connections, "the end of the script")
            await until(lambda: open_files() <= before, "all descriptors closed")
            assert len(peer.accepted_s) == 1
    gc.collect()


@on_both_loops
async def test_close_while_connecting() -> None:
    """Nobody answers: nothing is left either."""
    with deaf_port() as deaf:
        await asyncio.sleep(0)
        before = open_files()
        async with following("tcp", f"tcp://127.0.0.1:{deaf}", reconnect_max_s=30.0) as follower:
            await until(lambda: open_files() > before, "a socket")
            follower.end()
            await until(lambda: open_files() <= before, "all descriptors closed")
            assert follower.link.take_events() == []
    gc.collect()


@on_both_loops
async def test_close_while_the_name_is_looked_up() -> None:
    """The resolver is not waited for."""
    async with following("tcp", "tcp://engine:5557", reconnect_max_s=30.0) as follower:
        asked = asyncio.Event()

        async def getaddrinfo(host: str, port: int, **_: object) -> None:
            asked.set()
            await asyncio.Event().wait()

        follower.link._loop.getaddrinfo = getaddrinfo
        await asked.wait()
        follower.end()
        assert follower.link.take_events() == []


@on_both_loops
async def test_close_from_within_a_wake() -> None:
    """Whoever is told of something may end the link there and then."""
    async with (
        ScriptedPublisher(publishing(message(1, b"one"))) as peer,
        following("tcp", peer.endpoint) as follower,
    ):
        follower.link._wake = follower.link.close
        await until(lambda: peer.accepted_s and not peer.connections, "the end of the script")
        assert follower.link.receive_runs() == []
