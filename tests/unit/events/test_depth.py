"""Events nested beyond all reason are lost alone."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.errors import EventDecodeError
from kvatlas.events import AllBlocksCleared, DecodeLimits, decode_batch
from kvatlas.events.depth import replace_deep_events

CLEARED = b"\x81\xa4type\xb0AllBlocksCleared"
HEAD = b"\x93\xcb" + b"\x3f\xf8" + b"\x00" * 6


def deep(levels: int) -> bytes:
    """A map event of a type of the future that holds an array in an array in an array ..."""
    return b"\x82\xa4type\xabFutureEvent\xa1x" + b"\x91" * levels + b"\xc0"


def test_a_deep_event_loses_only_itself() -> None:
    """A hundred thousand levels, far beyond what a decoder takes: the events around it are applied."""
    decoded = decode_batch(HEAD + b"\x93" + CLEARED + deep(100_000) + CLEARED + b"\x00")
    assert decoded.batch.events == [AllBlocksCleared(), AllBlocksCleared()]
    assert decoded.batch.data_parallel_rank == 0
    (error,) = decoded.malformed
    assert "event 1 of 3" in error.message
    assert "max_depth" in error.message


def test_reasonable_depth_is_skipped_as_unknown() -> None:
    """What the decoder can read is not judged by its depth."""
    decoded = decode_batch(HEAD + b"\x92" + deep(20) + CLEARED + b"\x00")
    assert decoded.unknown_events == 1
    assert decoded.malformed == ()


@pytest.mark.parametrize(
    "payload",
    [
        b"\x91" * 100_000,
        HEAD + b"\xc0" + b"\x91" * 100_000 + b"\xc0",
        HEAD + b"\x92" + deep(100_000),
        b"\x81" * 100_000,
    ],
    ids=["no batch", "no array of events", "cut off", "maps"],
)
def test_deep_bytes_that_are_no_batch_are_refused(payload: bytes) -> None:
    """Whatever is nested, the answer is our own error."""
    with pytest.raises(EventDecodeError):
        decode_batch(payload)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=300),
    lambda children: st.lists(children, max_size=20) | st.dictionaries(st.text(max_size=3), children, max_size=20),
    max_leaves=30,
)


def depth_of(value: object) -> int:
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 0


@given(events=st.lists(values, max_size=5), max_depth=st.integers(1, 4))
def test_exactly_the_deep_ones_are_replaced(events: list[object], max_depth: int) -> None:
    """For any msgpack values: those over the limit become nil, all else stays byte for byte."""
    batch = [1.5, events, 3]
    replaced, numbers = replace_deep_events(msgspec.msgpack.encode(batch), max_depth)
    assert numbers == [number for number, event in enumerate(events) if depth_of(event) > max_depth]
    expected = [None if number in numbers else event for number, event in enumerate(events)]
    assert replaced == msgspec.msgpack.encode([1.5, expected, 3])


def test_the_limit_is_a_setting() -> None:
    """A stricter limit names itself."""
    decoded = decode_batch(HEAD + b"\x91" + deep(100_000) + b"\x00", DecodeLimits(max_depth=5))
    assert "more than 5 levels" in decoded.malformed[0].message
