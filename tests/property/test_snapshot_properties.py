"""Dumps and snapshots under random content and random damage: the same answers, or a refusal, and nothing between."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas._native import load_native_index
from kvatlas._native._pure_index import IndexCore
from kvatlas._native.arguments import age_code, age_of_code
from kvatlas.clock import ManualClock
from kvatlas.errors import IndexStateError, KvAtlasError
from kvatlas.events import BlockStored, StreamPosition
from kvatlas.fleet import WarmStart
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import (
    PrefixIndex,
    SnapshotHead,
    WorkerSnapshot,
    WorkerState,
    read_snapshot,
    write_snapshot,
)
from support.backends import NOT_BUILT

NATIVE = load_native_index()
needs_native = pytest.mark.skipif(NATIVE is None, reason=NOT_BUILT)
BOTH_WAYS = [
    pytest.param(IndexCore, IndexCore, id="pure"),
    pytest.param(IndexCore, NATIVE, id="pure-to-native", marks=needs_native),
    pytest.param(NATIVE, IndexCore, id="native-to-pure", marks=needs_native),
    pytest.param(NATIVE, NATIVE, id="native", marks=needs_native),
]
EVERYBODY = b"\xff" * 512
PLANES = 3
RUN = st.tuples(st.integers(0, 60), st.integers(1, 20))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, PLANES - 1), RUN),
        st.tuples(st.just("remove"), st.integers(0, PLANES - 1), RUN),
        st.tuples(st.just("doubt"), st.just(0), RUN),
        st.tuples(st.just("confirm"), st.just(0), RUN),
        st.tuples(st.just("refute"), st.just(0), RUN),
        st.tuples(st.just("report"), st.just(0), RUN),
        st.tuples(st.just("touch"), st.just(0), RUN),
        st.tuples(st.just("grow old"), st.integers(1, 9), RUN),
    ),
    max_size=25,
)


def words(values) -> array:
    return array("Q", values)


def key_of(handle: int) -> int:
    """Every handle has a key of its own, those of the first 4 of each ten are never told."""
    return (handle + 1) * 0x9E3779B97F4A7C15 % 2**64


def driven(core_class, steps):
    """A core of three planes and one worker to which all this happened."""
    core = core_class(7)
    while core.add_plane() < PLANES - 1:
        pass
    worker = core.add_worker("w", 5, counting=True)
    for what, plane, (first, count) in steps:
        handles = words(range(first, first + count))
        keys = words(map(key_of, handles))
        if what == "store":
            core.add_copies(worker, plane, handles)
            told = words(handle for handle in handles if handle % 10 >= 4)
            core.join(worker, told, words(map(key_of, told)))
        elif what == "remove":
            core.remove_copies(worker, plane, handles)
        elif what == "doubt":
            core.doubt(worker)
        elif what == "refute":
            core.refute(worker, keys)
        elif what == "touch":
            core.touch(worker, keys, count // 3)
        elif what == "grow old":
            core.add_copies(worker, 1, words([80] * (64 * plane)))
        else:
            core.confirm(worker, words(key + (what == "report") for key in keys), certain=count % 2 == 0)
    return core, worker


def answers(core, worker):
    """All that can be asked."""
    keys = words([key_of(handle) for handle in range(81)] + [key_of(handle) + 1 for handle in range(81)])
    return (
        core.counts(worker),
        core.reported(worker),
        core.blocks,
        [core.key_of(worker, handle) for handle in range(81)],
        [core.held(plane, worker, keys) for plane in range(PLANES)],
        core.removal_ages(worker),
        core.use_removals(worker),
        core.chain_uses(worker, keys, len(keys)),
    )


def age_codes(core, worker):
    """The blocks' ages, as exact as a dump tells them."""
    return [None if age is None else age_code(age) for age in core.ages(worker, words(range(81)))]


