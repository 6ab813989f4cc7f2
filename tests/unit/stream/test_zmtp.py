"""The handshake of a SUB socket, byte by byte, with peers of every sort."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvatlas.errors import StreamPeerError
from kvatlas.stream import zmtp
from kvatlas.stream.zmtp import GREETING, SubscriberHandshake

OUR_READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
PUB_READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
SUBSCRIBE_ALL = b"\x04\x0a\x09SUBSCRIBE"
BATCH = b"\x01\x00" + b"\x01\x08" + bytes(8) + b"\x00\x02hi"


def greeting(mechanism: bytes = b"NULL", version: bytes = b"\x03\x01", filler: bytes = bytes(8)) -> bytes:
    """What a peer says first."""
    return b"\xff" + filler + b"\x7f" + version + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


def ready(*properties: tuple[bytes, bytes]) -> bytes:
    """A READY with these properties, in the short form or else in the long one."""
    body = b"\x05READY" + b"".join(
        bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value for name, value in properties
    )
    return bytes([4, len(body)]) + body if len(body) < 256 else b"\x06" + len(body).to_bytes(8, "big") + body


def started(topic: bytes = b"") -> SubscriberHandshake:
    handshake = SubscriberHandshake(topic)
    handshake.feed(b"")
    return handshake


def problem(*pieces: bytes) -> str:
    """What a handshake says of a peer that sends these pieces; the same when every byte comes alone."""
    said = []
    for parts in (pieces, [bytes([byte]) for byte in b"".join(pieces)]):
        handshake = started()
        with pytest.raises(StreamPeerError) as raised:
            _ = [handshake.feed(part) for part in parts]
        assert handshake.rest is None
        said.append(raised.value.message)
    assert said[0] == said[1] or "it began with" in said[1]  # bytes that came alone are quoted alone
    return said[0]


# What we say


def test_the_greeting_is_that_of_zmtp_3_1_without_security():
    """64 bytes: the signature, version 3.1, NULL, no server, filler."""
    handshake = SubscriberHandshake(b"")
    assert handshake.feed(b"") == GREETING
    assert bytes.fromhex("ff 0000000000000000 7f 03 01 4e554c4c") + bytes(16 + 1 + 31) == GREETING
    assert len(GREETING) == 64


def test_each_part_is_answered_as_it_ends():
    """READY follows the peer's greeting, the subscription its READY; then the handshake is done."""
    handshake = started()
    assert handshake.feed(greeting()) == OUR_READY
    assert handshake.rest is None
    assert handshake.feed(PUB_READY) == SUBSCRIBE_ALL
    assert handshake.rest == b""


def test_all_at_once_is_answered_at_once():
    """What comes behind the peer's READY belongs to the traffic."""
    handshake = started()
    assert handshake.feed(greeting() + PUB_READY + BATCH) == OUR_READY + SUBSCRIBE_ALL
    assert handshake.rest == BATCH


def test_every_byte_may_come_alone():
    """Answers are sent at the very byte that ends a part."""
    handshake, answers = started(), []
    for byte in greeting() + PUB_READY:
        assert handshake.rest is None
        answers.append(handshake.feed(bytes([byte])))
    assert answers == [b""] * 63 + [OUR_READY] + [b""] * (len(PUB_READY) - 1) + [SUBSCRIBE_ALL]
    assert handshake.rest == b""


@given(st.lists(st.integers(0, 200), max_size=6), st.sampled_from([b"\x03\x00", b"\x03\x01", b"\x03\x02"]))
def test_any_cut_leads_to_the_same_answers(places, version):
    """However the bytes come, all answers together and what is left to the traffic are the same."""
    handshake, sent = started(b"kv"), b""
    wire = greeting(version=version) + b"\x04\x02\x01X" + PUB_READY
    ends = sorted(place % (len(wire) + 1) for place in places)
    for start, end in zip([0, *ends], [*ends, len(wire)], strict=True):
        sent += handshake.feed(wire[start:end]) if end > start else b""
    subscription = b"\x00\x03\x01kv" if version == b"\x03\x00" else b"\x04\x0c\x09SUBSCRIBEkv"
    assert (sent, handshake.rest) == (OUR_READY + subscription, b"")


