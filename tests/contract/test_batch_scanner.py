"""The C scanner of event batches says what `decode_batch` says, or nothing: on real streams, odd events and damaged bytes."""

import json
import shutil
import struct
import subprocess
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.events import BlockRemoved, BlockStored, decode_batch, plain_token_ids
from kvatlas.stream import RecordedFrames, read_recording
from support.golden import PROJECT_ROOT, VECTORS, golden_files
from support.msgpack_forms import damaged, packed

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

C_DIR = PROJECT_ROOT / "src" / "kvatlas" / "_native" / "c"
SOURCES = [PROJECT_ROOT / "tests" / "native" / "dump_batch.c", C_DIR / "batch.c", C_DIR / "id_runs.c"]
STREAMS = ("vllm-bytes-serial", "vllm-cbor-mix", "vllm-cbor-serial", "vllm-gemma-mix", "vllm-xxcbor-mix")
STORED_FIELDS = BlockStored.__struct_fields__
REMOVED_FIELDS = BlockRemoved.__struct_fields__


class Scanner:
    """A process that scans payload after payload."""

    def __init__(self, program):
        self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def scan(self, payload):
        """What the scanner makes of it; None when it does not open it."""
        self._process.stdin.write(struct.pack("<I", len(payload)) + payload)
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        """End the process, which must end well."""
        self._process.stdin.close()
        assert self._process.wait(10) == 0
        self._process.stdout.close()


@pytest.fixture(scope="module")
def scanner(tmp_path_factory):
    """The scanner, built here."""
    program = tmp_path_factory.mktemp("scanner") / "dump_batch"
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror", f"-I{C_DIR}"]
    subprocess.run(["cc", *flags, "-o", program, *SOURCES], check=True, timeout=100)
    scanner = Scanner(program)
    yield scanner
    scanner.close()


# Comparison


class Split(msgspec.Struct, array_like=True):
    """A batch with its events as bytes."""

    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


def handle(value):
    """A hash as the scanner shows it."""
    return value.hex() if isinstance(value, bytes) else value if value is None else value % 2**64


def text(value):
    """A text as the scanner shows it."""
    return None if value is None else value.encode().hex()


def shown(event, start, end):
    """The JSON that the scanner has to print for an event it takes."""
    stored = isinstance(event, BlockStored)
    return {
        "kind": "stored" if stored else "removed",
        "start": start,
        "end": end,
        "hashes": [{"of": 1, "hash": handle(value)} for value in event.block_hashes],
        "tokens": event.token_ids if stored else [],
        "parent": handle(event.parent_block_hash) if stored else None,
        "block_size": event.block_size if stored else 0,
        "medium": text(event.medium),
        "group": event.group_idx,
        "spec_kind": text(event.kv_cache_spec_kind) if stored else None,
        "window": event.kv_cache_spec_sliding_window if stored else None,
    }


def is_plain(event):
    """Whether the scanner has to take the event rather than hand it back, when an engine sent it."""
    if isinstance(event, BlockRemoved):
        return True
    return (
        isinstance(event, BlockStored)
        and plain_token_ids(event.token_ids) is not None
        and event.lora_name is None
        and event.cache_salt is None
        and not any(event.extra_keys or ())
    )


def check(scanner, payload):
    """Hold the scanner to the decoder. Returns (events taken, events handed back), or None for a batch not opened."""
    scanned = scanner.scan(payload)
    if scanned is None:
        return None
    decoded = decode_batch(payload)
    assert (scanned["ts"], scanned["rank"]) == (decoded.batch.ts, decoded.batch.data_parallel_rank)
    spans = [bytes(raw) for raw in msgspec.msgpack.decode(payload, type=Split).events]
    assert [payload[event["start"] : event["end"]] for event in scanned["events"]] == spans
    rest = iter(decoded.batch.events)
    taken = handed_back = 0
    for event, span in zip(scanned["events"], spans, strict=True):
        if event["kind"] == "other":
            handed_back += 1
            for alone in decode_batch(b"\x92\x00\x91" + span).batch.events:
                assert alone == next(rest)
            continue
        taken += 1
        same = next(rest)
        assert event == shown(same, event["start"], event["end"])
        assert is_plain(same)
    assert next(rest, None) is None
    return taken, handed_back


# Real bytes


def recorded_payloads():
    """Every payload of the recorded streams."""
    for path in golden_files("streams", STREAMS):
        yield from (line.payload for line in read_recording(path) if isinstance(line, RecordedFrames))


