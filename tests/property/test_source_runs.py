"""Runs of batches into a column, against the same batches one by one, on either core: same books, same trust, same claims."""

from collections.abc import Callable
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas._native import load_native_index
from kvatlas._native._pure_index import IndexCore
from kvatlas.clock import ManualClock
from kvatlas.errors import EventDecodeError
from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, encode_batch
from kvatlas.fleet import EventSource, TrustState
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import Applied, PrefixIndex
from support.backends import NOT_BUILT

NATIVE = load_native_index()
CORES = pytest.mark.parametrize(
    "core",
    [
        pytest.param(NATIVE, id="native", marks=pytest.mark.skipif(NATIVE is None, reason=NOT_BUILT)),
        pytest.param(IndexCore, id="pure"),
    ],
)

SIZE = 2
PATHS = ("00000000", "00001111", "01010101", "11110000")
PROMPTS = [[int(digit) for digit in path for _ in range(SIZE)] + [9] for path in PATHS]


def handle(path: str, end: int) -> int:
    """The engine's hash of what ends there; paths share their prefixes."""
    return int("1" + path[:end], 3)


def stored(path: str, first: int, count: int, *, parent: bool = True, medium: str = "GPU") -> BlockStored:
    ends = range(first + 1, min(first + count, len(path)) + 1)
    return BlockStored(
        block_hashes=[handle(path, end) for end in ends],
        parent_block_hash=handle(path, first) if first and parent else None,
        token_ids=[int(path[end - 1]) for end in ends for _ in range(SIZE)],
        block_size=SIZE,
        medium=medium,
    )


STORES = st.builds(
    stored,
    st.sampled_from(PATHS),
    st.integers(0, 6),
    st.integers(1, 5),
    medium=st.sampled_from(["GPU"] * 5 + ["CPU"]),
)
REMOVALS = st.builds(
    lambda path, ends: BlockRemoved([handle(path, end) for end in ends], "GPU"),
    st.sampled_from(PATHS),
    st.lists(st.integers(1, 8), min_size=1, max_size=4),
)
WHOLE = st.builds(stored, st.sampled_from(PATHS), st.just(0), st.just(8))
EVENTS = st.one_of(STORES, STORES, WHOLE, REMOVALS, REMOVALS)
RANKS = st.sampled_from([None, *[0] * 12, 1])
USUAL = st.lists(EVENTS, min_size=1, max_size=3)
UNKNOWN = b"\x92\xaaBlockMoved\x01"
MALFORMED = b"\x92\xacBlockRemoved\xa1x"


def batch_of(events: list[object], rank: int | None, odd: bytes | None = None) -> bytes:
    """A batch's bytes; `odd` is one event more, as it is."""
    payload = encode_batch(EventBatch(1.0, events, rank))
    if odd is None:
        return payload
    head = 10  # the container and the time stamp
    assert payload[head] == 0x90 | len(events)
    return payload[:head] + bytes([0x90 | (len(events) + 1)]) + odd + payload[head + 1 :]


BATCHES = st.one_of(
    *[st.builds(batch_of, USUAL, RANKS)] * 8,
    st.builds(batch_of, USUAL, RANKS, st.sampled_from([UNKNOWN, MALFORMED])),
    st.builds(lambda before, after: batch_of([*before, AllBlocksCleared(), *after], 0), USUAL, USUAL),
    st.sampled_from([b"", b"no batch", b"\x93\x01"]),
    st.just(batch_of([], 0)),
)
RUNS = st.lists(
    st.tuples(
        st.sampled_from(["", "", "", "gap", "life", "reset", "overclaim", "offline"]), st.lists(BATCHES, max_size=8)
    ),
    max_size=8,
)


def new_index(core: Callable[..., object], **options: object) -> PrefixIndex:
    with mock.patch("kvatlas.index.prefix_index.new_index_core", core):
        index = PrefixIndex(BlockKeyHasher(seed=3), **options)
    index.add_worker("w")
    index.add_worker("other", block_size=SIZE)
    index.apply("other", stored(PATHS[0], 0, 8))
    return index


