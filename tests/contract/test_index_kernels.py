"""The index's core: the extension against its Python twin, call by call, and both against a naive model's answers."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvatlas._native import load_native_index
from kvatlas._native._pure_index import IndexCore
from kvatlas.errors import HashingError, IndexStateError
from kvatlas.hashing import BlockKeyHasher
from support.backends import NOT_BUILT

NATIVE = load_native_index()
needs_native = pytest.mark.skipif(NATIVE is None, reason=NOT_BUILT)
CORES = [
    pytest.param(IndexCore, id="pure"),
    pytest.param(NATIVE, id="native", marks=needs_native),
]
both = pytest.mark.parametrize("core_class", CORES)

SEED = 11
EVERYBODY = b"\xff" * 512
# Few of each, so that they meet; handles that share a table and a home as well as large ones.
HANDLES = st.sampled_from([0, 1, 2, 3, 5, 2**63, 2**64 - 1, *range(100, 130)])
KEYS = st.sampled_from([0, 1, 2**56, 2**56 + 1, 2**64 - 1, *range(1 << 24, 40 << 24, 1 << 24)])
RUNS = st.lists(st.tuples(HANDLES, KEYS), max_size=12)


def words(values) -> array:
    """64-bit words."""
    return array("Q", values)


class CoreMachine(RuleBasedStateMachine):
    """The same calls on both; after each, everything that can be asked is asked of both."""

    def __init__(self) -> None:
        super().__init__()
        self.pure = IndexCore(SEED)
        self.native = NATIVE(SEED)
        self.workers: list[int] = []
        self.planes = 1
        self.named = 0
        self.handles: set[int] = set()
        self.keys: list[int] = []

    def same(self, call):
        """What a call answers, the same on both."""
        answers = [call(core) for core in (self.pure, self.native)]
        assert answers[0] == answers[1]
        return answers[0]

    @initialize()
    def first_worker(self) -> None:
        self.add_worker(counting=True)

    @precondition(lambda self: len(self.workers) < 4)
    @rule(counting=st.booleans())
    def add_worker(self, *, counting: bool) -> None:
        self.named += 1
        name = f"w{self.named}"
        number = self.same(lambda core: core.add_worker(name, 5, counting=counting))
        self.workers.append(number)

    @precondition(lambda self: len(self.workers) > 1)
    @rule(which=st.integers(0, 3))
    def drop_worker(self, which: int) -> None:
        worker = self.workers.pop(which % len(self.workers))
        self.same(lambda core: core.drop_worker(worker))

    @precondition(lambda self: self.planes < 3)
    @rule()
    def add_plane(self) -> None:
        self.planes = self.same(lambda core: core.add_plane()) + 1

    @rule(which=st.integers(0, 3), plane=st.integers(0, 2), run=RUNS)
    def store(self, which: int, plane: int, run: list) -> None:
        """As a store event does: copies first, then keys."""
        self.add_copies(which, plane, [handle for handle, _ in run])
        self.join(which, run)

    @rule(which=st.integers(0, 3), plane=st.integers(0, 2), handles=st.lists(HANDLES, max_size=20))
    def add_copies(self, which: int, plane: int, handles: list[int]) -> None:
        worker, plane = self.workers[which % len(self.workers)], plane % self.planes
        self.handles.update(handles)
        self.same(lambda core: core.add_copies(worker, plane, words(handles)))

    @rule(which=st.integers(0, 3), run=RUNS)
    def join(self, which: int, run: list) -> None:
        worker = self.workers[which % len(self.workers)]
        numbers, keys = words([handle for handle, _ in run]), words([key for _, key in run])
        self.keys = [*keys, *self.keys][:16]
        self.same(lambda core: core.join(worker, numbers, keys))

    @rule(which=st.integers(0, 3), plane=st.integers(0, 2), handles=st.lists(HANDLES, max_size=20))
    def remove_copies(self, which: int, plane: int, handles: list[int]) -> None:
        worker, plane = self.workers[which % len(self.workers)], plane % self.planes
        self.same(lambda core: core.remove_copies(worker, plane, words(handles)))

    @rule(which=st.integers(0, 3), blocks=st.integers(1, 2000))
    def grow_old(self, which: int, blocks: int) -> None:
        """Stores elsewhere make every block older."""
        worker = self.workers[which % len(self.workers)]
        passing = words([200] * blocks)
        self.same(lambda core: core.add_copies(worker, 0, passing))
        self.same(lambda core: core.remove_copies(worker, 0, passing))

    @rule(which=st.integers(0, 3), keys=st.lists(KEYS, max_size=12), fresh=st.integers(-1, 13))
    def touch(self, which: int, keys: list[int], fresh: int) -> None:
        """A request used blocks: what the worker holds of them is young afterwards."""
        worker = self.workers[which % len(self.workers)]
        self.keys = [*keys, *self.keys][:16]
        held = self.pure.held(0, worker, words(keys)).count(2)
        assert self.same(lambda core: core.touch(worker, words(keys), fresh)) == held

    @rule(which=st.integers(0, 3), handle=HANDLES, stop=st.booleans())
    def wait(self, which: int, handle: int, *, stop: bool) -> None:
        worker = self.workers[which % len(self.workers)]
        self.handles.add(handle)
        self.same(lambda core: core.stop_waiting(worker, handle) if stop else core.wait(worker, handle))

    @rule(which=st.integers(0, 3), planes=st.sets(st.integers(0, 2)))
    def forget(self, which: int, planes: set[int]) -> None:
        worker = self.workers[which % len(self.workers)]
        known = sorted({plane % self.planes for plane in planes})
        self.same(lambda core: core.forget(worker, known))

    @rule(which=st.integers(0, 3))
    def forget_all(self, which: int) -> None:
        worker = self.workers[which % len(self.workers)]
        self.same(lambda core: core.forget_all(worker))

    @rule(which=st.integers(0, 3))
    def forget_everything_as_oldest(self, which: int) -> None:
        """Asked for as much as there is, both give up the same."""
        worker = self.workers[which % len(self.workers)]
        self.same(lambda core: core.forget_oldest(worker, 10_000))

    @rule(which=st.integers(0, 3))
    def doubt(self, which: int) -> None:
        worker = self.workers[which % len(self.workers)]
        self.same(lambda core: core.doubt(worker))

    @rule(which=st.integers(0, 3))
    def settle(self, which: int) -> None:
        """Nothing is in doubt afterwards."""
        worker = self.workers[which % len(self.workers)]
        self.same(lambda core: core.settle(worker))
        assert self.pure.counts(worker)[8] == 0

    @rule(which=st.integers(0, 3), keys=st.lists(KEYS, max_size=6), certain=st.booleans())
    def confirm(self, which: int, keys: list[int], *, certain: bool) -> None:
        """What the engine reported with certainty is held beyond doubt."""
        worker = self.workers[which % len(self.workers)]
        self.keys = [*keys, *self.keys][:16]
        self.same(lambda core: core.confirm(worker, words(keys), certain=certain))
        if certain:
            assert self.pure.held(0, worker, words(keys)) == b"\x02" * len(keys)

    @rule(which=st.integers(0, 3), keys=st.lists(KEYS, max_size=6))
    def refute(self, which: int, keys: list[int]) -> None:
        """Nothing of it is in doubt any more: it is held, or it is not."""
        worker = self.workers[which % len(self.workers)]
        self.same(lambda core: core.refute(worker, words(keys)))
        assert 1 not in self.pure.held(0, worker, words(keys))

    @rule(which=st.integers(0, 3), back=st.integers(0, 20))
    def expire_reported(self, which: int, back: int) -> None:
        worker = self.workers[which % len(self.workers)]
        stored = max(0, self.pure.counts(worker)[0] - back)
        self.same(lambda core: core.expire_reported(worker, stored))

    @invariant()
    def know_the_same(self) -> None:
        for worker in self.workers:
            self.same(lambda core, worker=worker: core.counts(worker))
            self.same(lambda core, worker=worker: core.entries(worker))
            self.same(lambda core, worker=worker: core.reported(worker))
            self.same(lambda core, worker=worker: core.shortfall(worker))
            self.same(lambda core, worker=worker: core.removal_ages(worker))
            self.same(lambda core, worker=worker: core.ages(worker, words(self.handles)))
            self.same(lambda core, worker=worker: sorted(core.resident_ages(worker, 100_000)))
            self.same(lambda core, worker=worker: core.use_counts(worker))
            self.same(lambda core, worker=worker: core.use_removals(worker))
            self.same(lambda core, worker=worker: sorted(core.use_ages(worker, 100_000)))
            for blocks in (-1, len(self.keys) // 2, 100):
                self.same(lambda core, worker=worker, n=blocks: core.chain_uses(worker, words(self.keys), n))
            for handle in self.handles:
                self.same(lambda core, worker=worker, handle=handle: core.key_of(worker, handle))
        self.same(lambda core: core.blocks)
        self.same(lambda core: core.ticks)

    @invariant()
    def find_the_same(self) -> None:
        keys = words(self.keys)
        for plane in range(self.planes):
            found = self.same(lambda core, plane=plane: core.find(plane, keys, EVERYBODY))
            with_doubts = self.same(lambda core, plane=plane: core.find(plane, keys, EVERYBODY, doubted=True))
            for worker in self.workers:
                row = self.same(lambda core, plane=plane, worker=worker: core.held(plane, worker, keys))
                held = next((i for i, held in enumerate(row) if held < 2), len(row))
                assert held == found.get(self.name_of(worker), 0)
                claimed = next((i for i, held in enumerate(row) if not held), len(row))
                assert claimed == with_doubts.get(self.name_of(worker), 0)

    @rule(which=st.integers(0, 3))
    def start_again(self, which: int) -> None:
        """A worker is dumped, dropped, and loaded into the other core: what it held and claimed is held again."""
        at = which % len(self.workers)
        worker, everything = self.workers[at], words(self.keys)
        counts = self.same(lambda core: core.counts(worker))
        reported = self.same(lambda core: core.reported(worker))
        removals = self.same(lambda core: (core.removal_ages(worker), core.use_removals(worker)))
        uses = self.same(lambda core: sorted(core.use_ages(worker, 100_000)))
        claims = [
            self.same(lambda core, plane=plane: core.held(plane, worker, everything)) for plane in range(self.planes)
        ]
        counting, name = self.pure._columns[worker].counting, self.name_of(worker)
        dumps = [core.dump(worker) for core in (self.native, self.pure)]
        self.same(lambda core: core.drop_worker(worker))
        worker = self.workers[at] = self.same(lambda core: core.add_worker(name, 5, counting=counting))
        for core, dump in zip((self.pure, self.native), dumps, strict=True):
            core.load(worker, dump, range(self.planes))
        assert self.same(lambda core: core.counts(worker)) == counts
        assert self.same(lambda core: core.reported(worker)) == reported
        assert self.same(lambda core: (core.removal_ages(worker), core.use_removals(worker))) == removals
        assert self.same(lambda core: sorted(core.use_ages(worker, 100_000))) == uses
        for plane, before in enumerate(claims):
            now = self.same(lambda core, plane=plane: core.held(plane, worker, everything))
            assert all(was <= claim for was, claim in zip(before, now, strict=True))

    def name_of(self, worker: int) -> str:
        return self.pure._columns[worker].name


if NATIVE is not None:
    TestCoreMachine = CoreMachine.TestCase
    TestCoreMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def filled(core_class, workers: int = 3):
    """A core with a chain of 40 blocks of which worker i holds the first 10 * (i + 1)."""
    core = core_class(SEED)
    hasher = BlockKeyHasher(SEED)
    token_ids = [token % 251 for token in range(160)]
    keys = words(hasher.chain(token_ids, 4))
    for i in range(workers):
        worker = core.add_worker(f"w{i}", hasher.root_key(), counting=True)
        count = 10 * (i + 1)
        core.add_copies(worker, 0, words(range(count)))
        assert core.join(worker, words(range(count)), keys[:count]) == []
    return core, token_ids, keys, hasher.root_key()


@both
def test_find_and_find_tokens_agree(core_class):
    """The fused walk answers what the walk over ready keys does, from every form of token ids, up to the limit."""
    core, token_ids, keys, root = filled(core_class)
    expected = {"w0": 10, "w1": 20, "w2": 30}
    assert core.find(0, keys, EVERYBODY) == expected
    for form in (token_ids, tuple(token_ids), array("i", token_ids), array("Q", token_ids)):
        assert core.find_tokens(0, form, 4, root, 100, EVERYBODY) == expected
    assert core.find_tokens(0, token_ids, 4, root, 15, EVERYBODY) == {"w0": 10, "w1": 15, "w2": 15}
    assert core.find_tokens(0, token_ids, 4, root, 0, EVERYBODY) == {}


@both
def test_only_those_asked_about_are_found(core_class):
    """A worker without its bit is left out, and a short row of bits asks about nobody else."""
    core, _, keys, _ = filled(core_class)
    assert core.find(0, keys, (0b101).to_bytes(8, "little")) == {"w0": 10, "w2": 30}
    assert core.find(0, keys, b"") == {}


@both
def test_workers_by_the_thousand(core_class):
    """4,096 workers have a bit each; one more is refused, and a dropped one's number is given out again."""
    core = core_class(SEED)
    for i in range(4096):
        core.add_worker(f"w{i}", 1, counting=True)
    with pytest.raises(IndexStateError, match="4096 workers"):
        core.add_worker("one more", 1, counting=True)
    for worker in (0, 63, 64, 2000, 4095):
        core.add_copies(worker, 0, words([7]))
        core.join(worker, words([7]), words([99]))
    assert core.find(0, words([99]), EVERYBODY) == {f"w{i}": 1 for i in (0, 63, 64, 2000, 4095)}
    core.drop_worker(64)
    assert core.add_worker("again", 1, counting=True) == 64
    assert core.find(0, words([99]), EVERYBODY) == {f"w{i}": 1 for i in (0, 63, 2000, 4095)}


