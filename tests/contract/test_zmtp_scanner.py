"""The scanner of ZMTP traffic: both backends against a model of what was sent, and against each other on any bytes."""

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas._native import _pure
from support.backends import BACKENDS, NATIVE, NOT_BUILT
from support.runs import batches_of, runs_of

LAST = 2**64 - 1
PLENTY = 1 << 20

both = pytest.mark.parametrize("kernels", BACKENDS)
needs_native = pytest.mark.skipif(NATIVE is None, reason=NOT_BUILT)


# What was sent


def frame(data: bytes, flags: int = 0, *, is_long: bool = False) -> bytes:
    """A frame as it goes over the wire; one of more than 255 bytes is long in any case."""
    if is_long or len(data) > 255:
        return bytes([flags | 2]) + len(data).to_bytes(8, "big") + data
    return bytes([flags, len(data)]) + data


@dataclass(frozen=True)
class Sent:
    """A frame, and where it stands."""

    data: bytes
    is_long: bool = False
    is_command: bool = False
    is_last: bool = False

    def wire(self) -> bytes:
        flags = 4 if self.is_command else 0 if self.is_last else 1
        return frame(self.data, flags, is_long=self.is_long)


NUMBERS = (st.integers(0, 4) | st.integers(LAST - 2, LAST)).map(lambda number: number.to_bytes(8, "big"))
DATA = st.one_of(st.binary(max_size=20), st.binary(min_size=7, max_size=9), st.binary(min_size=250, max_size=300))
COMMANDS = st.lists(st.builds(Sent, DATA, st.booleans(), st.just(True)), max_size=2)


@st.composite
def messages(draw: st.DrawFn) -> list[Sent]:
    """The frames of one message, commands before and among them; mostly a batch."""
    if draw(st.integers(0, 3)):
        frames = [*draw(st.lists(DATA, max_size=3)), draw(NUMBERS), draw(DATA)]
    else:
        frames = draw(st.lists(DATA | NUMBERS, min_size=1, max_size=5))
    sent = []
    for place, data in enumerate(frames, start=1):
        sent += draw(COMMANDS) if draw(st.integers(0, 3)) == 0 else []
        sent.append(Sent(data, draw(st.booleans()), is_last=place == len(frames)))
    return sent


STREAMS = st.lists(messages(), max_size=8).map(lambda each: [sent for message in each for sent in message])


def told(stream: list[Sent]) -> tuple[list[tuple[int, bytes]], int, list[bytes]]:
    """The batches, the number of other messages and the commands of a stream, read naively."""
    batches, bad, message = [], 0, []
    for sent in stream:
        if sent.is_command:
            continue
        message.append(sent.data)
        if sent.is_last:
            if len(message) > 1 and len(message[-2]) == 8:
                batches.append((int.from_bytes(message[-2], "big"), message[-1]))
            else:
                bad += 1
            message = []
    return batches, bad, [sent.data for sent in stream if sent.is_command]


# How it is read


@dataclass
class Reading:
    """What the calls of one reading told together."""

    batches: list[tuple[int, bytes]]
    bad: int
    commands: list[bytes]
    done: int
    wanted: int
    pending: int | None


def read(kernels, pieces, most_bytes=PLENTY, pending=None) -> Reading:
    """Feed the pieces as a connection does: what was not consumed comes first again. It ends where it is broken."""
    whole = Reading([], 0, [], 0, 2, pending)
    held = b""
    for piece in pieces:
        held += piece
        if not held:
            continue
        buffer = memoryview(held + b"\x01\x08beyond")  # what lies behind the bytes that came is not read
        runs, bad, commands, done, whole.wanted, whole.pending = kernels.scan_zmtp(
            buffer, len(held), whole.pending, most_bytes
        )
        assert runs_of(batches_of(runs)) == runs
        whole.batches += batches_of(runs)
        whole.bad += bad
        whole.commands += commands
        whole.done += done
        if not whole.wanted:
            break
        held = held[done:]
        assert whole.wanted > len(held)
    return whole


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted(place % (len(data) + 1) for place in places)
    return [data[start:end] for start, end in itertools.pairwise([0, *ends, len(data)])]