def vector_payloads():
    """The batches of the vectors, and each of their events in a batch of its own."""
    for name in ("events-vllm", "events-sglang"):
        for part, rows in json.loads((VECTORS / f"{name}.json").read_text()).items():
            for row in rows if isinstance(rows, list) else []:
                data = bytes.fromhex(row["hex"])
                yield b"\x93\x01\x91" + data + b"\x00" if part == "events" else data


@pytest.mark.parametrize("payloads", [recorded_payloads, vector_payloads])
def test_what_engines_send_is_taken(scanner, payloads):
    """Every real batch opens, and of its events only those with keys of their own and the clearing ones are handed back."""
    taken_events = 0
    for payload in payloads():
        result = check(scanner, payload)
        assert result is not None, payload.hex()
        events = decode_batch(payload).batch.events
        plain = sum(is_plain(event) for event in events)
        assert result == (plain, len(events) - plain), payload.hex()
        taken_events += plain
    assert taken_events > 20


# Made bytes

NUMBER = st.one_of(st.integers(0, 300), st.integers(-(2**63), 2**64 - 1), st.sampled_from([2**31, 2**63 - 1, 2**63]))
HASH = st.integers(-(2**63), 2**64 - 1)
DIGEST = st.binary(min_size=1, max_size=40)
TOKENS = st.lists(st.one_of(st.integers(0, 200000), st.integers(0, 2**63 - 1)), max_size=70)
NAME = st.sampled_from(["GPU", "CPU", "full_attention", "x" * 40, "", "né", "\U0001f600"])
ODD = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBER, st.floats(), NAME, st.binary(max_size=300)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAME, inner, max_size=3),
    max_leaves=6,
)
GOOD = {
    "block_hashes": st.lists(HASH, max_size=20) | st.lists(DIGEST, max_size=20),
    "parent_block_hash": st.none() | HASH | DIGEST,
    "token_ids": TOKENS,
    "block_size": st.integers(0, 2**63 - 1),
    "lora_id": st.none() | NUMBER,
    "lora_name": st.none(),
    "cache_salt": st.none(),
    "group_idx": st.none() | st.integers(0, 2**63 - 1),
    "kv_cache_spec_sliding_window": st.none() | st.integers(0, 2**63 - 1),
}


@st.composite
def events(draw, oddity):
    """An event as (kind, fields) in either form, of which one field in `oddity` has any value."""
    stored = draw(st.booleans())
    fields = {}
    for name in STORED_FIELDS if stored else REMOVED_FIELDS:
        if name == "extra_keys":
            count = len(fields["block_hashes"]) if isinstance(fields["block_hashes"], list) else 1
            good = st.none() | st.just([None] * count)
        else:
            good = GOOD.get(name, st.none() | NAME)
        fields[name] = draw(ODD if oddity and draw(st.integers(0, oddity)) == 0 else good)
    kind = "BlockStored" if stored else "BlockRemoved"
    if draw(st.booleans()):
        return [kind, *list(fields.values())[: draw(st.integers(3, 20))]]
    if draw(st.integers(0, 5)) == 0:
        fields[draw(st.sampled_from(["type", "medium", "new_field"]))] = draw(ODD)
    left_out = draw(st.sets(st.sampled_from([*fields, "nothing"]), max_size=2))
    return {"type": kind} | {name: value for name, value in fields.items() if name not in left_out}


def batches(oddity):
    """Batches of such events."""
    rank = st.none() | st.integers(0, 2**63 - 1) | (ODD if oddity else st.none())
    ts = st.floats(allow_nan=False, allow_infinity=False) if not oddity else st.floats() | NUMBER
    return st.tuples(ts, st.lists(events(oddity), max_size=4), rank)


SEED = st.integers(0, 2**32)


@given(batches(0), SEED)
def test_plain_events_in_any_encoding(scanner, batch, seed):
    """Integers, texts and containers in longer forms than they need mean the same, and the batch opens."""
    assert check(scanner, packed(batch, Random(seed))) is not None


@given(batches(8), SEED)
def test_odd_events(scanner, batch, seed):
    """Fields of wrong types, missing, unknown and doubled ones: taken as the decoder takes them, or handed back."""
    check(scanner, packed(batch, Random(seed)))


@given(st.lists(ODD, min_size=1, max_size=4) | st.tuples(st.floats(), st.lists(ODD, max_size=3)), SEED)
def test_values_that_are_no_events(scanner, value, seed):
    """Any MessagePack value: whatever opens is a batch to the decoder too."""
    check(scanner, packed(value, Random(seed)))


