"""The form of a snapshot: what comes back, and how each kind of foreign or damaged file is refused."""

import pytest

from kvatlas.errors import IndexStateError
from kvatlas.events import BlockRemoved, BlockStored, StreamPosition
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import (
    SNAPSHOT_VERSION,
    ColumnState,
    CopyMode,
    IdlePart,
    PrefixIndex,
    SnapshotHead,
    WorkerSnapshot,
    WorkerState,
    read_snapshot,
    write_snapshot,
)

TOKENS = list(range(16))


def filled_index() -> PrefixIndex:
    """Two workers; the first has copies on the device and in host memory, and a run that waits for its parent."""
    index = PrefixIndex(BlockKeyHasher(9))
    for name in ("a", "b"):
        index.add_worker(name, copy_mode=CopyMode.COUNT)
        index.apply(name, BlockStored([1, 2, 3, 4], None, TOKENS, 4, medium="GPU"))
    index.apply("a", BlockStored([1, 2], None, TOKENS[:8], 4, medium="CPU"))
    index.apply("a", BlockStored([8, 9], 7, TOKENS[:8], 4, medium="GPU"))
    index.apply("a", BlockStored([1], None, TOKENS[:4], 4, medium="GPU"))
    return index


def parts(index: PrefixIndex) -> list[bytes]:
    """The snapshot of an index as it is written, piece by piece."""
    workers = [
        WorkerSnapshot(
            WorkerState(
                name,
                f"http://{name}",
                None,
                "count",
                index.dump_state(name),
                index.planes,
                StreamPosition(3, 77, 1.5),
                engine_started_s=8.0,
                loss="lost",
                trust="partial",
                trust_reason="because",
            ),
            index.dump_blocks(name),
        )
        for name in index.worker_ids
    ]
    return list(write_snapshot(SnapshotHead(9, 5.0, "test"), workers))


def restored(data: bytes) -> PrefixIndex:
    """A new index with all that a snapshot says."""
    snapshot = read_snapshot(data, "it")
    index = PrefixIndex(BlockKeyHasher(snapshot.head.seed))
    for worker in snapshot.workers:
        index.add_worker(worker.state.worker_id)
        index.restore(worker.state.worker_id, worker.state.column, worker.blocks, worker.state.planes)
    return index


class TestRoundTrip:
    def test_all_of_a_worker_comes_back(self) -> None:
        """Position, trust, the engine's start and the loss are read as they were written."""
        snapshot = read_snapshot(b"".join(parts(filled_index())), "it")
        assert snapshot.head == SnapshotHead(9, 5.0, "test")
        state = snapshot.workers[0].state
        assert (state.worker_id, state.position, state.engine_started_s) == ("a", StreamPosition(3, 77, 1.5), 8.0)
        assert (state.loss, state.trust, state.trust_reason) == ("lost", "partial", "because")
        assert state.planes == (("GPU", 0), ("CPU", 0))
        assert [worker.block_count for worker in snapshot.workers] == [6, 4]

    def test_an_index_answers_as_before(self) -> None:
        """Matches, tiers, exactness and counters are the same; runs that waited count as dropped."""
        before = filled_index()
        after = restored(b"".join(parts(before)))
        prompt = [*TOKENS, 99]
        assert after.match(prompt) == before.match(prompt)
        assert after.block_size("a") == 4
        a, b = before.stats("a"), after.stats("a")
        assert (b.resident_now, b.unkeyed_now, b.stored_blocks) == (a.resident_now, a.unkeyed_now, a.stored_blocks)
        assert (a.orphans_now, b.orphans_now, b.dropped_orphan_blocks) == (2, 0, 2)
        assert after.is_complete("b")

    def test_copies_count_on(self) -> None:
        """A block stored twice before is still there after one removal, and gone after two, in each medium by itself."""
        after = restored(b"".join(parts(filled_index())))
        after.apply("a", BlockRemoved([1], medium="GPU"))
        assert after.claims("a", [*TOKENS, 99])[:1] == b"\2"
        after.apply("a", BlockRemoved([1], medium="GPU"))
        assert after.claims("a", [*TOKENS, 99])[:1] == b"\0"
        after.apply("a", BlockRemoved([1], medium="CPU"))
        assert after.stats("a").unknown_removals == 0

    def test_planes_may_have_other_numbers(self) -> None:
        """An index that met other media first takes a dump whose planes are numbered otherwise."""
        before = filled_index()
        index = PrefixIndex(BlockKeyHasher(9))
        index.add_worker("x")
        index.apply("x", BlockStored([1], None, TOKENS[:4], 4, medium="DISK"))
        index.add_worker("a")
        index.restore("a", before.dump_state("a"), before.dump_blocks("a"), before.planes)
        assert index.planes == (("GPU", 0), ("DISK", 0), ("CPU", 0))
        assert index.match([*TOKENS, 99])["a"] == before.match([*TOKENS, 99])["a"]

    def test_blocks_take_18_bytes(self) -> None:
        """Each block on the device costs 18 bytes, and a column 1,168 once: 80 of counts, 1,088 of ages at removal."""
        assert len(filled_index().dump_blocks("b")) == 80 + 4 * (32 + 240) + 4 * 18

    def test_ages_come_along(self) -> None:
        """What was longest without use goes first after a restart, too, and removals and uses are as they were."""
        before = PrefixIndex(BlockKeyHasher(9))
        before.add_worker("a")
        old, young = list(range(400)), list(range(1000, 1400))
        for first, tokens in ((1, old), (1001, young)):
            before.apply("a", BlockStored(list(range(first, first + 100)), None, tokens, 4, medium="GPU"))
            before.apply("a", BlockStored([5000] * 6400, None, [7, 7, 7, 7] * 6400, 4, medium="GPU"))
        before.uses.touch("a", [*young, 0], fresh_blocks=20)
        before.apply("a", BlockRemoved([100, 1100], medium="GPU"))
        index = PrefixIndex(BlockKeyHasher(9))
        index.add_worker("a")
        index.restore("a", before.dump_state("a"), before.dump_blocks("a"), before.planes)
        assert index.recency("a").ages([1, 1001]) == [192, 1]  # 203 before; told to an eighth of a power of two
        assert before.recency("a").ages([1, 1001]) == [203, 1]
        assert index.recency("a").counts(0).removal_ages == before.recency("a").counts(0).removal_ages
        assert sum(index.recency("a").counts(0).removal_ages) == 2
        assert index.uses.counts("a", 9).removals == before.uses.counts("a", 9).removals == {36: 1}  # of 99
        assert index.uses.idle_parts([*young, 0], {"a": 99}) == before.uses.idle_parts([*young, 0], {"a": 99})
        assert index.uses.idle_parts([*young, 0], {"a": 99})["a"] == (IdlePart(20, 0), IdlePart(79, 20))