@pytest.mark.parametrize(
    ("version", "topic", "subscription"),
    [
        (b"\x03\x01", b"", b"\x04\x0a\x09SUBSCRIBE"),
        (b"\x03\x01", b"kv-events", b"\x04\x13\x09SUBSCRIBEkv-events"),
        (b"\x03\x01", b"t" * 245, b"\x04\xff\x09SUBSCRIBE" + b"t" * 245),
        (b"\x03\x01", b"t" * 246, b"\x06\0\0\0\0\0\0\x01\x00\x09SUBSCRIBE" + b"t" * 246),
        (b"\x03\x01", b"t" * 300, b"\x06\0\0\0\0\0\0\x01\x36\x09SUBSCRIBE" + b"t" * 300),
        (b"\x03\x02", b"", b"\x04\x0a\x09SUBSCRIBE"),
        (b"\x03\x00", b"", b"\x00\x01\x01"),
        (b"\x03\x00", b"kv-events", b"\x00\x0a\x01kv-events"),
        (b"\x03\x00", b"t" * 254, b"\x00\xff\x01" + b"t" * 254),
        (b"\x03\x00", b"t" * 255, b"\x02\0\0\0\0\0\0\x01\x00\x01" + b"t" * 255),
        (b"\x03\x00", b"t" * 300, b"\x02\0\0\0\0\0\0\x01\x2d\x01" + b"t" * 300),
    ],
)
def test_the_subscription_is_what_the_peers_version_knows(version, topic, subscription):
    """A command from 3.1 on, before that a message that begins with 1; long where it has more than 255 bytes."""
    handshake = started(topic)
    handshake.feed(greeting(version=version))
    assert handshake.feed(PUB_READY) == subscription


@pytest.mark.parametrize(
    ("patience_s", "wire"),
    [
        (15.0, b"\x04\x07\x04PING\x00\x96"),
        (0.25, b"\x04\x07\x04PING\x00\x02"),
        (6553.5, b"\x04\x07\x04PING\xff\xff"),
        (1e9, b"\x04\x07\x04PING\xff\xff"),
    ],
)
def test_a_ping_tells_our_patience(patience_s, wire):
    """In tenths of a second, no more than fits."""
    assert zmtp.ping(patience_s) == wire


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (b"\x04PING\x00\x96", b"\x04\x05\x04PONG"),
        (b"\x04PING\x00\x96context", b"\x04\x0c\x04PONGcontext"),
        (b"\x04PING\x00\x00" + bytes(range(16)), b"\x04\x15\x04PONG" + bytes(range(16))),
        (b"\x04PING\x00\x00" + bytes(range(20)), b"\x04\x15\x04PONG" + bytes(range(16))),
        (b"\x04PING\x00", b"\x04\x05\x04PONG"),
        (b"\x04PONGcontext", b""),
        (b"\x05READY", b""),
        (b"\x09SUBSCRIBE", b""),
        (b"\x05PING\x00\x00", b""),
        (b"\x06PING\x00", b""),
        (b"\x04ping\x00\x00", b""),
        (b"\x00", b""),
        (b"", b""),
    ],
)
def test_only_a_ping_is_answered(body, answer):
    """With its context, of which 16 bytes are allowed; to a malformed command there is nothing to say."""
    assert zmtp.answer_to(body) == answer


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"\x05ERROR\x07go away", "go away"),
        (b"\x05ERROR\x00", ""),
        (b"\x05ERROR\x02go away", "go"),
        (b"\x05ERROR\xffgo", "go"),
        (b"\x05ERROR\x01\xff", "\ufffd"),
        (b"\x04PING\x00\x00", None),
        (b"\x05ERRO", None),
        (b"", None),
    ],
)
def test_an_error_is_told_with_its_reason(body, reason):
    """As far as it can be read; None for any other command."""
    assert zmtp.error_in(body) == reason


# Publishers


