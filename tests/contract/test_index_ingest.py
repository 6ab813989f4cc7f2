"""One index on the native core and one on its Python twin: the same payloads make the same of both."""

import hashlib
from array import array
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas._native import load_native_index
from kvatlas._native._pure_index import IndexCore
from kvatlas.errors import EventDecodeError
from kvatlas.events import DecodeLimits
from kvatlas.hashing import NO_EXTRAS, BlockKeyHasher, Lora, MultimodalItem, RequestExtras
from kvatlas.index import CopyMode, PrefixIndex
from kvatlas.stream import RecordedFrames, RecordedRequest, read_recording
from support.backends import NOT_BUILT
from support.golden import PROJECT_ROOT, golden_files
from support.msgpack_forms import damaged, packed

NATIVE = load_native_index()
pytestmark = pytest.mark.skipif(NATIVE is None, reason=NOT_BUILT)

STREAMS = ("vllm-bytes-serial", "vllm-cbor-mix", "vllm-cbor-serial", "vllm-gemma-mix", "vllm-xxcbor-mix")
UNIT = 2
WORKERS = ("a", "b")
# What prompts are made of: one digit is one unit of two tokens. They share prefixes.
PATHS = ("00000000", "00001111", "00110011", "01111111", "1111")
PROMPTS = [[int(digit) for digit in path for _ in range(UNIT)] for path in PATHS]
LORA = RequestExtras(lora=Lora("L", "/l"))
SALT = RequestExtras(cache_salt="s")
IMAGE = RequestExtras(multimodal=(MultimodalItem("img", 1, 3),))
EXTRAS = (NO_EXTRAS, LORA, SALT, IMAGE)


@contextmanager
def core_of(core_class):
    """Indexes made here run on one core."""
    with mock.patch("kvatlas.index.prefix_index.new_index_core", core_class):
        yield


class Both:
    """The two indexes, held to one another."""

    def __init__(self, **options):
        self.indexes = []
        for core_class in (NATIVE, IndexCore):
            with core_of(core_class):
                self.indexes.append(PrefixIndex(BlockKeyHasher(seed=3), **options))

    def same(self, ask):
        """What both answer."""
        native, pure = (ask(index) for index in self.indexes)
        assert native == pure
        return native

    def ingest(self, worker, payload, limits=None):
        """Feed both. Returns what came of it, or the error's type."""
        return self.same(lambda index: outcome(index, worker, payload, limits))

    def ingest_run(self, worker, payloads):
        """Feed both a run, as far as it goes in one call each time. Returns what all of it amounted to."""
        return self.same(lambda index: run_outcome(index, worker, payloads))

    def check(self, prompts=PROMPTS, extras=EXTRAS):
        """Ask both everything."""
        for worker in self.indexes[0].worker_ids:
            self.same(lambda index, worker=worker: (index.stats(worker), index.block_size(worker)))
        self.same(lambda index: (index.memory.entries, index.memory.blocks))
        for prompt in prompts:
            for each in extras:
                self.same(lambda index, prompt=prompt, each=each: matches(index, prompt, each))


def matches(index, prompt, extras=NO_EXTRAS):
    """A match as plain data."""
    return {
        worker: (m.hit_tokens, m.hit_blocks, m.block_size, m.exact, m.tiers)
        for worker, m in index.match(prompt, extras=extras).items()
    }


def outcome(index, worker, payload, limits):
    """What one payload amounts to, as plain data."""
    try:
        if limits is None:
            applied = index.ingest(worker, payload)
        else:
            applied = index.apply_batch(worker, index.open_batch(payload, limits))
    except EventDecodeError as error:
        return type(error)
    malformed = [str(error) for error in applied.malformed]
    return (applied.events, applied.cleared, malformed, applied.unknown_events)


def run_outcome(index, worker, payloads):
    """What a run amounts to, wherever the core's calls end."""
    events, cleared, malformed, unknown, refused, at = 0, 0, [], 0, [], 0
    while at < len(payloads):
        at, applied = index.ingest_run(worker, payloads, at)
        outcomes = [
            (applied.events, applied.cleared, [str(error) for error in applied.malformed], applied.unknown_events)
        ]
        if at < len(payloads):
            outcomes.append(outcome(index, worker, payloads[at], None))
            at += 1
        for each in outcomes:
            if isinstance(each, type):
                refused.append((at, each))
                continue
            events, cleared, unknown = events + each[0], cleared + each[1], unknown + each[3]
            malformed += each[2]
    return events, cleared, malformed, unknown, refused


# Made streams


@dataclass(frozen=True)
class Engine:
    """How one engine speaks: its form of hashes, and its groups as (kind, window, units of a block)."""

    form: str
    groups: tuple[tuple[str | None, int | None, int], ...]
    numbers_groups: bool