@both
def test_many_copies(core_class):
    """Copies are counted one by one however many there are."""
    core = core_class(SEED)
    worker = core.add_worker("w", 1, counting=True)
    core.add_copies(worker, 0, words([7] * 100))
    core.join(worker, words([7]), words([99]))
    core.remove_copies(worker, 0, words([7] * 99))
    assert core.find(0, words([99]), EVERYBODY) == {"w": 1}
    core.remove_copies(worker, 0, words([7]))
    assert core.find(0, words([99]), EVERYBODY) == {}
    assert core.counts(worker)[:3] == (100, 100, 0)


@both
@given(handles=st.lists(st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=1, max_size=256), max_size=20))
def test_handle_numbers(core_class, handles):
    """Signed and unsigned forms of an integer are one number; bytes have numbers that both backends give them."""
    numbers = core_class(SEED).handle_numbers(handles)
    assert list(numbers) == list(IndexCore(SEED).handle_numbers(handles))
    for handle, number in zip(handles, numbers, strict=True):
        if isinstance(handle, int):
            assert number == handle % 2**64


@both
def test_bad_arguments(core_class):
    """Unknown workers and planes, and lists that do not fit, are refused by name; nothing changes."""
    core, token_ids, keys, root = filled(core_class)
    before = core.find(0, keys, EVERYBODY)
    for call in (
        lambda: core.add_copies(9, 0, words([1])),
        lambda: core.add_copies(-1, 0, words([1])),
        lambda: core.counts(4096),
        lambda: core.find(1, keys, EVERYBODY),
        lambda: core.find(-1, keys, EVERYBODY),
        lambda: core.forget(0, [0, 3]),
        lambda: core.join(0, words([1, 2]), words([3])),
    ):
        with pytest.raises(IndexStateError):
            call()
    for call in (
        lambda: core_class(2**64),
        lambda: core.add_worker("x", -1, counting=True),
        lambda: core.find_tokens(0, [1, -1, 2, 3], 2, root, 9, EVERYBODY),
        lambda: core.find_tokens(0, token_ids, 0, root, 9, EVERYBODY),
        lambda: core.find_tokens(0, token_ids, 4, 2**64, 9, EVERYBODY),
    ):
        with pytest.raises(HashingError):
            call()
    assert core.find(0, keys, EVERYBODY) == before