@pytest.mark.parametrize(
    "wire",
    [
        pytest.param(greeting(filler=bytes(7) + b"\x01") + PUB_READY, id="libzmq's filler"),
        pytest.param(greeting(filler=b"\xff" * 8)[:-31] + b"\xff" * 31 + PUB_READY, id="any filler"),
        pytest.param(greeting(version=b"\x03\x00") + PUB_READY, id="3.0"),
        pytest.param(greeting(version=b"\x03\x07") + PUB_READY, id="3.7"),
        pytest.param(greeting() + ready((b"Socket-Type", b"XPUB")), id="XPUB"),
        pytest.param(greeting() + ready((b"SOCKET-TYPE", b"PUB")), id="the name of a property in any case"),
        pytest.param(greeting() + ready((b"Identity", b""), (b"Socket-Type", b"PUB"), (b"X-A", b"b")), id="more said"),
        pytest.param(greeting() + ready((b"X-A", b"b" * 500), (b"Socket-Type", b"PUB")), id="a long READY"),
        pytest.param(greeting() + ready((b"Socket-Type", b"PUB")) + BATCH[:1], id="begun traffic"),
        pytest.param(greeting() + b"\x04\x02\x01X" * 20 + b"\x04\x00" + PUB_READY, id="commands that are not known"),
    ],
)
def test_a_publisher_is_followed(wire):
    """Whatever it says that is allowed and does not matter."""
    handshake = started()
    assert handshake.feed(wire).startswith(OUR_READY)
    assert handshake.rest is not None


def test_much_traffic_behind_the_handshake_is_no_long_handshake():
    """Only what comes before READY is counted."""
    handshake = started()
    handshake.feed(greeting() + PUB_READY + BATCH * 1000)
    assert handshake.rest == BATCH * 1000


# Others


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03",
        b"\x01\x00",
        b"\xff" * 12,
        b"\xff" + bytes(8) + b"\x7e\x03\x01",
    ],
)
def test_who_does_not_speak_zmtp_is_quoted(wire):
    """An HTTP or SSH server, TLS, libzmq 2, or anything else: with how it began."""
    assert problem(wire) == f"it does not speak ZMTP 3: it began with {wire[:12]!r}"


@pytest.mark.parametrize(("revision", "version"), [(0, "1"), (1, "2"), (2, "2")])
def test_older_peers_are_told_by_their_version(revision, version):
    """A greeting of ZMTP 2 has 1 where ZMTP 3 has 3."""
    wire = b"\xff" + bytes(7) + b"\x01\x7f" + bytes([revision]) + b"\x01\x00\x00"
    assert problem(wire) == f"it speaks ZMTP {version}, older than libzmq 4; 3 is needed"


@pytest.mark.parametrize("mechanism", ["PLAIN", "CURVE", "GSSAPI", "NULLX", "A" * 20])
def test_security_is_told_by_its_name(mechanism):
    """We have no keys; the peer would wait for them."""
    assert problem(greeting(mechanism.encode())) == f"it asks for the security mechanism {mechanism}"


@pytest.mark.parametrize("kind", ["SUB", "PULL", "PUSH", "ROUTER", "REP", "pub", "PUBX"])
def test_other_sockets_are_told_by_their_kind(kind):
    """The endpoint of a replay, say, is a ROUTER."""
    wire = greeting() + ready((b"Socket-Type", kind.encode()))
    assert problem(wire) == f"it is a {kind} socket, not a PUB socket"


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(ready(), id="none"),
        pytest.param(ready((b"Identity", b"PUB")), id="another"),
        pytest.param(ready((b"Socket-Type", b"")), id="empty"),
        pytest.param(b"\x04\x07\x05READY\x0b", id="no name"),
        pytest.param(b"\x04\x12\x05READY\x0bSocket-Type", id="no size"),
        pytest.param(b"\x04\x15\x05READY\x0bSocket-Type\0\0\0", id="half a size"),
        pytest.param(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x04PUB", id="a size beyond the end"),
        pytest.param(b"\x04\x19\x05READY\x0bSocket-Type\xff\xff\xff\xffPUB", id="a size far beyond the end"),
        pytest.param(b"\x04\x19\x05READY\x0cSocket-Type\0\0\0\x03PUB", id="a name beyond its end"),
        pytest.param(b"\x04\x19\x05READY\xffSocket-Type\0\0\0\x03PUB", id="a name beyond all"),
    ],
)
def test_a_ready_that_names_no_socket_is_refused(frame):
    """Properties are read as far as they are whole; there must be a kind of socket among them."""
    assert problem(greeting() + frame) == "it is a nameless socket, not a PUB socket"


