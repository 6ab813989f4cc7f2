"""A snapshot's word for a worker, held against what the engine then says: kept, completed, doubted or forgotten."""

from dataclasses import dataclass, replace

import msgspec
import pytest

from kvatlas.clock import ManualClock
from kvatlas.config import WorkerConfig
from kvatlas.errors import IndexStateError
from kvatlas.events import (
    Apply,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Lost,
    NewLife,
    SequenceTracker,
    StreamPosition,
    encode_batch,
)
from kvatlas.fleet import EventSource, Trust, TrustState, WarmStart
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import (
    CopyMode,
    PrefixIndex,
    Snapshot,
    SnapshotHead,
    WorkerSnapshot,
    WorkerState,
    read_snapshot,
    write_snapshot,
)

ID = "10.0.0.1:8000"
CONFIG = WorkerConfig(url=f"http://{ID}")
SEED = 5


def stored(number: int, ts: float) -> bytes:
    """A batch that stores one block of four tokens `number`."""
    event = BlockStored([number], None, [number] * 4, 4, medium="GPU")
    return encode_batch(EventBatch(ts, [event], 0))


def removed(number: int, ts: float) -> bytes:
    return encode_batch(EventBatch(ts, [BlockRemoved([number], medium="GPU")], 0))


@dataclass
class Router:
    """One worker's column, source and tracker, as a follower ties them together."""

    index: PrefixIndex
    source: EventSource
    tracker: SequenceTracker

    def carry_out(self, steps) -> None:
        for step in steps:
            if isinstance(step, Apply):
                self.source.on_batch(step.seq, step.payload)
            elif isinstance(step, Lost):
                self.source.on_gap(step.first_seq, step.last_seq)
            elif isinstance(step, NewLife):
                self.source.on_life(step.reason)

    def meet(self, batches: dict[int, bytes], *, can_replay: bool = True) -> None:
        """Connect to a publisher that has these batches, and be told all."""
        self.source.on_status("connecting", "-")
        self.source.on_status("syncing", "-")
        self.carry_out(self.tracker.connected())
        while can_replay and (token := self.tracker.replay_token) is not None:
            for seq in sorted(seq for seq in batches if seq >= max(self.tracker.last_seq, 0)):
                self.carry_out(self.tracker.replayed(token, seq, batches[seq]))
                if token != self.tracker.replay_token:
                    break
            self.carry_out(self.tracker.replay_ended(token, complete=True))
        if self.tracker.is_live:
            self.source.on_status("live", "-")

    def claims(self, number: int) -> tuple[int, int]:
        """Tokens of block `number` held, and held in doubt."""
        match = self.index.match([number] * 4 + [99], worker_ids=[ID]).get(ID)
        return (match.hit_tokens, match.doubted_tokens) if match else (0, 0)

    def snapshot(self) -> Snapshot:
        """What a router would write now, read again."""
        index, source = self.index, self.source
        state = WorkerState(
            ID,
            CONFIG.url,
            None,
            "count",
            index.dump_state(ID),
            index.planes,
            source.position,
            loss=source.loss,
            trust=source.trust.level,
        )
        worker = WorkerSnapshot(state, index.dump_blocks(ID))
        return read_snapshot(b"".join(write_snapshot(SnapshotHead(index.seed, 1e9, "test"), [worker])), "it")


def router(
    snapshot: Snapshot | None = None, *, can_replay: bool = True, copy_mode: CopyMode = CopyMode.COUNT
) -> Router:
    """A router at its start, from a snapshot or from nothing."""
    clock = ManualClock(wall_s=1e9 + 7)
    index = PrefixIndex(BlockKeyHasher(SEED))
    index.add_worker(ID, copy_mode=copy_mode)
    source = EventSource(ID, index, TrustState(), clock)
    position = None
    if snapshot is not None:
        past = WarmStart(snapshot, "it", clock).take(CONFIG)
        assert past is not None
        position = past.restore(source, index, can_replay=can_replay)
    return Router(index, source, SequenceTracker(can_replay=can_replay, resume_at=position))


