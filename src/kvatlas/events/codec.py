"""Batches of events to bytes and back, strict about truth and lenient about age.

Two ways through the decoder. A batch as current engines send it is decoded by msgspec in one typed pass. Anything
else (array events of older engines, bigram tokens, kinds we do not know, a malformed event) fails that pass and is
taken apart event by event, so that a bad one is lost alone.
"""

import math
import struct
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import msgspec

from kvatlas.errors import EventDecodeError
from kvatlas.events.alone import decode_alone
from kvatlas.events.depth import replace_deep_events
from kvatlas.events.model import (
    MAX_TOKEN_ID,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
)

__all__ = [
    "DEFAULT_LIMITS",
    "DecodeLimits",
    "DecodedBatch",
    "decode_batch",
    "decode_event",
    "encode_batch",
    "encode_event",
    "peek_ts",
]

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What a batch may cost us.

    `max_payload_bytes` is checked before anything is read and bounds the memory: decoding takes up to 14 bytes a
    payload byte for token ids, and 72 for the most hostile extra keys. `max_events` is checked from the array's
    header. The others are per event and drop that event. The schema is flat and what it does not know is skipped
    without being built, so depth matters only where the decoder gives a batch up at the interpreter's recursion guard:
    then events nested more than `max_depth` containers deep are taken out and the rest is decoded.
    """

    max_payload_bytes: int = 16 * 1024 * 1024
    max_events: int = 500_000
    max_hashes_per_event: int = 1_000_000
    max_tokens_per_event: int = 8_000_000
    max_depth: int = 32


DEFAULT_LIMITS: Final = DecodeLimits()


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """A batch without its bad events: they are in `malformed`, each with its reason; unknown types are only counted."""

    batch: EventBatch
    malformed: tuple[EventDecodeError, ...] = ()
    unknown_events: int = 0


class _SplitBatch(msgspec.Struct, array_like=True, gc=False):
    """A batch whose events are not looked at yet."""

    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


# Bytes of a msgpack number by its first byte; all others are one byte long.
_NUMBER_BYTES: Final = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}

_encode = msgspec.msgpack.Encoder().encode
_decode_typed = msgspec.msgpack.Decoder(EventBatch).decode
_decode_split = msgspec.msgpack.Decoder(_SplitBatch).decode
# RecursionError: nested deeper than the interpreter allows.
_BAD_BYTES: Final = (msgspec.MsgspecError, RecursionError)


def encode_event(event: Event) -> bytes:
    """One event as vLLM 0.32 sends it: a map, kind first, required fields always there, optional ones only when set.

    Source: vLLM 0.32.0, distributed/kv_events.py; bytes made by its own structs are in tests/vectors.
    """
    encoded = _encode(event)
    if encoded[0] == 0xDE and encoded[2] < 16:
        # A struct of 16 members reserves the long map header; engines have 15 and send the short one.
        return bytes((0x80 | encoded[2],)) + encoded[3:]
    return encoded


def encode_batch(batch: EventBatch) -> bytes:
    """A batch as vLLM 0.32 sends it: always `[ts, events, rank]`. Costs 1-2 us an event plus 10 ns a token id.

    Source: vLLM 0.32.0, distributed/kv_events.py; bytes made by its own structs are in tests/vectors.
    """
    events = [msgspec.Raw(encode_event(event)) for event in batch.events]
    return _encode((float(batch.ts), events, batch.data_parallel_rank))


def decode_batch(payload: Buffer, limits: DecodeLimits = DEFAULT_LIMITS) -> DecodedBatch:
    """Bytes of one batch to its events, in order. Costs 1-8 us an event plus 50 ns a token id.

    Accepts map and array events mixed, batches of two or more elements, hashes as u64, i64 or bytes, plain and bigram
    token ids. Unknown fields, trailing elements and unknown kinds are ignored, the last counted. A malformed event is
    left out and reported in the result.

    Raises:
        EventDecodeError: the batch itself cannot be read; drop it.
    """
    if len(payload) > limits.max_payload_bytes:
        raise EventDecodeError(
            f"event batch of {len(payload)} bytes refused: the limit is {limits.max_payload_bytes} (max_payload_bytes)"
        )
    count = _peek_event_count(payload)
    if count > limits.max_events:
        raise EventDecodeError(f"event batch of {count} events refused: the limit is {limits.max_events} (max_events)")
    try:
        batch = _decode_typed(payload)
    except _BAD_BYTES:
        return _decode_one_by_one(payload, limits)
    _require_finite(batch.ts)
    malformed: list[EventDecodeError] = []
    events: list[Event] = []
    # No event has more hashes or tokens than the payload has bytes.
    small = len(payload) <= min(limits.max_hashes_per_event, limits.max_tokens_per_event)
    for number, event in enumerate(batch.events):
        if small and type(event) is not BlockStored:
            events.append(event)
            continue
        try:
            events.append(_checked(event, limits))
        except EventDecodeError as error:
            malformed.append(_numbered(error, number, count))
    return DecodedBatch(EventBatch(batch.ts, events, batch.data_parallel_rank), tuple(malformed))


def decode_event(raw: bytes, number: int, count: int, limits: DecodeLimits = DEFAULT_LIMITS) -> Event | None:
    """One event taken out of a batch; None for a kind we do not know.

    Args:
        raw: its bytes.
        number: its place in the batch, from 0, for the error message.
        count: events in the batch, likewise.

    Raises:
        EventDecodeError: it is malformed.
    """
    try:
        event = decode_alone(msgspec.Raw(raw))
        return None if event is None else _checked(event, limits)
    except EventDecodeError as error:
        raise _numbered(error, number, count) from error.__cause__


def peek_ts(payload: Buffer) -> float | None:
    """The timestamp of a batch without decoding it; None when it does not start as engines' batches do. O(1)."""
    if len(payload) < 10 or not 0x92 <= payload[0] <= 0x9F or payload[1] != 0xCB:
        return None
    return cast("float", struct.unpack_from(">d", payload, 2)[0])