@pytest.mark.parametrize(
    ("frame", "reason"),
    [(b"\x04\x0a\x05ERROR\x03400", "400"), (b"\x04\x07\x05ERROR\x00", ""), (b"\x04\x08\x05ERROR\x09x", "x")],
)
def test_a_refusal_is_told_with_its_reason(frame, reason):
    """The peer's own words."""
    assert problem(greeting() + frame) == f"it refuses: {reason}"


@pytest.mark.parametrize("frame", [b"\x00\x02hi", b"\x01\x00", b"\x02" + bytes(7) + b"\x02hi", b"\x03\x00"])
def test_a_message_before_ready_is_refused(frame):
    """Nobody may send one yet; its first byte tells."""
    assert problem(greeting() + frame) == "it sent a message before it was ready"
    assert problem(greeting() + frame[:1]) == "it sent a message before it was ready"


@pytest.mark.parametrize("flags", [5, 7, 8, 0x48, 0xFF])
def test_what_is_no_frame_is_refused(flags):
    """Flags that do not exist, in place of a command."""
    assert problem(greeting() + bytes([flags])) == f"its handshake is malformed: a frame with the flags {flags:#x}"


@pytest.mark.parametrize(
    "wire",
    [
        pytest.param(b"\x04\x00" * 3000, id="empty commands"),
        pytest.param((b"\x04\xff\x01X" + bytes(253)) * 20, id="large commands"),
        pytest.param(b"\x06" + (4096).to_bytes(8, "big"), id="a longer command"),
        pytest.param(b"\x06" + b"\xff" * 8, id="the longest command"),
    ],
)
def test_a_handshake_without_end_is_refused(wire):
    """However it goes on, and before it is all here."""
    assert problem(greeting() + wire) == "its handshake does not end within 4096 bytes"


WORDS = st.sampled_from(
    [
        *(greeting(), greeting(version=b"\x03\x00"), greeting(b"CURVE"), PUB_READY, ready(), BATCH, b"\xff", b"\x7f"),
        *(b"\x04", b"\x06", bytes(7), b"\x05READY", b"\x0bSocket-Type", b"\x05ERROR", b"\x04PING", b"PUB", b"\x03"),
    ]
)
PIECES = st.lists(WORDS | st.binary(max_size=30), max_size=12)


@given(PIECES)
@example([greeting(), b"\x04\x00"])
@example([greeting(), b"\x04\x01\x00"])
@example([greeting(), b"\x04\x01\xff"])
@example([greeting(b"\xff" * 20)])
@example([greeting(), b"\x04\x13\x05READY\x0bSocket-Type\xff"])
@example([greeting(), b"\x04\x18\x05READY\x0bSocket-Type\0\0\0\x02\xff\xfe"])
@example([greeting(), b"\x04\x06\x05ERROR"])
def test_no_bytes_do_more_than_end_the_handshake(pieces):
    """Whatever comes, the peer is refused for a stated reason, or waited for, or a publisher."""
    handshake, answered, refusal = started(), b"", "it "
    for piece in filter(None, pieces):
        try:
            answered += handshake.feed(piece)
        except StreamPeerError as error:
            refusal = error.message
            break
        if handshake.rest is not None:
            break
    assert refusal.startswith(("it ", "its "))
    done = {OUR_READY + SUBSCRIBE_ALL, OUR_READY + b"\x00\x01\x01"}
    assert answered in ({b"", OUR_READY} if handshake.rest is None else done)


@given(st.binary(max_size=60) | st.builds(lambda name, rest: name + rest, WORDS, st.binary(max_size=40)))
def test_no_command_of_the_traffic_does_harm(body):
    """Any body is read as far as it goes: an answer is a PONG or nothing, an error is text or none."""
    answer, reason = zmtp.answer_to(body), zmtp.error_in(body)
    assert answer == b"" or answer[2:7] == b"\x04PONG"
    assert reason is None or isinstance(reason, str)


@pytest.mark.parametrize(
    "said",
    [
        greeting(b"A\n\x1b[31m"),
        greeting() + ready((b"Socket-Type", b"P\r\nUB")),
        greeting() + b"\x04\x0d\x05ERROR\x06go\naway",
        greeting() + ready((b"Socket-Type", b"x" * 3_000)),
    ],
)
def test_words_of_a_peer_leave_a_log_line_whole(said: bytes):
    """No line break, no escape and no flood reaches the reason, whoever answers there."""
    text = problem(said)
    assert text.isprintable()
    assert len(text) < 200
