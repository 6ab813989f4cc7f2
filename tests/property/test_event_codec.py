"""Any bytes may arrive, any event may be sent: nothing but EventDecodeError escapes, and nothing is altered on the way."""

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import example, given

from kvatlas.errors import EventDecodeError
from kvatlas.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    DecodedBatch,
    EventBatch,
    decode_batch,
    encode_batch,
    encode_event,
)

HANDLES = st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=1, max_size=40)
TOKENS = st.integers(0, 2**63 - 1)
TEXT = st.none() | st.text(max_size=8)
COUNTS = st.none() | st.integers(0, 2**31)
EXTRA_KEY = st.text(max_size=5) | st.binary(max_size=5) | st.tuples(st.text(max_size=3), st.integers(-99, 99))


@st.composite
def stored(draw):
    """A BlockStored of any engine: plain or bigram tokens, every optional field there or not."""
    hashes = draw(st.lists(HANDLES, max_size=4))
    keys = st.none() | st.lists(EXTRA_KEY, max_size=3).map(tuple)
    return BlockStored(
        hashes,
        draw(st.none() | HANDLES),
        draw(st.lists(TOKENS, max_size=6) | st.lists(st.tuples(TOKENS, TOKENS), max_size=6)),
        draw(st.integers(0, 2**31)),
        lora_id=draw(st.none() | st.integers(-5, 2**31)),
        medium=draw(TEXT),
        lora_name=draw(TEXT),
        extra_keys=draw(st.none() | st.lists(keys, min_size=len(hashes), max_size=len(hashes))),
        group_idx=draw(COUNTS),
        kv_cache_spec_kind=draw(TEXT),
        kv_cache_spec_sliding_window=draw(COUNTS),
        locality=draw(TEXT),
        ownership=draw(TEXT),
        session_id=draw(TEXT),
        cache_salt=draw(TEXT),
    )


@st.composite
def removed(draw):
    return BlockRemoved(
        draw(st.lists(HANDLES, max_size=4)),
        draw(TEXT),
        group_idx=draw(COUNTS),
        locality=draw(TEXT),
        ownership=draw(TEXT),
    )


EVENTS = stored() | removed() | st.just(AllBlocksCleared())
BATCHES = st.builds(
    EventBatch,
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(EVENTS, max_size=4),
    st.none() | st.integers(0, 100),
)
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from([*BlockStored.__struct_fields__, "type", "surprise"])
ALMOST_EVENTS = st.dictionaries(NAMES, JUNK, max_size=8).flatmap(
    lambda fields: st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]).map(
        lambda kind: {**fields, "type": kind}
    )
)


def outcome(payload):
    """The decoded batch or the EventDecodeError; any other exception fails the test."""
    try:
        decoded = decode_batch(payload)
    except EventDecodeError as error:
        return error
    encode_batch(decoded.batch)
    return decoded


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x92\xcb" + b"\x3f" * 8 + b"\xdd\xff\xff\xff\xff")
@example(b"\x92\xcb" + b"\x3f" * 8 + b"\x91" * 5_000)
@example(b"\x92\xcb\x7f\xf8" + b"\x00" * 6 + b"\x90")
@example(b"\x92\xd7\xff" + b"\xff" * 8 + b"\x90")
@example(b"\x92\x01\x91\xd7\xff" + b"\xff" * 8)
def test_arbitrary_bytes_raise_only_decode_errors(payload):
    """Garbage off the network never raises anything but EventDecodeError."""
    assert isinstance(outcome(payload), DecodedBatch | EventDecodeError)
    wrapped = b"\x93\xcb?\xf8\0\0\0\0\0\0\x91" + payload + b"\0"
    assert isinstance(outcome(wrapped), DecodedBatch | EventDecodeError)


@given(st.lists(JUNK, max_size=4) | st.tuples(st.floats(), st.lists(JUNK | ALMOST_EVENTS, max_size=4), JUNK))
def test_arbitrary_structures_raise_only_decode_errors(structure):
    """Well-formed msgpack of the wrong shape never raises anything but EventDecodeError."""
    assert isinstance(outcome(msgspec.msgpack.encode(structure)), DecodedBatch | EventDecodeError)


@given(BATCHES)
def test_round_trip(batch):
    """What is encoded comes back equal, with nothing malformed, and encodes to the same bytes."""
    payload = encode_batch(batch)
    decoded = decode_batch(payload)
    assert (decoded.batch, decoded.malformed, decoded.unknown_events) == (batch, (), 0)
    assert encode_batch(decoded.batch) == payload


@given(EVENTS)
def test_array_form_means_the_same(event):
    """The positional form of older engines decodes to the same event as the map form."""
    fields = [getattr(event, name) for name in event.__struct_fields__]
    payload = msgspec.msgpack.encode([1.5, [[type(event).__name__, *fields]], None])
    decoded = decode_batch(payload)
    assert (decoded.batch.events, decoded.malformed) == ([event], ())


@given(st.lists(EVENTS, max_size=4), st.lists(EVENTS, max_size=4), JUNK | ALMOST_EVENTS)
def test_a_bad_event_loses_only_itself(before, after, bad):
    """Whatever stands between good events, the good ones all come out, and the bad one is accounted for."""
    raw = [msgspec.Raw(encode_event(event)) for event in before]
    raw += [msgspec.Raw(msgspec.msgpack.encode(bad))]
    raw += [msgspec.Raw(encode_event(event)) for event in after]
    decoded = decode_batch(msgspec.msgpack.encode([1.5, raw, 0]))
    taken = len(decoded.batch.events) - len(before) - len(after)
    assert taken + len(decoded.malformed) + decoded.unknown_events == 1
    assert decoded.batch.events[: len(before)] == before
    assert decoded.batch.events[len(before) + taken :] == after
    for error in decoded.malformed:
        assert f"event {len(before)} of {len(raw)}" in error.message


@given(BATCHES, st.data())
def test_truncated_batches_are_refused(batch, data):
    """A batch cut short anywhere is malformed as a whole."""
    payload = encode_batch(batch)
    cut = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(EventDecodeError):
        decode_batch(payload[:cut])