@both
def test_planes_end(core_class):
    """256 planes, and no more."""
    core = core_class(SEED)
    for number in range(1, 256):
        assert core.add_plane() == number
    with pytest.raises(IndexStateError, match="256 planes"):
        core.add_plane()


@needs_native
def test_a_cap_refuses_and_never_overclaims():
    """Under a hard cap memory stays below it, what did not fit is counted, and what is claimed was stored."""
    cap = 400_000
    core = NATIVE(SEED, cap)
    worker = core.add_worker("w", 1, counting=True)
    for first in range(0, 40_000, 100):
        numbers = words(range(first, first + 100))
        core.add_copies(worker, 0, numbers)
        core.join(worker, numbers, words(number * 2**40 for number in numbers))
        assert core.used_bytes <= cap
    stored, refused, resident = (core.counts(worker)[i] for i in (0, 4, 6))
    assert refused > 20_000
    assert stored == 40_000
    assert 1_000 < resident < 20_000
    core.remove_copies(worker, 0, words(range(40_000)))
    assert core.blocks == 0
    assert core.entries(worker) == 0


@both
def test_ages_at_removal(core_class):
    """A block's age begins anew with a find and ends in the histogram; a new life begins with an empty one."""
    core = core_class(SEED)
    worker = core.add_worker("w", 1, counting=False)
    core.add_copies(worker, 0, words([1, 2, 3]))
    core.join(worker, words([1, 2]), words([10, 20]))
    core.add_copies(worker, 0, words([3] * (64 * 5 - 3)))
    assert core.ticks == 320
    assert core.find(0, words([10]), EVERYBODY) == {"w": 1}
    assert core.ages(worker, words([1, 2, 3, 4])) == [0, 5, None, None]
    assert sorted(core.resident_ages(worker, 1000)) == [0, 5]
    assert core.resident_ages(worker, 0) == []
    core.remove_copies(worker, 0, words([1, 2, 3, 4]))
    assert core.removal_ages(worker) == (1, 0, 0, 1, *[0] * 28)
    core.forget_all(worker)
    assert core.removal_ages(worker) == (0,) * 32