@pytest.mark.parametrize(("from_class", "to_class"), BOTH_WAYS)
@given(steps=STEPS, more=STEPS)
@settings(max_examples=60, deadline=None)
def test_a_loaded_column_answers_and_goes_on_as_the_dumped_one(from_class, to_class, steps, more) -> None:
    """What is loaded equals what was dumped, in the same backend and the other, and stays equal through later events."""
    core, worker = driven(from_class, steps)
    other, there = driven(to_class, [])
    other.load(there, core.dump(worker), range(PLANES))
    assert answers(other, there) == answers(core, worker)
    assert age_codes(other, there) == age_codes(core, worker)
    assert len(other.dump(there)) == len(core.dump(worker))
    for one, number in ((core, worker), (other, there)):
        for what, plane, (first, count) in more:
            handles = words(range(first, first + count))
            if what == "store":
                one.add_copies(number, plane, handles)
            elif what == "remove":
                one.remove_copies(number, plane, handles)
            elif what == "doubt":
                one.settle(number)
            elif what in {"touch", "grow old"}:
                one.touch(number, words(map(key_of, handles)), 0)
            else:
                one.expire_reported(number, one.counts(number)[0])
    assert answers(other, there) == answers(core, worker)


@given(age=st.integers(0, 2**32 - 1))
def test_codes_of_ages(age: int) -> None:
    """A code tells an age to an eighth of it from below, and codes rise with ages."""
    least, beyond = age_of_code(age_code(age)), age_of_code(age_code(age) + 1)
    assert least <= age < beyond
    assert age < 16 or beyond - least <= least / 8
    assert age_code(least) == age_code(age)


DAMAGE = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4)


def damaged(data: bytes, damage, length: int) -> bytes:
    """Bytes changed at random among the first `length`."""
    changed = bytearray(data)
    for at, change in damage:
        changed[int(at * length)] ^= change
    return bytes(changed)


@given(steps=STEPS, damage=DAMAGE, head_only=st.booleans(), cut=st.integers(0, 200))
@settings(max_examples=200, deadline=None)
def test_a_damaged_dump_is_refused_whole_and_alike_by_both(steps, damage, head_only, cut) -> None:
    """Random damage to a dump: both backends say the same; what is refused leaves nothing behind."""
    core, worker = driven(IndexCore, steps)
    data = core.dump(worker)
    data = damaged(data, damage, 72 if head_only else len(data))[: len(data) - cut if cut < 50 else None]
    verdicts = []
    for core_class in (IndexCore, NATIVE or IndexCore):
        other, there = driven(core_class, [])
        empty = answers(other, there)
        try:
            other.load(there, data, range(PLANES))
        except IndexStateError as error:
            verdicts.append(error.message)
            assert answers(other, there) == empty
        else:
            verdicts.append(answers(other, there))
            other.forget_all(there)
            assert other.blocks == 0
    assert verdicts[0] == verdicts[1]


def snapshot_bytes() -> bytes:
    """A snapshot of two workers."""
    index = PrefixIndex(BlockKeyHasher(3))
    workers = []
    for name in ("a:1", "b:2"):
        index.add_worker(name)
        index.apply(name, BlockStored([1, 2, 3], None, list(range(12)), 4, medium="GPU"))
        state = WorkerState(
            name, f"http://{name}", None, "count", index.dump_state(name), index.planes, StreamPosition(4, 5, 6.0)
        )
        workers.append(WorkerSnapshot(state, index.dump_blocks(name)))
    return b"".join(write_snapshot(SnapshotHead(3, 1.0, "test"), workers))


SNAPSHOT = snapshot_bytes()


@given(damage=DAMAGE)
@settings(max_examples=400, deadline=None)
def test_a_damaged_snapshot_is_refused(damage) -> None:
    """Any changed byte is noticed before anything is used, with a kvatlas error."""
    data = damaged(SNAPSHOT, damage, len(SNAPSHOT))
    if data != SNAPSHOT:
        with pytest.raises(KvAtlasError):
            WarmStart(read_snapshot(data, "it"), "it", ManualClock(), seed=3)


@given(length=st.integers(0, len(SNAPSHOT) - 1))
@settings(max_examples=200, deadline=None)
def test_a_truncated_snapshot_is_refused(length) -> None:
    """Wherever it ends too early, it is refused."""
    with pytest.raises(IndexStateError):
        read_snapshot(SNAPSHOT[:length], "it")