PLACES = st.lists(st.integers(0, 1 << 16), max_size=12)


# What was sent is what is told


@both
@given(stream=STREAMS, places=PLACES)
def test_what_was_sent_is_told_however_it_comes(kernels, stream, places):
    """Batches, messages of another form and commands, in order and once each, of any frames in any pieces."""
    wire = b"".join(sent.wire() for sent in stream)
    reading = read(kernels, cut(wire, places))
    assert (reading.batches, reading.bad, reading.commands) == told(stream)
    assert (reading.done, reading.wanted, reading.pending) == (len(wire), 2, None)


@both
@given(stream=STREAMS)
def test_batches_of_one_call_come_in_runs(kernels, stream):
    """Those that follow by number are together; 0 does not follow 2**64 - 1."""
    wire = b"".join(sent.wire() for sent in stream)
    if wire:
        assert kernels.scan_zmtp(memoryview(wire), len(wire), None, PLENTY)[0] == runs_of(told(stream)[0])


@both
@given(stream=STREAMS, end=st.integers(0, 1 << 16))
def test_it_says_how_much_the_next_frame_takes(kernels, stream, end):
    """At each place where the bytes may end: what is whole is done with, and no more is wanted than what comes next."""
    frames = [sent.wire() for sent in stream]
    wire = b"".join(frames)
    end %= len(wire) + 1
    reading = read(kernels, [wire[:end]])
    ends = list(itertools.accumulate(map(len, frames), initial=0))
    whole = sum(end >= each for each in ends) - 1
    assert reading.done == ends[whole]
    left = end - ends[whole]
    following = frames[whole] if whole < len(frames) else b"\0\0"
    head = 9 if following[0] & 2 and left else 2  # the first byte says it
    assert reading.wanted == (len(following) if left >= head else head)
    assert left < reading.wanted <= len(following)
    rest = read(kernels, [wire[reading.done :]], pending=reading.pending)
    assert (reading.batches + rest.batches, reading.bad + rest.bad, reading.commands + rest.commands) == told(stream)


@both
@pytest.mark.parametrize(
    ("frames", "pending"),
    [
        ([frame(b"", 1)], -1),
        ([frame(b"x" * 7, 1)], -1),
        ([frame(b"x" * 9, 1)], -1),
        ([frame(bytes(8), 1)], 0),
        ([frame(b"\xff" * 8, 1)], LAST),
        ([frame(b"\x80" + bytes(7), 3, is_long=True)], 2**63),
        ([frame(bytes(8), 1), frame(b"topic", 1)], -1),
        ([frame(b"topic", 1), frame(b"\0" * 7 + b"\x05", 1)], 5),
        ([frame(bytes(8), 1), frame(b"PING", 4)], 0),
        ([frame(bytes(8), 1), frame(b"payload")], None),
        ([frame(b"payload")], None),
        ([frame(b"PING", 4)], None),
    ],
)
def test_a_begun_message_is_pending_by_its_last_frame(kernels, frames, pending):
    """Its value if it can be a number, else -1; commands do not count, and a message that has ended is none."""
    wire = b"".join(frames)
    assert kernels.scan_zmtp(memoryview(wire), len(wire), None, PLENTY)[5] == pending


@both
@pytest.mark.parametrize(
    ("pending", "runs", "bad"),
    [(None, [], 1), (-1, [], 1), (0, [(0, [b"x"])], 0), (7, [(7, [b"x"])], 0), (LAST, [(LAST, [b"x"])], 0)],
)
def test_a_pending_message_ends_with_the_next_call(kernels, pending, runs, bad):
    """The last frame is the payload of the number that came with a call before, or ends what is no batch."""
    wire = frame(b"x")
    assert kernels.scan_zmtp(memoryview(wire), len(wire), pending, PLENTY) == (runs, bad, [], len(wire), 2, None)


