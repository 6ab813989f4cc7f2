"""What the decoder accepts, what it refuses, and how it says so."""

import tracemalloc

import msgspec
import pytest

from kvatlas.errors import EventDecodeError
from kvatlas.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    DecodeLimits,
    EventBatch,
    decode_batch,
    encode_batch,
    encode_event,
    is_bigram,
    peek_ts,
    plain_token_ids,
)

STORED = BlockStored([1], None, [5, 6], 2, medium="GPU")


def packed(*events, ts=1.5, rank=0):
    return msgspec.msgpack.encode([ts, list(events), rank])


def as_map(event, **changes):
    return {**msgspec.msgpack.decode(encode_event(event)), **changes}


def only_error(payload):
    """The one malformed event's message; nothing else may have come out."""
    decoded = decode_batch(payload)
    assert decoded.batch.events == []
    (error,) = decoded.malformed
    return error.message


def test_array_and_map_and_unknown_kind_in_one_batch():
    """Both forms mix within one batch; a kind of the future is counted, not fatal."""
    array = ["BlockStored", [1], None, list(range(16)), 16, None, "GPU", None]
    decoded = decode_batch(packed(array, as_map(BlockRemoved([1], "GPU")), {"type": "FutureEvent", "x": 1}))
    assert decoded.batch.events == [
        BlockStored([1], None, list(range(16)), 16, medium="GPU"),
        BlockRemoved([1], "GPU"),
    ]
    assert (decoded.malformed, decoded.unknown_events) == ((), 1)


@pytest.mark.parametrize("form", [["FutureEvent", 1, 2], {"x": 1, "type": "FutureEvent"}, ["blockstored"]])
def test_unknown_kinds_are_counted(form):
    """An event type we do not know is neither an error nor an event, in either form."""
    decoded = decode_batch(packed(form))
    assert (decoded.batch.events, decoded.malformed, decoded.unknown_events) == ([], (), 1)


@pytest.mark.parametrize("tail", [[], [7], [7, "later", {"a": 1}], [None]])
def test_batches_of_two_or_more_elements(tail):
    """The rank may be absent, and what follows it is ignored."""
    decoded = decode_batch(msgspec.msgpack.encode([1.5, [as_map(STORED)], *tail]))
    assert decoded.batch == EventBatch(1.5, [STORED], tail[0] if tail else None)


def test_unknown_fields_are_ignored():
    """Unknown keys of a map and unknown trailing elements of an array change nothing."""
    array = ["BlockRemoved", [1], "GPU", None, None, None, "token_offset", 4]
    decoded = decode_batch(packed(as_map(STORED, token_offset=4, nested={"a": [1]}), array))
    assert decoded.batch.events == [STORED, BlockRemoved([1], "GPU")]


def test_key_order_does_not_matter():
    """The kind may come last in a map."""
    fields = as_map(STORED)
    decoded = decode_batch(packed(dict(reversed(fields.items()))))
    assert decoded.batch.events == [STORED]


@pytest.mark.parametrize("handle", [0, 2**64 - 1, -1, -(2**63), b"\x01" * 8, b"\x02" * 16, b"\x03" * 32])
def test_every_form_of_hash_is_kept_as_it_came(handle):
    """u64, signed i64 and bytes of any length pass through unchanged."""
    event = BlockStored([handle], handle, [5, 6], 2)
    assert decode_batch(encode_batch(EventBatch(1.0, [event]))).batch.events == [event]