@given(batches(0), SEED)
def test_damaged_batches(scanner, batch, seed):
    """Bits flipped, bytes put in, taken out and cut off."""
    random = Random(seed)
    payload = packed(batch, random)
    for _ in range(10):
        check(scanner, damaged(payload, random))


def test_damaged_recordings(scanner):
    """Real payloads with the same damages."""
    random = Random(5)
    payloads = [*recorded_payloads(), *vector_payloads()]
    results = [check(scanner, damaged(random.choice(payloads), random)) for _ in range(3000)]
    opened = [result for result in results if result is not None]
    assert 200 < len(opened) < 2900
    assert sum(handed_back for _, handed_back in opened) > 50


# Single cases

REMOVED = b"\xa4type\xacBlockRemoved\xacblock_hashes"
STORED = b"\xabBlockStored\x92\x01\x02\xc0\x92\x05\x06\x01\xc0\xc0\xc0"  # up to the extra keys


@pytest.mark.parametrize(
    ("payload", "result"),
    [
        (b"\x92\x00\x91\x82" + REMOVED + b"\x91\x01", (1, 0)),
        (b"\x92\x00\x91\xdf\0\0\0\x02" + REMOVED + b"\x91\x01", (1, 0)),
        (b"\x92\x00\x91\x83" + REMOVED + b"\x91\x01\xa3new\x81\xc0\xc0", (1, 0)),
        (b"\x92\x00\x91\x83" + REMOVED + b"\x91\x01\xacblock_hashes\x91\x02", (0, 1)),
        (b"\x92\x00\x91\x82" + REMOVED + b"\x92\x01\xc4\x01a", (0, 1)),
        (b"\x92\x00\x91\x82" + REMOVED + b"\x91\xc4\x00", (0, 1)),
        (b"\x92\x00\x91\x83" + REMOVED + b"\x91\x01\x01\x01", (0, 1)),
        (b"\x92\x00\x91\x83" + REMOVED + b"\x91\x01\xa6medium\xa1\xff", (0, 1)),
        (b"\x92\x00\x91\x82" + REMOVED + b"\xdd\x00\x0f\x42\x41" + b"\x01" * 1_000_001, (0, 1)),
        (b"\x92\x00\x91\x82" + REMOVED + b"\x91\xc5\x01\x01" + b"h" * 257, (0, 1)),
        (b"\x92\x00\x91\x82" + REMOVED + b"\x91\xc5\x01\x00" + b"h" * 256, (1, 0)),
        (b"\x92\x00\x91\x83" + REMOVED + b"\x91\x01\xa4type\xacBlockRemoved", (0, 1)),
        (b"\x92\x00\x91\x82" + REMOVED[-13:] + b"\x91\x01" + REMOVED[:-13], (0, 1)),
        (b"\x92\x00\x91\x99" + STORED + b"\x92\xc0\xc0", (1, 0)),
        (b"\x92\x00\x91\x99" + STORED + b"\x91\xc0", (0, 1)),
        (b"\x92\x00\x91\x99" + STORED + b"\x92\xc0\x90", (0, 1)),
        (b"\x92\x00\x91\xc0", (0, 1)),
        (b"\x95\x00\x90\xc0\xc0\x91\x90", (0, 0)),
        (b"\x93\x00\x90\xcf\x7f" + b"\xff" * 7, (0, 0)),
        (b"\x93\x00\x90\xcf\x80" + b"\x00" * 7, None),
        (b"\x93\x00\x90\xff", None),
        (b"\x93\x00\x90\xcb" + struct.pack(">d", 1.0), None),
        (b"\x92\xcb" + struct.pack(">d", float("inf")) + b"\x90", None),
        (b"\x92\xc3\x90", None),
        (b"\x92\x00\x90\x00", None),
        (b"\x91\x00", None),
        (b"\x92\x00\xc0", None),
        (b"\x92\x00\x91\xc1", None),
        (b"\x92\x00\x91" + b"\x91" * 30 + b"\x90", None),
        (b"\x92\x00\x91" + b"\x91" * 29 + b"\x90", (0, 1)),
        (b"\x92\x00\xdd\x00\x07\xa1\x21" + b"\xc0" * 500_001, None),
        (b"", None),
    ],
    ids=repr,
)
def test_single_cases(scanner, payload, result):
    """Each rule about what is taken, handed back and not opened, on the smallest bytes that show it."""
    assert (check(scanner, payload)) == result