FULL = ("full_attention", None, 1)
SETUPS = (
    ((None, None, 1),),
    (FULL,),
    (("full_attention", None, 2),),
    (FULL, ("sliding_window", 3, 1)),
    (FULL, ("mamba", None, 2)),
    (("full_attention", None, 2), ("sliding_window", 5, 1), ("mamba", None, 4)),
    (FULL, ("chunked_local_attention", None, 2)),
    (FULL, ("of no known rule", None, 1)),
)
ENGINES = st.builds(
    Engine, st.sampled_from(["unsigned", "signed", "bytes", "short"]), st.sampled_from(SETUPS), st.booleans()
)


def handle(engine, path, extras, units):
    """The engine's hash of what ends with this path; groups with longer blocks have hashes of their own."""
    digest = hashlib.sha256(f"{path} {extras} {units}".encode()).digest()
    match engine.form:
        case "bytes":
            return digest
        case "short":
            return int(digest[0]) & 63
        case form:
            return int.from_bytes(digest[:8], "big", signed=form == "signed")


EVENT = st.fixed_dictionaries(
    {
        "what": st.sampled_from(["store"] * 5 + ["all groups"] * 3 + ["remove"] * 3 + ["clear", "unknown", "broken"]),
        "path": st.sampled_from(PATHS),
        "group": st.integers(0, 2),
        "first": st.integers(0, 3),
        "blocks": st.integers(0, 4),
        "medium": st.sampled_from(["GPU"] * 6 + ["gpu", None, "CPU", "CPU", "CPU_PINNED", ""]),
        "extras": st.sampled_from([0] * 8 + [1, 2, 3, 4, 5, 6]),
        "masked": st.sampled_from([0] * 6 + [1, 2]),
        "size": st.sampled_from([None] * 16 + [0, 1, 3, 8]),
        "odd": st.sampled_from(["no"] * 12 + ["bigram", "array", "array", "no parent", "no kind", "long medium"]),
        "break": st.integers(0, 5),
    }
)
BATCH = st.tuples(st.sampled_from(WORKERS), st.lists(EVENT, min_size=1, max_size=5), st.integers(0, 2**32))


def extra_fields(kind, count, at_root):
    """(extra_keys, lora_name, cache_salt) of a store of so many blocks."""
    first = [["s"]] if at_root else [None]
    rest = [None] * (count - 1)
    return {
        0: (None, None, None),
        1: ([["L"]] * count, "L", None),
        2: ((first + rest)[:count], None, None),
        3: ([[["img", 1 - i * UNIT]] for i in range(count)], None, None),
        4: ([["s", "t"]] * count, None, None),
        5: (None, None, "s"),
        6: ([None] * count, None, None),
    }[kind]


def stored(engine, spec, kind, window, units, group):
    """A BlockStored as a dictionary, in the order of the wire."""
    size, block = (units if spec["size"] is None else spec["size"]) * UNIT, units
    path, start = spec["path"], spec["first"] * block
    ends = range(start + block, min(len(path), start + spec["blocks"] * block) + 1, block)
    tokens = [int(digit) for digit in path[start : ends[-1] if ends else start] for _ in range(UNIT)]
    hashes = [handle(engine, path[:end], spec["extras"], units) for end in ends]
    if spec["masked"]:
        hashes = hashes[spec["masked"] :]
    if spec["odd"] == "bigram":
        tokens = [[token, token] for token in tokens]
    parent = handle(engine, path[:start], spec["extras"], units) if start and spec["odd"] != "no parent" else None
    keys, lora, salt = extra_fields(spec["extras"], len(hashes), parent is None)
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": size,
        "lora_id": None if lora is None else 1,
        "medium": "x" * 60 if spec["odd"] == "long medium" else spec["medium"],
        "lora_name": lora,
        "extra_keys": keys,
        "group_idx": group,
        "kv_cache_spec_kind": None if spec["odd"] == "no kind" else kind,
        "kv_cache_spec_sliding_window": window,
    } | ({} if salt is None else {"cache_salt": salt})


def made_events(engine, spec):
    """One event; or the whole path in every group, as engines announce a prompt."""
    if spec["what"] != "all groups":
        return [made_event(engine, spec)]
    whole = {**spec, "what": "store", "first": 0, "blocks": 8, "size": None, "masked": 0}
    return [made_event(engine, {**whole, "group": number}) for number in range(len(engine.groups))]


