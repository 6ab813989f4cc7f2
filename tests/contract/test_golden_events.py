"""Bytes that real engines sent: ours must be the same, and theirs must mean what they meant."""

import json

import pytest

from kvatlas.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    decode_batch,
    encode_batch,
    encode_event,
)
from kvatlas.stream import RecordedFrames, read_recording
from support.golden import VECTORS, golden_files

VLLM = json.loads((VECTORS / "events-vllm.json").read_text())
SGLANG = json.loads((VECTORS / "events-sglang.json").read_text())
STREAMS = ("vllm-bytes-serial", "vllm-cbor-mix", "vllm-cbor-serial", "vllm-gemma-mix", "vllm-xxcbor-mix")
DIGEST = bytes.fromhex("c9d58ba695280d69b243e1e0df813136ca9196b286fb1a021e0b2e028ef071cb")

MINIMAL = BlockStored([1], None, [1, 2, 3, 4], 4, medium="GPU")
VLLM_EVENTS: list[Event] = [
    MINIMAL,
    BlockStored(
        [0x1122334455667788, 2],
        2**64 - 1,
        [1, 200, 300, 70000, 5, 6, 7, 8],
        4,
        lora_id=7,
        medium="GPU",
        lora_name="ad",
        extra_keys=[("ad", "s"), None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        session_id="sess",
    ),
    BlockStored(
        [DIGEST],
        None,
        [1, 2, 3, 4],
        4,
        medium="GPU",
        extra_keys=[(("img", 2), b"\x01\x02")],
        group_idx=1,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=128,
        locality="LOCAL",
        ownership="disk",
    ),
    BlockRemoved([1], "GPU"),
    BlockRemoved([1, 2], "CPU", group_idx=1, locality="REMOTE", ownership="x"),
    BlockRemoved([1]),
    AllBlocksCleared(),
]
VLLM_BATCHES = [
    EventBatch(1.5, [MINIMAL], 0),
    EventBatch(1.5, [BlockRemoved([1], "GPU")], 0),
    EventBatch(1.5, [AllBlocksCleared()], 0),
    EventBatch(1.5, [MINIMAL, BlockRemoved([9], "GPU", group_idx=0), AllBlocksCleared()], 0),
    EventBatch(1.5, [AllBlocksCleared()], None),
    EventBatch(1.5, [AllBlocksCleared()], 3),
    EventBatch(1.5, [], 0),
]
PLAIN = [-3488128144981237669, 5674439469042975057]
SPLIT = [-54982850985331377, -6683544735380531075]
SGLANG_EVENTS: list[list[Event]] = [
    [AllBlocksCleared()],
    [BlockStored(PLAIN, None, [1, 2, 3, 4, 5, 6, 7, 8], 4, medium="GPU")],
    [BlockStored(SPLIT, PLAIN[0], [9, 9, 9, 9, 7, 7, 7, 7], 4, medium="GPU")],
    [BlockRemoved(PLAIN[1:], "GPU")],
    [BlockRemoved([*SPLIT, PLAIN[0]], "GPU")],
    [
        BlockStored(
            [8751685944416650314, 5408712977347781210],
            None,
            [1, 2, 3, 4, 5, 6, 7, 8],
            4,
            medium="GPU",
            cache_salt="s1",
        )
    ],
    [
        BlockStored(
            [4547751747808663626, -6983363293199535932],
            None,
            [1, 2, 3, 4, 5, 6, 7, 8],
            4,
            medium="GPU",
            lora_name="my-adapter",
        )
    ],
    [BlockStored([7470307888890966271, -1634645291211865391, 7325169757385981536], None, [1, 2, 3], 1, medium="GPU")],
    [
        BlockStored([-5], None, [1, 2, 3, 4], 4, medium="CPU_PINNED", session_id="sess"),
        BlockRemoved([-5], "GPU"),
    ],
    [AllBlocksCleared()],
]
ARRAY_EVENTS: list[list[Event]] = [
    [BlockStored(PLAIN[:1], None, [1, 2, 3, 4], 4, medium="GPU")],
    [BlockStored([1], 5, [1, 2], 2)],
    [BlockRemoved([1], "GPU"), AllBlocksCleared()],
]


def _rows(rows, expected):
    return list(zip(rows, expected, strict=True))


def _name(value):
    return value["name"] if isinstance(value, dict) else "expected"


@pytest.mark.parametrize(("row", "event"), _rows(VLLM["events"], VLLM_EVENTS), ids=_name)
def test_event_bytes_of_vllm(row, event):
    """An event encodes to the bytes vLLM 0.32 sends (scenario 56)."""
    assert encode_event(event).hex() == row["hex"]


@pytest.mark.parametrize(("row", "batch"), _rows(VLLM["batches"], VLLM_BATCHES), ids=_name)
def test_batch_bytes_of_vllm_both_ways(row, batch):
    """A batch encodes to vLLM's bytes and decodes back to the same events (scenario 56)."""
    payload = bytes.fromhex(row["hex"])
    assert encode_batch(batch) == payload
    decoded = decode_batch(payload)
    assert (decoded.batch, decoded.malformed, decoded.unknown_events) == (batch, (), 0)


def test_each_vllm_event_alone_decodes():
    """Every golden event, put into a batch by hand, means what vLLM meant."""
    for row, event in zip(VLLM["events"], VLLM_EVENTS, strict=True):
        payload = bytes.fromhex("93cb3ff800000000000091" + row["hex"] + "00")
        assert decode_batch(payload).batch.events == [event]


def test_timestamp_is_a_float64():
    """Seconds are sent as an 8-byte float (ts 1700000000.25)."""
    assert encode_batch(EventBatch(1700000000.25, [], 0)).hex() == "93cb41d954fc401000009000"


@pytest.mark.parametrize(("row", "events"), _rows(SGLANG["tree"], SGLANG_EVENTS), ids=_name)
def test_sglang_tree_decodes(row, events):
    """Batches of SGLang's radix cache decode: signed hashes, cache_salt, no lora_name, its own media."""
    decoded = decode_batch(bytes.fromhex(row["hex"]))
    assert (decoded.batch.events, decoded.malformed) == (events, ())
    assert decoded.batch.ts == 1.5


def test_sglang_batches_in_our_layout_encode_again():
    """Where SGLang sends no field of its own (removals, clears, ranks), our bytes are its bytes."""
    same = 0
    for row, events in zip(SGLANG["tree"], SGLANG_EVENTS, strict=True):
        if not any(isinstance(event, BlockStored) for event in events):
            payload = bytes.fromhex(row["hex"])
            assert encode_batch(decode_batch(payload).batch) == payload
            same += 1
    assert same == 4


@pytest.mark.parametrize(("row", "events"), _rows(SGLANG["arrays"], ARRAY_EVENTS), ids=_name)
def test_array_events_of_older_engines_decode(row, events):
    """Events as positional arrays, trailing fields absent, still decode."""
    decoded = decode_batch(bytes.fromhex(row["hex"]))
    assert (decoded.batch.events, decoded.malformed) == (events, ())


def test_vllm_batches_recorded_beside_sglang_encode_again():
    """Bytes of vLLM from the SGLang experiments survive a round trip."""
    for row in SGLANG["vllm"]:
        payload = bytes.fromhex(row["hex"])
        assert encode_batch(decode_batch(payload).batch) == payload


@pytest.mark.parametrize("path", golden_files("streams", STREAMS), ids=lambda path: path.stem)
def test_recorded_streams_decode_and_encode_again(path):
    """Every recorded vLLM batch decodes without a malformed event and encodes to the same bytes."""
    frames = [record for record in read_recording(path) if isinstance(record, RecordedFrames)]
    assert len(frames) > 90
    for record in frames:
        decoded = decode_batch(record.payload)
        assert (decoded.malformed, decoded.unknown_events) == ((), 0), f"line {record.line}"
        assert encode_batch(decoded.batch) == record.payload, f"line {record.line}"
        assert record.topic == b"kv-events"


@pytest.mark.parametrize("name", ["vllm-bytes-serial", "vllm-cbor-serial"])
def test_committed_samples_are_readable(name):
    """The samples that a fresh clone tests with are whole, and their numbers rise by one."""
    records = list(read_recording(VECTORS / "streams" / f"{name}.jsonl"))
    numbers = [record.seq for record in records if isinstance(record, RecordedFrames)]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert len(numbers) > 90