class Follower:
    """A source with an index of its own."""

    def __init__(self, index: PrefixIndex, rank: int | None) -> None:
        self.index = index
        self.clock = ManualClock()
        self.source = EventSource("w", index, TrustState(), self.clock, rank=rank)
        self.source.on_status("syncing", "first contact")
        self.source.on_status("live", "caught up")
        self.seq = 0

    def happen(self, what: str) -> None:
        self.clock.advance(1.0)
        match what:
            case "gap":
                self.source.on_gap(self.seq, self.seq + 1)
                self.seq += 2
            case "life":
                self.source.on_life("restarted")
                self.source.on_status("live", "caught up")
                self.seq = 0
            case "reset":
                self.source.note_reset("a call")
            case "overclaim":
                self.source.note_overclaim("promised too much")
            case "offline":
                self.source.on_status("lost", "gone")

    def one_by_one(self, payloads: list[bytes]) -> None:
        for seq, payload in enumerate(payloads, self.seq):
            self.source.on_batch(seq, payload)
        self.seq += len(payloads)

    def in_a_run(self, payloads: list[bytes]) -> None:
        self.source.on_batches(self.seq, payloads)
        self.seq += len(payloads)

    def books(self) -> dict[str, object]:
        source, index = self.source, self.index
        return {
            "stats": source.stats,
            "trust": source.trust,
            "loss": source.loss,
            "position": source.position,
            "column": index.stats("w"),
            "state": index.dump_state("w"),
            "blocks": blocks_of(index),
            "doubtful": index.is_doubtful("w"),
            "complete": index.is_complete("w"),
            "claims": [index.claims("w", prompt) for prompt in PROMPTS],
            "matches": [index.match(prompt) for prompt in PROMPTS],
            "found": [index.find_tokens(prompt, SIZE) for prompt in PROMPTS],
        }


def blocks_of(index: PrefixIndex) -> object:
    """What a snapshot would keep."""
    return index.dump_blocks("w"), index.planes, index.memory.entries, index.memory.blocks


@CORES
@settings(max_examples=250)
@given(runs=RUNS, rank=st.sampled_from([None, 0, 0]), capacity=st.sampled_from([None, 4, 20]))
def test_runs_are_the_same_batches(
    core: Callable[..., object], runs: list[tuple[str, list[bytes]]], rank: int | None, capacity: int | None
) -> None:
    """Whatever the batches hold and whatever happens between the runs, nobody can tell afterwards how they came."""
    single, joined = (Follower(new_index(core, max_orphan_blocks=6), rank) for _ in range(2))
    for follower in (single, joined):
        if capacity is not None:
            follower.index.set_capacity("w", capacity)
    for what, payloads in runs:
        for follower in (single, joined):
            follower.happen(what)
        single.one_by_one(payloads)
        joined.in_a_run(payloads)
        assert joined.books() == single.books()


CAP = 3 * 1024 * 1024
CAPPED = st.lists(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 600)), min_size=1, max_size=8), max_size=8)


def long_store(chain: int, blocks: int) -> bytes:
    """A chain of its own from the root, cut somewhere."""
    store = BlockStored(
        block_hashes=[10_000 * (chain + 1) + number for number in range(blocks)],
        parent_block_hash=None,
        token_ids=long_prompt(chain, blocks)[:-1],
        block_size=SIZE,
        medium="GPU",
    )
    return batch_of([store], 0)


def long_prompt(chain: int, blocks: int) -> list[int]:
    return [*([chain] * SIZE * blocks), 0]


@CORES
@settings(max_examples=20)
@given(runs=CAPPED)
def test_runs_under_a_cap(core: Callable[..., object], runs: list[list[tuple[int, int]]]) -> None:
    """What is given up may differ; nothing is claimed that was not said, and where nothing is given up all is the same."""
    single, joined = (Follower(new_index(core, max_bytes=CAP), 0) for _ in range(2))
    whole = Follower(new_index(core), 0)
    for run in runs:
        payloads = [long_store(chain, blocks) for chain, blocks in run]
        single.one_by_one(payloads)
        whole.one_by_one(payloads)
        joined.in_a_run(payloads)
    memories = [follower.index.memory for follower in (single, joined)]
    for memory in memories:
        assert memory.used_bytes <= CAP
    kept_all = not any(memory.refused_blocks or memory.forgotten_blocks for memory in memories)
    for chain in {chain for run in runs for chain, _ in run}:
        said = whole.index.match(long_prompt(chain, 600))["w"].hit_blocks
        claimed = [follower.index.match(long_prompt(chain, 600))["w"].hit_blocks for follower in (single, joined)]
        assert max(claimed) <= said
        if kept_all:
            assert claimed == [said, said]
    if kept_all:
        assert joined.books() == single.books()
    assert joined.source.stats == single.source.stats