def _peek_event_count(payload: Buffer) -> int:
    """How many events the batch's header announces; 0 when the bytes are not a batch (the decoder then says why)."""
    try:
        head = payload[0]
        at = 1 if 0x90 <= head <= 0x9F else {0xDC: 3, 0xDD: 5}[head]
        at += _NUMBER_BYTES.get(payload[at], 1)
        head = payload[at]
        if 0x90 <= head <= 0x9F:
            return head & 0x0F
        width = {0xDC: 2, 0xDD: 4}[head]
    except (IndexError, KeyError):
        return 0
    return int.from_bytes(payload[at + 1 : at + 1 + width], "big")


def _require_finite(ts: float) -> None:
    if not math.isfinite(ts):
        raise EventDecodeError(f"event batch with ts {ts} dropped: expected seconds as a finite number")


def _decode_one_by_one(payload: Buffer, limits: DecodeLimits) -> DecodedBatch:
    too_deep: list[int] = []
    try:
        try:
            split = _decode_split(payload)
        except RecursionError:
            flat, too_deep = replace_deep_events(bytes(payload), limits.max_depth)
            split = _decode_split(flat)
    except _BAD_BYTES as error:
        raise EventDecodeError(
            f"event batch of {len(payload)} bytes dropped: {error}; expected [ts, [event, ...], data_parallel_rank]"
        ) from error
    _require_finite(split.ts)
    rank = split.data_parallel_rank
    if rank is not None and not 0 <= rank <= MAX_TOKEN_ID:
        raise EventDecodeError(f"event batch with data_parallel_rank {rank} dropped: expected null or an integer >= 0")
    events: list[Event] = []
    malformed: list[EventDecodeError] = []
    unknown = 0
    for number, raw in enumerate(split.events):
        if number in too_deep:
            why = EventDecodeError(f"nested more than {limits.max_depth} levels deep (max_depth)")
            malformed.append(_numbered(why, number, len(split.events)))
            continue
        try:
            event = decode_alone(raw)
            if event is None:
                unknown += 1
            else:
                events.append(_checked(event, limits))
        except EventDecodeError as error:
            malformed.append(_numbered(error, number, len(split.events)))
    return DecodedBatch(EventBatch(split.ts, events, rank), tuple(malformed), unknown)


def _numbered(error: EventDecodeError, number: int, count: int) -> EventDecodeError:
    numbered = EventDecodeError(f"event {number} of {count} (from 0) dropped: {error.message}")
    numbered.__cause__ = error.__cause__
    return numbered


def _checked(event: Event, limits: DecodeLimits) -> Event:
    """The event with its extra keys in their final form, or an EventDecodeError for what types alone cannot express."""
    if isinstance(event, AllBlocksCleared):
        return event
    if len(event.block_hashes) > limits.max_hashes_per_event:
        name, count = type(event).__name__, len(event.block_hashes)
        raise EventDecodeError(f"{name}: {count} block_hashes, the limit is {limits.max_hashes_per_event}")
    if isinstance(event, BlockRemoved):
        return event
    if len(event.token_ids) > limits.max_tokens_per_event:
        raise EventDecodeError(
            f"BlockStored: {len(event.token_ids)} token_ids, the limit is {limits.max_tokens_per_event}"
        )
    if event.extra_keys is None:
        return event
    if len(event.extra_keys) != len(event.block_hashes):
        given, expected = len(event.extra_keys), len(event.block_hashes)
        raise EventDecodeError(f"BlockStored: {given} extra_keys for {expected} block_hashes, expected one each")
    if not any(event.extra_keys):
        return event
    keys = [None if block is None else tuple(_extra_key(key) for key in block) for block in event.extra_keys]
    return msgspec.structs.replace(event, extra_keys=keys)


def _extra_key(key: Any) -> str | bytes | tuple[str, int]:
    if isinstance(key, str | bytes):
        return key
    if isinstance(key, list) and len(key) == 2 and isinstance(key[0], str) and type(key[1]) is int:
        return key[0], key[1]
    raise EventDecodeError(
        f"BlockStored: extra_keys: expected str, bytes or [str, int], got {type(key).__name__} {key!r:.60}"
    )