class TestRefusals:
    @pytest.mark.parametrize("data", [b"", b"KVATLAS", b"\x89PNG\r\n\x1a\n" + bytes(100)])
    def test_foreign_files(self, data: bytes) -> None:
        """What does not begin as a snapshot is said to be none."""
        with pytest.raises(IndexStateError, match="it is no snapshot of a kvatlas index"):
            read_snapshot(data, "it")

    def test_newer_version(self) -> None:
        """A version this release does not know is named, with what to do."""
        data = bytearray(b"".join(parts(filled_index())))
        data[8] = SNAPSHOT_VERSION + 1
        with pytest.raises(IndexStateError, match=r"version 3, and this release reads version 2: use the release"):
            read_snapshot(bytes(data), "it")

    def test_older_version(self) -> None:
        """The form without ages, which no release wrote, is refused as well."""
        data = bytearray(b"".join(parts(filled_index())))
        data[8] = 1
        with pytest.raises(IndexStateError, match=r"version 1, and this release reads version 2: .* remove it"):
            read_snapshot(bytes(data), "it")

    def test_missing_end(self) -> None:
        """A snapshot whose writer died is not mistaken for one of fewer workers."""
        with pytest.raises(IndexStateError, match="before its end was reached"):
            read_snapshot(b"".join(parts(filled_index())[:-1]), "it")

    def test_exchanged_sections(self) -> None:
        """Two workers' blocks change places: every byte is right, and the order is not."""
        pieces = parts(filled_index())
        pieces[2], pieces[4] = pieces[4], pieces[2]
        with pytest.raises(IndexStateError, match="the checksum of section 2 is wrong"):
            read_snapshot(b"".join(pieces), "it")

    def test_bytes_after_the_end(self) -> None:
        """What follows the end is damage."""
        with pytest.raises(IndexStateError, match="1 bytes follow its end"):
            read_snapshot(b"".join(parts(filled_index())) + b"\0", "it")

    def test_a_worker_twice(self) -> None:
        """Two parts for one worker contradict each other."""
        index = filled_index()
        state = WorkerState("a", "http://a", None, "count", index.dump_state("a"), index.planes)
        worker = WorkerSnapshot(state, index.dump_blocks("a"))
        with pytest.raises(IndexStateError, match="a worker comes twice"):
            read_snapshot(b"".join(write_snapshot(SnapshotHead(9, 5.0, "test"), [worker, worker])), "it")

    def test_impossible_position(self) -> None:
        """A batch number below 0 is damage."""
        index = filled_index()
        state = WorkerState("a", "http://a", None, "count", ColumnState(), index.planes, StreamPosition(-1, 5))
        with pytest.raises(IndexStateError, match="position is out of range"):
            read_snapshot(b"".join(write_snapshot(SnapshotHead(9, 5.0, "t"), [WorkerSnapshot(state, b"")])), "it")


class TestRestore:
    def test_another_seed_or_namespace(self) -> None:
        """Blocks keyed under another root mean nothing here."""
        before, index = filled_index(), PrefixIndex(BlockKeyHasher(10))
        index.add_worker("a")
        with pytest.raises(IndexStateError, match="another seed or model namespace"):
            index.restore("a", before.dump_state("a"), before.dump_blocks("a"), before.planes)
        assert index.stats("a").resident_now == 0

    def test_a_column_with_blocks_takes_nothing(self) -> None:
        """What a worker's events said already is not mixed with a snapshot."""
        before = filled_index()
        with pytest.raises(IndexStateError, match="already holds blocks"):
            before.restore("a", before.dump_state("b"), before.dump_blocks("b"), before.planes)

    @pytest.mark.parametrize("planes", [(), (("CPU", 0),), (("GPU", 0), ("GPU", 0))])
    def test_planes_must_be_named(self, planes: tuple) -> None:
        """The device's first group comes first, and no plane twice."""
        before, index = filled_index(), PrefixIndex(BlockKeyHasher(9))
        index.add_worker("a")
        with pytest.raises(IndexStateError, match="planes of a dump"):
            index.restore("a", before.dump_state("a"), before.dump_blocks("a"), planes)

    def test_missing_planes(self) -> None:
        """Copies in a plane that nobody named are not guessed."""
        before, index = filled_index(), PrefixIndex(BlockKeyHasher(9))
        index.add_worker("a")
        with pytest.raises(IndexStateError, match="names a plane"):
            index.restore("a", before.dump_state("a"), before.dump_blocks("a"), before.planes[:1])