@CORES
def test_a_run_under_a_cap_is_kept_below_it(core: Callable[..., object]) -> None:
    """The cap is looked at after a run as after a batch: what is forgotten is counted, the newest is kept."""
    follower = Follower(new_index(core, max_bytes=CAP), 0)
    for first in range(0, 80, 8):
        follower.in_a_run([long_store(chain, 600) for chain in range(first, first + 8)])
        assert follower.index.memory.used_bytes <= CAP
    assert follower.index.memory.forgotten_blocks > 0
    assert follower.index.match(long_prompt(79, 600))["w"].hit_blocks == 600
    assert follower.index.match(long_prompt(0, 600))["w"].hit_blocks < 600


def ingested(index: PrefixIndex, payloads: list[bytes], rank: int | None) -> list[tuple[object, ...]]:
    """The outcome of each batch of a run, by `ingest_run` as far as it goes and by `ingest` for what it leaves."""
    outcomes: list[tuple[object, ...]] = []
    at = 0
    while at < len(payloads):
        end, applied = index.ingest_run("w", payloads, at, rank=rank)
        assert at <= end <= len(payloads)
        if end > at:
            outcomes.append((end - at, *plain(applied)))
        else:
            assert plain(applied) == (0, False, [], 0)
        if end < len(payloads):
            outcomes.append((1, *one(index, payloads[end], rank)))
        at = end + 1
    return outcomes


def one(index: PrefixIndex, payload: bytes, rank: int | None) -> tuple[object, ...]:
    try:
        applied = index.ingest("w", payload, rank=rank)
    except EventDecodeError as error:
        return ("no batch", error.message)
    return plain(applied) if isinstance(applied, Applied) else ("foreign", applied.rank)


def plain(applied: Applied) -> tuple[object, ...]:
    return applied.events, applied.cleared, [error.message for error in applied.malformed], applied.unknown_events


@CORES
@settings(max_examples=150)
@given(payloads=st.lists(BATCHES, max_size=16), rank=st.sampled_from([None, -1, 0, 1]))
def test_a_run_amounts_to_its_batches(core: Callable[..., object], payloads: list[bytes], rank: int | None) -> None:
    """Outcomes add up; only the last batch of a run has cleared or held an odd event; what it stops at was not applied."""
    single, joined = new_index(core), new_index(core)
    expected = [one(single, payload, rank) for payload in payloads]
    at = 0
    for count, *outcome in ingested(joined, payloads, rank):
        parts = expected[at : at + count]
        if count == 1:
            assert tuple(outcome) == parts[0]
        else:
            assert outcome[0] == sum(part[0] for part in parts)
            assert all(part[1:] == (False, [], 0) for part in parts[:-1])
            assert tuple(outcome[1:]) == parts[-1][1:]
        at += count
    assert at == len(payloads)
    assert blocks_of(joined) == blocks_of(single)
    assert joined.stats("w") == single.stats("w")


@CORES
def test_odd_events_end_a_run_and_are_counted(core: Callable[..., object]) -> None:
    """An unknown event is counted, a malformed one counted and a loss; the batches after them are applied."""
    store = stored(PATHS[0], 0, 4)
    payloads = [batch_of([store], 0, odd) for odd in (None, UNKNOWN, None, MALFORMED, None)]
    follower = Follower(new_index(core), 0)
    follower.in_a_run([*payloads, b"no batch", batch_of([store], 1), *payloads[:2]])
    stats = follower.source.stats
    assert (stats.batches, stats.events, stats.last_seq) == (9, 7, 8)
    assert (stats.unknown_events, stats.malformed_events) == (2, 1)
    assert (stats.malformed_batches, stats.foreign_batches) == (1, 1)
    assert follower.source.loss == "batch 5 could not be read: " + one(follower.index, b"no batch", 0)[1]


@pytest.mark.skipif(NATIVE is None, reason=NOT_BUILT)
def test_usual_batches_are_one_call_natively() -> None:
    """Once the profile is learnt a run goes through in one piece; a doubt makes it batch by batch, until it is over."""
    index = new_index(NATIVE)
    payloads = [batch_of([stored(path, 0, 8)], 0) for path in PATHS]
    assert index.ingest_run("w", payloads[:1], rank=0)[0] == 1
    assert index.ingest_run("w", payloads, 1, rank=0) == (4, Applied(3))
    foreign = batch_of([stored(PATHS[0], 0, 8)], 1)
    assert index.ingest_run("w", [*payloads[:2], foreign, payloads[3]], rank=0) == (2, Applied(2))
    assert index.ingest_run("w", payloads, 4, rank=0) == (4, Applied(0))
    index.doubt("w")
    assert index.ingest_run("w", payloads, 1, rank=0) == (1, Applied(0))