def made_event(engine, spec):
    """One event as MessagePack would show it."""
    number = spec["group"] % len(engine.groups)
    kind, window, units = engine.groups[number]
    group = number if number or engine.numbers_groups else None
    match spec["what"]:
        case "store":
            event = stored(engine, spec, kind, window, units, group)
        case "remove":
            ends = range(units * (1 + spec["first"]), len(spec["path"]) + 1, units)[: spec["blocks"]]
            hashes = [handle(engine, spec["path"][:end], spec["extras"], units) for end in ends]
            event = {"type": "BlockRemoved", "block_hashes": hashes, "medium": spec["medium"], "group_idx": group}
        case "clear":
            event = {"type": "AllBlocksCleared"}
        case "unknown":
            event = {"type": "BlockMoved", "block_hashes": [1]}
        case _:
            broken = stored(engine, spec, kind, window, units, group)
            name = ("type", "block_hashes", "token_ids", "block_size", "medium", "group_idx")[spec["break"]]
            event = {field: value for field, value in broken.items() if field != name} | (
                {} if spec["break"] % 2 else {name: -1}
            )
    return list(event.values()) if spec["odd"] == "array" else event


def payload_of(engine, specs, seed):
    """A batch's bytes; numbers, texts and containers in any encoding."""
    return packed([1.5, [event for spec in specs for event in made_events(engine, spec)], None], Random(seed))


def new_pair(modes, *, max_orphan_blocks=6):
    """Both, with the workers; few blocks may wait for their parents."""
    both = Both(max_orphan_blocks=max_orphan_blocks)
    for worker, mode, size in zip(WORKERS, modes, (None, UNIT), strict=True):
        both.same(
            lambda index, worker=worker, mode=mode, size=size: index.add_worker(worker, block_size=size, copy_mode=mode)
        )
    return both


MODES = st.tuples(*[st.sampled_from(list(CopyMode))] * 2)
DAMAGE = st.sampled_from([False] * 5 + [True])


@settings(max_examples=200)
@given(engines=st.tuples(ENGINES, ENGINES), modes=MODES, batches=st.lists(st.tuples(BATCH, DAMAGE), max_size=14))
def test_made_streams(engines, modes, batches):
    """Whatever engines send, whole or damaged: same outcome, same counters, same matches after every batch."""
    both = new_pair(modes)
    for (worker, specs, seed), is_damaged in batches:
        payload = payload_of(engines[WORKERS.index(worker)], specs, seed)
        both.ingest(worker, damaged(payload, Random(seed)) if is_damaged else payload)
        both.check()


@settings(max_examples=80)
@given(
    engines=st.tuples(ENGINES, ENGINES),
    modes=MODES,
    runs=st.lists(st.tuples(st.sampled_from(WORKERS), st.lists(st.tuples(BATCH, DAMAGE), max_size=6)), max_size=6),
)
def test_made_runs(engines, modes, runs):
    """The same for runs of batches, and as batch by batch."""
    both, single = new_pair(modes), new_pair(modes)
    for worker, batches in runs:
        payloads = [
            damaged(payload, Random(seed)) if is_damaged else payload
            for (_, specs, seed), is_damaged in batches
            for payload in [payload_of(engines[WORKERS.index(worker)], specs, seed)]
        ]
        both.ingest_run(worker, payloads)
        for payload in payloads:
            single.ingest(worker, payload)
        both.check()
        single.check()  # a question makes what it finds younger
        for mine, other in zip(both.indexes, single.indexes, strict=True):
            assert mine.stats(worker) == other.stats(worker)
            assert mine.dump_blocks(worker) == other.dump_blocks(worker)