LIFE = {seq: stored(seq + 1, 100.0 + seq) for seq in range(5)}


@pytest.fixture(name="before")
def _before() -> Router:
    """A router that knows blocks 1..5 of a whole life."""
    before = router()
    before.meet(LIFE)
    assert before.source.trust.level is Trust.SYNCED
    return before


class TestWithReplay:
    def test_nothing_happened(self, before: Router) -> None:
        """The engine's last batch is ours: the column is as it was, and trusted as it was."""
        after = router(before.snapshot())
        assert after.source.trust.level is Trust.SYNCING
        assert "7 s old" in after.source.trust.reason
        after.meet(LIFE)
        assert after.source.trust.level is Trust.SYNCED
        assert [after.claims(number) for number in range(1, 7)] == [(4, 0)] * 5 + [(0, 0)]
        assert after.index.is_complete(ID)

    def test_the_difference_is_applied(self, before: Router) -> None:
        """What was stored and removed meanwhile is replayed, and nothing else is needed: the ring holds just that."""
        later = {4: LIFE[4], 5: stored(6, 105.0), 6: removed(1, 106.0)}
        after = router(before.snapshot())
        after.meet(later)
        assert after.source.trust.level is Trust.SYNCED
        assert [after.claims(number) for number in range(1, 7)] == [(0, 0)] + [(4, 0)] * 5

    def test_the_ring_has_moved_on(self, before: Router) -> None:
        """Batches between are gone: what the snapshot said is doubted, what came since is certain."""
        after = router(before.snapshot())
        after.meet({9: stored(6, 109.0)})
        assert after.source.trust.level is Trust.PARTIAL
        assert "5..8" in after.source.trust.reason
        assert [after.claims(number) for number in (1, 5, 6)] == [(0, 4), (0, 4), (4, 0)]

    def test_another_life_with_the_same_numbers(self, before: Router) -> None:
        """The engine was restarted and has come as far: nothing of the snapshot is claimed."""
        after = router(before.snapshot())
        after.meet({seq: stored(seq + 11, 200.0 + seq) for seq in range(7)})
        assert after.source.trust.level is Trust.SYNCED
        assert [after.claims(number) for number in (1, 5, 11, 17)] == [(0, 0), (0, 0), (4, 0), (4, 0)]

    def test_another_life_that_has_not_come_so_far(self, before: Router) -> None:
        """The restarted engine does not have our last batch: nothing of the snapshot is claimed."""
        after = router(before.snapshot())
        after.meet({0: stored(11, 200.0)})
        assert [after.claims(number) for number in (1, 5, 11)] == [(0, 0), (0, 0), (4, 0)]
        assert after.source.trust.level is Trust.SYNCED

    def test_a_partial_worker_stays_partial(self, before: Router) -> None:
        """Doubts and their reason come back with the worker, and end as they would have."""
        before.carry_out([Lost(5, 7), Apply(8, stored(6, 108.0))])
        after = router(before.snapshot())
        after.meet({8: stored(6, 108.0)})
        assert after.source.trust.level is Trust.PARTIAL
        assert after.source.loss == before.source.loss
        assert [after.claims(number) for number in (1, 6)] == [(0, 4), (4, 0)]
        for number in range(100, 116):
            after.carry_out([Apply(number, stored(number, 200.0 + number))])
        assert after.source.trust.level is Trust.SYNCED
        assert after.claims(1) == (0, 0)

    def test_a_loss_was_the_last_thing(self, before: Router) -> None:
        """No batch after the loss: no bytes can prove the life, so the stream is read from its beginning, in doubt."""
        before.carry_out([Lost(5, 7)])
        snapshot = before.snapshot()
        assert snapshot.workers[0].state.position is None
        after = router(snapshot)
        assert after.claims(1) == (0, 4)
        after.meet({3: LIFE[3], 4: LIFE[4], 8: stored(6, 108.0)})
        assert after.source.trust.level is Trust.PARTIAL
        assert [after.claims(number) for number in (1, 4, 6)] == [(0, 4), (0, 4), (4, 0)]

    def test_a_snapshot_of_a_restored_router(self, before: Router) -> None:
        """Stopped again before the engine was met: the second snapshot says what the first did."""
        first = before.snapshot()
        second = router(first).snapshot()
        assert second.workers[0].blocks == first.workers[0].blocks
        assert second.workers[0].state.position == first.workers[0].state.position