@both
def test_sampled_ages_are_spread(core_class):
    """A sample takes old and new blocks alike, and no more than it is asked for."""
    core = core_class(SEED)
    worker = core.add_worker("w", 1, counting=True)
    for first in range(0, 20_000, 1000):
        numbers = words(range(first, first + 1000))
        core.add_copies(worker, 0, numbers)
        core.join(worker, numbers, words(number * 2**40 for number in numbers))
    ages = core.resident_ages(worker, 500)
    assert 100 <= len(ages) <= 500
    assert 0.4 < sum(age < 20_000 / 64 / 2 for age in ages) / len(ages) < 0.6


@both
def test_oldest_go_first(core_class):
    """What no prompt can match goes before what was asked for longest ago, and that before what was asked for lately."""
    core = core_class(SEED)
    worker = core.add_worker("w", 1, counting=True)
    keys = words(number * 2**40 for number in range(1, 3001))
    numbers = words(range(1, 3001))
    core.add_copies(worker, 0, numbers)
    core.join(worker, numbers[:2000], keys[:2000])
    core.find(0, keys[:1000], EVERYBODY)
    core.find(0, keys[:1000], EVERYBODY)
    assert core.forget_oldest(worker, 1000) == 1000
    assert core.counts(worker)[7] == 0
    gone = core.forget_oldest(worker, 1000)
    assert 900 <= gone <= 1000
    assert core.held(0, worker, keys[:1000]) == b"\x02" * 1000
    assert core.counts(worker)[5:7] == (1000 + gone, 2000 - gone)