@both
def test_zero_after_the_last_number_starts_a_run(kernels):
    """Numbers end at 2**64 - 1; the first of a call may be 0 as well."""
    numbers = [LAST - 1, LAST, 0, 1]
    wire = b"".join(frame(number.to_bytes(8, "big"), 1) + frame(b"%d" % (number % 7)) for number in numbers)
    runs = kernels.scan_zmtp(memoryview(wire), len(wire), None, PLENTY)[0]
    assert runs == [(LAST - 1, [b"0", b"1"]), (0, [b"0", b"1"])]


# What is broken

BAD_FLAGS = [flags for flags in range(256) if flags > 7 or flags in {5, 7}]


@both
@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_flags_that_do_not_exist_are_broken(kernels, flags):
    """Any flag above the three, and a command of which more follows; the first byte is enough."""
    assert kernels.scan_zmtp(memoryview(bytes([flags])), 1, None, PLENTY) == ([], 0, [], 0, 0, None)


@both
@pytest.mark.parametrize("most_bytes", [0, 1, 255, 256, 1000])
@pytest.mark.parametrize("flags", [0, 1, 2, 3, 4, 6])
def test_a_frame_may_have_as_many_bytes_as_the_bound(kernels, most_bytes, flags):
    """One byte more is broken as soon as the head tells it, for messages and commands."""
    if not flags & 2 and most_bytes >= 255:
        flags |= 2
    wire = frame(b"x" * most_bytes, flags & ~2, is_long=bool(flags & 2))
    *_, done, wanted, _ = kernels.scan_zmtp(memoryview(wire), len(wire), None, most_bytes)
    assert (done, wanted) == (len(wire), 2)
    head = frame(b"x" * (most_bytes + 1), flags & ~2, is_long=bool(flags & 2))[: 9 if flags & 2 else 2]
    assert kernels.scan_zmtp(memoryview(head), len(head), None, most_bytes) == ([], 0, [], 0, 0, None)
    assert kernels.scan_zmtp(memoryview(head), len(head) - 1, None, most_bytes)[4] == (9 if flags & 2 else 2)


@both
@pytest.mark.parametrize("size", [2**63, 2**63 + 1, LAST - 9, LAST - 8, LAST])
@pytest.mark.parametrize("most_bytes", [0, PLENTY, 2**63 - 1, 2**63, LAST])
def test_no_frame_has_half_of_all_bytes(kernels, size, most_bytes):
    """A size of 2**63 or more is broken under any bound: with its head it would be counted wrongly."""
    for flags in (2, 3, 6):
        wire = bytes([flags]) + size.to_bytes(8, "big") + b"x"
        assert kernels.scan_zmtp(memoryview(wire), len(wire), 3, most_bytes) == ([], 0, [], 0, 0, 3)


@both
def test_a_frame_below_that_is_waited_for(kernels):
    """The largest frame there can be is wanted with its head."""
    wire = b"\x02" + (2**63 - 1).to_bytes(8, "big")
    assert kernels.scan_zmtp(memoryview(wire), 9, None, LAST) == ([], 0, [], 0, 2**63 + 8, None)


BROKEN = st.sampled_from(
    [b"\x08", b"\x05\x00", b"\xff\x00", b"\x02" + b"\xff" * 8, b"\x02" + (1001).to_bytes(8, "big")]
)


@both
@given(stream=STREAMS, broken=BROKEN, behind=st.binary(max_size=30), places=PLACES)
def test_what_came_before_a_broken_frame_is_not_lost(kernels, stream, broken, behind, places):
    """All before it is told; it is wanted no more, and where it starts is where the reading ends."""
    wire = b"".join(sent.wire() for sent in stream)
    reading = read(kernels, cut(wire + broken + behind, places), 1000)
    assert (reading.batches, reading.bad, reading.commands) == told(stream)
    assert (reading.done, reading.wanted, reading.pending) == (len(wire), 0, None)