@pytest.mark.parametrize("handle", ["text", 1.0, {"a": 1}, None, True, b"", b"\x01" * 257, [1]])
def test_other_hashes_are_malformed(handle):
    """A hash of any other type, an empty or an endless one drops its event and names the field."""
    assert "block_hashes" in only_error(packed(as_map(STORED, block_hashes=[handle])))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": "16"}, ["event 0 of 1", "block_size", "Expected `int`", "got `str`"]),
        ({"block_size": -1}, ["block_size", ">= 0"]),
        ({"token_ids": [1, "2"]}, ["token_ids[1]", "got `str`"]),
        ({"token_ids": [1, -2]}, ["token_ids[1]", ">= 0"]),
        ({"token_ids": [1, 2**63]}, ["token_ids[1]", "<= 9223372036854775807"]),
        ({"token_ids": [1, [2, 3]]}, ["token_ids[1]", "got `array`"]),
        ({"token_ids": [[1, 2], 3]}, ["token_ids", "[1]", "got `int`"]),
        ({"token_ids": [[1, 2, 3]]}, ["token_ids", "length 2"]),
        ({"token_ids": [[1, -2]]}, ["token_ids", "(1, -2)"]),
        ({"token_ids": 5}, ["token_ids", "got `int`"]),
        ({"parent_block_hash": "x"}, ["parent_block_hash", "got `str`"]),
        ({"medium": 3}, ["medium", "got `int`"]),
        ({"group_idx": "0"}, ["group_idx", "got `str`"]),
        ({"extra_keys": [[1]]}, ["extra_keys", "int 1"]),
        ({"extra_keys": [[["id", 1, 2]]]}, ["extra_keys", "list"]),
        ({"extra_keys": [[["id", True]]]}, ["extra_keys", "[str, int]"]),
        ({"extra_keys": [None, None]}, ["2 extra_keys for 1 block_hashes"]),
        ({"extra_keys": "salt"}, ["extra_keys", "got `str`"]),
    ],
)
def test_malformed_fields_are_named(changes, words):
    """The message of a dropped event says which event, which field, what was expected and what was given."""
    message = only_error(packed(as_map(STORED, **changes)))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({}, ["missing required field `type`", "as a str"]),
        ({"type": 4}, ["got `int` - at `$.type`", "as a str"]),
        ([], ["at least length 1, got 0", "as a str"]),
        ([4], ["got `int`", "as a str"]),
        (None, ["expected a map", "0xc0"]),
        (17, ["expected a map", "0x11"]),
        ({"type": "BlockStored"}, ["BlockStored", "missing required field `block_hashes`"]),
        (["BlockStored", [1]], ["BlockStored", "at least length 5, got 2"]),
        (["BlockRemoved"], ["BlockRemoved", "at least length 2, got 1"]),
        (["BlockStored", [1], None, [5, 6], "2"], ["BlockStored", "got `str` - at `$.block_size`"]),
        (["BlockStored", [1], None, [[5, 6], [7]], 2], ["BlockStored", "$.token_ids[1]", "pairs"]),
    ],
)
def test_shapes_that_are_not_events(form, words):
    """What is no event at all is dropped with its reason."""
    message = only_error(packed(form))
    assert all(word in message for word in words), message


def test_a_malformed_event_keeps_its_neighbours():
    """One bad event of three costs one event and keeps the order of the others."""
    decoded = decode_batch(packed(as_map(STORED), as_map(STORED, block_size=None), as_map(AllBlocksCleared())))
    assert decoded.batch.events == [STORED, AllBlocksCleared()]
    assert [error.message.split(" dropped")[0] for error in decoded.malformed] == ["event 1 of 3 (from 0)"]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"not msgpack",
        msgspec.msgpack.encode({"ts": 1.5}),
        msgspec.msgpack.encode([1.5]),
        msgspec.msgpack.encode(["1.5", []]),
        msgspec.msgpack.encode([1.5, {}]),
        msgspec.msgpack.encode([float("nan"), []]),
        msgspec.msgpack.encode([float("inf"), [{"type": "X"}]]),
        msgspec.msgpack.encode([1.5, [], -1]),
        msgspec.msgpack.encode([1.5, [{"type": "X"}], -1]),
        msgspec.msgpack.encode([1.5, [], "0"]),
        msgspec.msgpack.encode([1.5, []]) + b"\x00",
        b"\x80\x04\x95",
    ],
)
def test_malformed_batches_raise(payload):
    """A batch that cannot be read raises EventDecodeError, which costs that batch only."""
    with pytest.raises(EventDecodeError, match="dropped"):
        decode_batch(payload)


@pytest.mark.parametrize("claim", [b"\xdd\xff\xff\xff\xff", b"\xdd\x05\x00\x00\x00"])
def test_a_lying_header_allocates_nothing(claim):
    """An array that claims more events than allowed is refused before any is read."""
    with pytest.raises(EventDecodeError, match="max_events"):
        decode_batch(b"\x92\xcb?\xf8\0\0\0\0\0\0" + claim)


def test_limits_refuse_what_is_too_big():
    """Size and event count refuse the batch; hashes and tokens of one event refuse that event."""
    payload = encode_batch(EventBatch(1.5, [STORED, BlockRemoved([1, 2])]))
    with pytest.raises(EventDecodeError, match="max_payload_bytes"):
        decode_batch(payload, DecodeLimits(max_payload_bytes=len(payload) - 1))
    with pytest.raises(EventDecodeError, match="batch of 2 events refused: the limit is 1"):
        decode_batch(payload, DecodeLimits(max_events=1))
    few = decode_batch(payload, DecodeLimits(max_tokens_per_event=1, max_hashes_per_event=1))
    assert few.batch.events == []
    assert "2 token_ids, the limit is 1" in few.malformed[0].message
    assert "BlockRemoved: 2 block_hashes, the limit is 1" in few.malformed[1].message
    assert decode_batch(payload, DecodeLimits(len(payload), 2, 2, 2)).malformed == ()