@settings(max_examples=60)
@given(
    engine=ENGINES,
    order=st.permutations(range(8)),
    again=st.lists(st.integers(0, 7), max_size=4),
    seed=st.integers(0, 2**32),
)
def test_chains_in_any_order(engine, order, again, seed):
    """Blocks one by one, parents after their children, some twice: waits end alike, and all are found in the end."""
    both = new_pair((CopyMode.COUNT, CopyMode.COUNT), max_orphan_blocks=100)
    _, _, units = engine.groups[0]
    spec = {"what": "store", "path": PATHS[0], "group": 0, "blocks": 1, "medium": "GPU", "extras": 0, "masked": 0}
    random = Random(seed)
    for block in [*order, *again]:
        event = made_event(engine, {**spec, "first": block % (8 // units), "size": None, "odd": "no", "break": 0})
        both.ingest("a", packed([1.5, [event], None], random))
        both.check(extras=(NO_EXTRAS,))
    if len(engine.groups) == 1 and engine.form != "short":
        for index in both.indexes:
            assert index.match([*PROMPTS[0], 9])["a"].hit_blocks == 8 // units


@given(data=st.binary(max_size=60))
def test_any_bytes(data):
    """Bytes that are no batch raise the same error."""
    both = new_pair((CopyMode.COUNT, CopyMode.COUNT))
    both.ingest("a", data)
    both.check()


@given(
    limits=st.builds(DecodeLimits, *[st.integers(0, 200)] * 2, *[st.integers(0, 9)] * 2), batch=BATCH, engine=ENGINES
)
def test_limits(limits, batch, engine):
    """Each limit refuses the same batches and events on both."""
    both = new_pair((CopyMode.COUNT, CopyMode.COUNT))
    for _ in range(2):
        both.ingest("a", payload_of(engine, *batch[1:]), limits=limits)
        both.check()


# Recorded streams


@pytest.mark.parametrize("path", golden_files("streams", STREAMS), ids=lambda path: path.stem)
def test_recorded_streams(path):
    """Real streams: same counters all along, same matches for every recorded request."""
    both = Both()
    both.same(lambda index: index.add_worker("a"))
    requests = 0
    for line in read_recording(path):
        if isinstance(line, RecordedFrames):
            both.ingest("a", line.payload)
            both.same(lambda index: index.stats("a"))
        elif isinstance(line, RecordedRequest):
            requests += 1
            extras = RequestExtras(cache_salt=line.cache_salt)
            both.same(lambda index, line=line, extras=extras: matches(index, line.prompt_token_ids, extras))
    assert requests > 10


@pytest.mark.parametrize("path", golden_files("streams", STREAMS), ids=lambda path: path.stem)
def test_recorded_streams_in_runs(path):
    """A whole recorded stream in runs of a few batches amounts to what it does batch by batch."""
    both, single = Both(), Both()
    for pair in (both, single):
        pair.same(lambda index: index.add_worker("a"))
    lines = list(read_recording(path))
    payloads = [line.payload for line in lines if isinstance(line, RecordedFrames)]
    for payload in payloads:
        single.ingest("a", payload)
    for first in range(0, len(payloads), 7):
        both.ingest_run("a", payloads[first : first + 7])
    assert both.same(lambda index: index.stats("a")) == single.same(lambda index: index.stats("a"))
    for line in lines:
        if isinstance(line, RecordedRequest):
            asked = [
                matches(index, line.prompt_token_ids, RequestExtras(cache_salt=line.cache_salt))
                for index in (*both.indexes, *single.indexes)
            ]
            assert asked[1:] == asked[:-1]


# What the engine's own reports claim, on each core


@pytest.fixture(params=[NATIVE, IndexCore], ids=["native", "pure"], name="core")
def _core(request):
    return request.param(3)


def test_a_store_ends_what_only_a_report_claimed(core):
    """Once an event names a reported block, the event's claim is the only one: nothing stays when it ends."""
    worker = core.add_worker("w", 1, counting=True)
    core.confirm(worker, array("Q", [77]), certain=False)
    core.add_copies(worker, 0, array("Q", [5]))
    core.join(worker, array("Q", [5]), array("Q", [77]))
    assert core.held(0, worker, [77]) == b"\x02"
    core.remove_copies(worker, 0, array("Q", [5]))
    assert core.held(0, worker, [77]) == b"\x00"
    core.confirm(worker, array("Q", [77]), certain=False)
    core.add_copies(worker, 0, array("Q", [5]))
    core.join(worker, array("Q", [5]), array("Q", [77]))
    core.drop_worker(worker)
    assert core.add_worker("another", 1, counting=True) == worker
    assert core.held(0, worker, [77]) == b"\x00"


def test_a_store_elsewhere_leaves_a_report_alone(core):
    """A copy in another medium says nothing of the device: the reported claim still ends with its worker."""
    worker, plane = core.add_worker("w", 1, counting=True), core.add_plane()
    core.confirm(worker, array("Q", [77]), certain=True)
    core.add_copies(worker, plane, array("Q", [5]))
    core.join(worker, array("Q", [5]), array("Q", [77]))
    assert core.reported(worker) == 1
    core.forget_all(worker)
    assert core.held(0, worker, [77]) == b"\x00"


def test_a_removal_of_unknown_content_may_be_of_a_reported_block(core):
    """A block whose content no event told goes: it may have been one that only a report claims."""
    worker = core.add_worker("w", 1, counting=False)
    core.confirm(worker, array("Q", [77]), certain=True)
    core.add_copies(worker, 0, array("Q", [5]))
    assert core.held(0, worker, [77]) == b"\x02"
    core.remove_copies(worker, 0, array("Q", [5]))
    assert core.held(0, worker, [77]) == b"\x01"


def test_the_core_knows_the_default_limits():
    """What the core refuses by itself is what the decoder refuses: size, events and depth."""
    source = (PROJECT_ROOT / "src/kvatlas/_native/index_kernel.pyx").read_text("utf-8")
    limits = DecodeLimits()
    for name, value in (
        ("MAX_PAYLOAD_BYTES = 16 * 1024 * 1024", limits.max_payload_bytes == 16 * 1024 * 1024),
        ("MAX_EVENTS = 500_000", limits.max_events == 500_000),
        ("MAX_DEPTH = 32", limits.max_depth == 32),
    ):
        assert name in source
        assert value, name