@both
@pytest.mark.parametrize("certain", [True, False])
def test_an_event_takes_a_reported_claim_over(core_class, certain):
    """A block that was adopted from a report and then stored is claimed once: its removal leaves no claim behind."""
    core = core_class(SEED)
    worker, numbers, keys = core.add_worker("w", 5, counting=True), words([1]), words([77])
    core.confirm(worker, keys, certain=certain)
    core.add_copies(worker, 0, numbers)
    core.join(worker, numbers, keys)
    assert (core.held(0, worker, keys), core.reported(worker), core.blocks) == (b"\2", 0, 1)
    core.remove_copies(worker, 0, numbers)
    assert (core.held(0, worker, keys), core.blocks) == (b"\0", 0)


@both
def test_a_copy_elsewhere_leaves_a_reported_claim_alone(core_class):
    """A store in host memory says nothing of the device: the report's claim there stays, and can still end."""
    core = core_class(SEED)
    worker, numbers, keys = core.add_worker("w", 5, counting=True), words([1]), words([77])
    host = core.add_plane()
    core.confirm(worker, keys, certain=True)
    core.add_copies(worker, host, numbers)
    core.join(worker, numbers, keys)
    assert (core.held(0, worker, keys), core.reported(worker)) == (b"\2", 1)
    core.expire_reported(worker, 2**63)
    assert (core.held(0, worker, keys), core.held(host, worker, keys)) == (b"\0", b"\2")


@both
def test_times_of_use_are_bounded(core_class):
    """A worker of few blocks has at most 1,024 times: then the older half goes, and the newest stay."""
    core = core_class(SEED)
    worker = core.add_worker("w", 1, counting=True)
    keys = words((number << 32) | number * 2654435761 % 2**32 for number in range(1, 3001))
    core.add_copies(worker, 0, words(range(1, 3001)))
    core.join(worker, words(range(1, 3001)), keys)
    for key in keys[:1024]:
        core.touch(worker, words([key]), 0)
    assert core.use_counts(worker) == (4024, 1024)
    core.touch(worker, keys[1024:1025], 0)
    assert core.use_counts(worker)[1] == 513
    assert [position for position, _ in core.chain_uses(worker, keys, 3000)] == list(range(512, 1025))
    for key in keys[1025:]:
        core.touch(worker, words([key]), 0)
    assert core.use_counts(worker)[1] <= 1024
    assert core.chain_uses(worker, keys[2999:], 1) == [(0, 0)]
    core.remove_copies(worker, 0, words(range(1, 3001)))
    assert core.use_counts(worker)[1] == 0