@pytest.mark.parametrize("depth", [10, 100_000])
def test_deep_nesting_is_an_error_not_a_crash(depth):
    """An event nested beyond the interpreter's stack is dropped alone; a shallow surprise is ignored."""
    surprise = b"\x91" * depth + b"\xc0"
    payload = b"\x92\xcb?\xf8\0\0\0\0\0\0\x91\x82\xa4type\xb0AllBlocksCleared\xa1x" + surprise
    if depth == 10:
        assert decode_batch(payload).batch.events == [AllBlocksCleared()]
    else:
        decoded = decode_batch(payload)
        assert decoded.batch.events == []
        assert "max_depth" in decoded.malformed[0].message


def test_bigram_tokens_are_pairs():
    """SGLang's EAGLE events carry pairs; a consumer can tell them from plain ids in O(1)."""
    decoded = decode_batch(packed(as_map(STORED, token_ids=[[5, 6], [6, 7]])))
    (event,) = decoded.batch.events
    assert event.token_ids == [(5, 6), (6, 7)]
    assert is_bigram(event.token_ids)
    assert plain_token_ids(event.token_ids) is None
    assert plain_token_ids(STORED.token_ids) == [5, 6]
    assert not is_bigram([])


def test_bigram_tokens_in_an_array_event():
    """Both old form and pairs at once."""
    decoded = decode_batch(packed(["BlockStored", [1], None, [[5, 6], [6, 7]], 2, None, "GPU"]))
    assert decoded.batch.events == [BlockStored([1], None, [(5, 6), (6, 7)], 2, medium="GPU")]


def test_what_is_unknown_is_not_built():
    """A kind of the future with a million small things in it costs no memory (nor does an unknown field)."""
    things = [{} for _ in range(300_000)]
    payload = packed({"type": "FutureEvent", "x": things}, as_map(STORED, x=things), ["FutureEvent", things])
    tracemalloc.start()
    decoded = decode_batch(payload)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (decoded.batch.events, decoded.unknown_events) == ([STORED], 2)
    assert peak_bytes < len(payload) / 10


def test_extra_keys_come_out_as_tuples():
    """LoRA name, image with offset, salt and embeds digest keep their types; arrays become tuples."""
    event = BlockStored([1, 2], None, [5, 6, 7, 8], 2, extra_keys=[("ad", ("img", -6), "salt", b"\x01"), None])
    (decoded,) = decode_batch(encode_batch(EventBatch(1.5, [event]))).batch.events
    assert decoded.extra_keys == [("ad", ("img", -6), "salt", b"\x01"), None]


def test_group_zero_and_empty_session_are_sent():
    """Only None is left out of the bytes: 0 and the empty string are values."""
    encoded = msgspec.msgpack.decode(encode_event(BlockStored([], None, [], 0, group_idx=0, session_id="")))
    assert (encoded["group_idx"], encoded["session_id"]) == (0, "")
    assert "locality" not in encoded


def test_an_event_with_every_field_has_a_long_header():
    """Sixteen members need msgpack's long map header; fifteen, all that vLLM has, do not."""
    full = BlockStored([1], 2, [3], 1, 1, "GPU", "l", [None], 0, "k", 1, "L", "o", "s", "salt")
    assert encode_event(full)[:3] == b"\xde\x00\x10"
    assert encode_event(msgspec.structs.replace(full, cache_salt=None))[:1] == b"\x8f"
    assert decode_batch(encode_batch(EventBatch(1.0, [full]))).batch.events == [full]


@pytest.mark.parametrize(
    ("payload", "ts"),
    [
        (encode_batch(EventBatch(12.5, [])), 12.5),
        (msgspec.msgpack.encode([12.5, []]), 12.5),
        (msgspec.msgpack.encode([12, []]), None),
        (b"\x93\xcb\x00", None),
        (b"", None),
    ],
)
def test_peek_ts(payload, ts):
    """The timestamp is read without decoding; what does not begin like a batch has none."""
    assert peek_ts(payload) == ts