# Any bytes

RAW = st.one_of(
    st.binary(max_size=200),
    st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 7, 8, 255]), max_size=80).map(bytes),
    st.builds(
        lambda stream, at, damage: (wire := b"".join(sent.wire() for sent in stream))[:at] + damage + wire[at + 1 :],
        STREAMS,
        st.integers(0, 500),
        st.binary(max_size=3),
    ),
)
PENDING = st.sampled_from([None, -1, 0, 1, 2**63 - 1, 2**63, LAST])
BOUNDS = st.sampled_from([0, 1, 7, 8, 255, 256, 2**31, 2**32, 2**63 - 1, 2**63, LAST]) | st.integers(0, 300)


@needs_native
@given(raw=RAW, pending=PENDING, most_bytes=BOUNDS, places=PLACES)
def test_native_reads_any_bytes_like_pure(raw, pending, most_bytes, places):
    """The same of any bytes, in any pieces, within any bound, whatever is pending."""
    if raw:
        arguments = memoryview(raw), len(raw), pending, most_bytes
        assert NATIVE.scan_zmtp(*arguments) == _pure.scan_zmtp(*arguments)
    pieces = cut(raw, places)
    assert read(NATIVE, pieces, most_bytes, pending) == read(_pure, pieces, most_bytes, pending)


@both
@given(raw=RAW, pending=PENDING, most_bytes=BOUNDS, places=PLACES)
def test_any_bytes_tell_the_same_in_pieces(kernels, raw, pending, most_bytes, places):
    """Where bytes are cut changes nothing, be they frames or not."""
    assert read(kernels, cut(raw, places), most_bytes, pending) == read(kernels, [raw], most_bytes, pending)


# Arguments


@both
@pytest.mark.parametrize("count", [0, -1, 3, 2**40])
def test_a_count_that_cannot_be_is_refused(kernels, count):
    """There is at least one byte, and no more than the buffer has."""
    with pytest.raises(ValueError, match="from 1 byte to as many as the buffer has"):
        kernels.scan_zmtp(memoryview(b"\0\0"), count, None, PLENTY)


@both
def test_an_empty_buffer_is_refused(kernels):
    """No byte of it is looked at."""
    for count in (0, 1):
        with pytest.raises(ValueError, match="from 1 byte to as many as the buffer has"):
            kernels.scan_zmtp(memoryview(b""), count, None, PLENTY)


@needs_native
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((None, 1, None, 1), TypeError),
        (("\0\0", 1, None, 1), TypeError),
        ((memoryview(bytes(8)).cast("Q"), 1, None, 1), ValueError),
        ((memoryview(bytes(8))[::2], 1, None, 1), BufferError),
        ((memoryview(b"\0\0"), "1", None, 1), TypeError),
        ((memoryview(b"\0\0"), 2**64, None, 1), OverflowError),
        ((memoryview(b"\0\0"), 1, 2**64, 1), OverflowError),
        ((memoryview(b"\0\0"), 1, "1", 1), TypeError),
        ((memoryview(b"\0\0"), 1, None, -1), OverflowError),
        ((memoryview(b"\0\0"), 1, None, 2**64), OverflowError),
        ((memoryview(b"\0\0"), 1, None), TypeError),
    ],
)
def test_arguments_of_another_form_are_refused(arguments, error):
    """The kernel takes a row of bytes and numbers of 64 bits; all else is an error, not a crash."""
    with pytest.raises(error):
        NATIVE.scan_zmtp(*arguments)


@both
def test_the_buffer_is_let_go(kernels):
    """Payloads and commands are copies: the memory may be written and resized as soon as the call is over."""
    buffer = bytearray(frame(bytes(8), 1) + frame(b"payload") + frame(b"command", 4))
    with memoryview(buffer) as view:
        runs, _, commands, *_ = kernels.scan_zmtp(view, len(buffer), None, PLENTY)
    buffer[:] = b""
    assert (runs, commands) == ([(0, [b"payload"])], [b"command"])