class TestWithoutReplay:
    def test_all_is_doubted(self, before: Router) -> None:
        """Nobody can prove the life: every claim is in doubt, before the first batch and after it."""
        after = router(before.snapshot(), can_replay=False)
        assert after.claims(1) == (0, 4)
        after.meet({}, can_replay=False)
        after.carry_out(after.tracker.live(5, stored(6, 105.0)))
        after.source.on_status("live", "-")
        assert after.source.trust.level is Trust.PARTIAL
        assert [after.claims(number) for number in (1, 6)] == [(0, 4), (4, 0)]

    def test_a_restart_is_seen_in_the_numbers(self, before: Router) -> None:
        """Batch 0 after batch 4 is another life: the snapshot is forgotten."""
        after = router(before.snapshot(), can_replay=False)
        after.meet({}, can_replay=False)
        after.carry_out(after.tracker.live(0, stored(11, 200.0)))
        assert [after.claims(number) for number in (1, 11)] == [(0, 0), (4, 0)]


class TestRefusals:
    def test_another_seed(self, before: Router) -> None:
        """A configured seed that is not the snapshot's: its keys would match nothing, so it is refused."""
        with pytest.raises(IndexStateError, match="another seed"):
            WarmStart(before.snapshot(), "it", ManualClock(), seed=SEED + 1)
        assert WarmStart(before.snapshot(), "it", ManualClock(), seed=SEED).seed == SEED

    def test_damaged_blocks_refuse_the_whole_snapshot(self, before: Router) -> None:
        """One worker's blocks are no dump: no worker starts from that snapshot."""
        snapshot = before.snapshot()
        damaged = replace(snapshot.workers[0], blocks=snapshot.workers[0].blocks[:-1])
        with pytest.raises(IndexStateError, match="truncated"):
            WarmStart(replace(snapshot, workers=(damaged,)), "it", ManualClock())

    def test_unknown_copy_mode(self, before: Router) -> None:
        """A copy mode of no known name is damage."""
        worker = before.snapshot().workers[0]
        state = msgspec.structs.replace(worker.state, copy_mode="?")
        with pytest.raises(IndexStateError, match="copy_mode"):
            WarmStart(replace(before.snapshot(), workers=(replace(worker, state=state),)), "it", ManualClock())

    def test_changed_copy_mode_starts_that_worker_cold(self, before: Router) -> None:
        """The worker is configured otherwise by now: its part is not used, and the stream is read from 0."""
        after = router(before.snapshot(), copy_mode=CopyMode.SET)
        assert after.claims(1) == (0, 0)
        assert not after.source.has_past
        after.meet(LIFE)
        assert after.source.trust.level is Trust.SYNCED

    def test_each_part_is_taken_once_and_not_for_ever(self, before: Router) -> None:
        """A worker's past goes to the first that asks, and to nobody 15 minutes after the start."""
        clock = ManualClock()
        warm = WarmStart(before.snapshot(), "it", clock)
        assert warm.take(CONFIG) is not None
        assert warm.take(CONFIG) is None
        late = WarmStart(before.snapshot(), "it", clock)
        assert len(late.waiting) == 1
        clock.advance(901)
        assert late.waiting == ()
        assert late.take(CONFIG) is None


def test_the_position_is_the_last_batch_applied(before: Router) -> None:
    """Its number, its digest and its time stamp; a gap of unknown length leaves it, a known one takes it away."""
    assert before.source.position == StreamPosition.at(4, LIFE[4])
    before.source.on_gap(5, None)
    assert before.source.position == StreamPosition.at(4, LIFE[4])
    before.source.on_gap(5, 6)
    assert before.source.position is None
