"""From a stream into a column, and the trust this earns."""

import pytest

from kvatlas.clock import ManualClock
from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, encode_batch
from kvatlas.fleet import EventSource, Trust, TrustState
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex

TOKENS = list(range(16))


def batch(*events: object) -> bytes:
    return encode_batch(EventBatch(ts=1.0, events=list(events), data_parallel_rank=0))


def stored(*hashes: int, parent: int | None = None) -> BlockStored:
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=parent,
        token_ids=TOKENS[: 4 * len(hashes)],
        block_size=4,
        medium="GPU",
    )


@pytest.fixture(name="index")
def _index() -> PrefixIndex:
    index = PrefixIndex(BlockKeyHasher(seed=1))
    index.add_worker("w", block_size=4)
    return index


@pytest.fixture(name="source")
def _source(index: PrefixIndex) -> EventSource:
    return EventSource("w", index, TrustState(), ManualClock())


def hit(index: PrefixIndex) -> int:
    return index.match([*TOKENS, 99])["w"].hit_tokens


def claimed(index: PrefixIndex) -> int:
    """The same with what is in doubt."""
    match = index.match([*TOKENS, 99])["w"]
    return match.hit_tokens + match.doubted_tokens


class TestTrust:
    def test_whole_stream_is_synced(self, source: EventSource, index: PrefixIndex) -> None:
        """A life seen from its first batch earns full trust once it is live, not before."""
        source.on_status("syncing", "first contact")
        source.on_batch(0, batch(stored(1, 2)))
        assert source.trust.level is Trust.SYNCING
        assert source.trust.level.credit(8, 8) == 0.0
        source.on_status("live", "caught up")
        assert source.trust.level is Trust.SYNCED
        assert source.trust.level.credit(8, 8) == 12.0
        assert hit(index) == 8

    def test_gap_makes_partial_with_a_reason(self, source: EventSource) -> None:
        """A loss replay cannot mend is named in the reason and halves the credit."""
        source.on_status("syncing", "first contact")
        source.on_status("live", "caught up")
        source.on_gap(3, 5)
        assert source.trust.level is Trust.PARTIAL
        assert "3..5" in source.trust.reason
        assert source.trust.level.credit(0, 8) == 4.0

    def test_gap_while_syncing_is_remembered(self, source: EventSource) -> None:
        """Going live after a loss is going partial."""
        source.on_status("syncing", "joined late")
        source.on_gap(0, 9)
        source.on_status("live", "caught up")
        assert source.trust.level is Trust.PARTIAL

    def test_clear_heals(self, source: EventSource) -> None:
        """AllBlocksCleared makes the whole state known again."""
        source.on_status("syncing", "joined late")
        source.on_gap(0, 9)
        source.on_status("live", "caught up")
        source.on_batch(10, batch(AllBlocksCleared()))
        assert source.trust.level is Trust.SYNCED

    def test_new_life_forgets_the_old(self, source: EventSource, index: PrefixIndex) -> None:
        """Nothing learnt from one publisher life is believed in the next."""
        source.on_status("syncing", "first contact")
        source.on_batch(0, batch(stored(1)))
        source.on_gap(1, 2)
        source.on_life("sequence went back")
        assert hit(index) == 0
        assert source.stats.lives == 2
        source.on_status("live", "caught up")
        assert source.trust.level is Trust.SYNCED

    @pytest.mark.parametrize(("lives", "expected"), [(0, Trust.NONE), (1, Trust.STALE)])
    def test_connecting_is_none_before_the_first_life_and_stale_after(
        self, source: EventSource, lives: int, expected: Trust
    ) -> None:
        """An endpoint never reached teaches nothing; one that was is stale."""
        for _ in range(lives):
            source.on_status("syncing", "contact")
        source.on_status("connecting", "tcp://x:1 does not answer")
        assert source.trust.level is expected
        assert "tcp://x:1" in source.trust.reason

    def test_lost_connection_is_stale(self, source: EventSource) -> None:
        """A stream that is gone gets no credit."""
        source.on_status("syncing", "first contact")
        source.on_status("live", "caught up")
        source.on_status("lost", "connection closed")
        assert source.trust.level is Trust.STALE
        assert source.trust.level.credit(8, 8) == 0.0


class TestFaults:
    def test_malformed_batch_is_a_loss(self, source: EventSource, index: PrefixIndex) -> None:
        """A batch that cannot be read may have held removals; what came before stays, at partial trust."""
        source.on_status("syncing", "first contact")
        source.on_status("live", "caught up")
        source.on_batch(0, batch(stored(1)))
        source.on_batch(1, b"\xc1nonsense")
        assert source.stats.malformed_batches == 1
        assert source.trust.level is Trust.PARTIAL
        assert claimed(index) == 4

    def test_malformed_event_loses_only_itself(self, source: EventSource, index: PrefixIndex) -> None:
        """The good events around a bad one are applied, the bad one is counted and costs trust."""
        good, after = batch(stored(1)), batch(stored(2, parent=1))
        # spliced by hand: [ts, [good, bad, good], rank]
        payload = b"\x93" + good[1:10] + b"\x93" + good[11:-1] + b"\x81\xa4type\xabBlockStored" + after[11:-1] + b"\x00"
        source.on_status("syncing", "first contact")
        source.on_status("live", "caught up")
        source.on_batch(0, payload)
        assert source.stats.events == 2
        assert source.stats.malformed_events == 1
        assert source.trust.level is Trust.PARTIAL

    def test_removal_reaches_the_index(self, source: EventSource, index: PrefixIndex) -> None:
        """A removal in a later batch takes its block away."""
        source.on_status("syncing", "first contact")
        source.on_batch(0, batch(stored(1, 2)))
        source.on_batch(1, batch(BlockRemoved(block_hashes=[2], medium="GPU")))
        assert hit(index) == 4

    def test_batch_of_another_rank_is_not_applied(self, index: PrefixIndex) -> None:
        """A stream of rank 3 fed to rank 0 is a wiring mistake: nothing is learnt, and the reason names it."""
        source = EventSource("w", index, TrustState(), ManualClock(), rank=0)
        source.on_status("live", "caught up")
        source.on_batch(0, encode_batch(EventBatch(ts=1.0, events=[stored(1)], data_parallel_rank=3)))
        assert hit(index) == 0
        assert source.stats.foreign_batches == 1
        assert source.trust.level is Trust.PARTIAL
        assert "rank 3" in source.trust.reason

    def test_rank_is_learnt_when_none_is_configured(self, source: EventSource, index: PrefixIndex) -> None:
        """An engine behind its own URL may be any rank of its group; it stays the one it began as."""
        source.on_status("live", "caught up")
        source.on_batch(0, encode_batch(EventBatch(ts=1.0, events=[stored(1)], data_parallel_rank=3)))
        source.on_batch(1, encode_batch(EventBatch(ts=1.0, events=[stored(2, parent=1)], data_parallel_rank=0)))
        assert claimed(index) == 4
        assert source.stats.foreign_batches == 1

    def test_event_that_cannot_be_applied_loses_only_itself(
        self, source: EventSource, index: PrefixIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever goes wrong inside the index, the rest of the batch is applied and trust falls."""

        def stumble(_column: object) -> None:
            raise ArithmeticError("stumbled")

        monkeypatch.setattr("kvatlas.index.column.WorkerColumn.clear", stumble)
        source.on_status("live", "caught up")
        source.on_batch(0, batch(stored(1), AllBlocksCleared(), stored(2, parent=1)))
        assert claimed(index) == 4
        assert (source.stats.events, source.stats.malformed_events) == (2, 1)
        assert source.trust.level is Trust.PARTIAL
        assert "stumbled" in source.trust.reason

    def test_noted_reset_empties_at_once(self, source: EventSource, index: PrefixIndex) -> None:
        """A reset somebody made by hand counts before the engine says so."""
        source.on_status("syncing", "joined late")
        source.on_gap(0, 3)
        source.on_status("live", "caught up")
        source.on_batch(4, batch(stored(1)))
        source.note_reset("operator")
        assert hit(index) == 0
        assert source.trust.level is Trust.SYNCED


def test_trust_keeps_its_time_while_only_the_reason_changes() -> None:
    """`since_s` is when the level changed, whatever was said since."""
    trust = TrustState()
    trust.become(Trust.PARTIAL, "gap 1..2", 5.0)
    trust.become(Trust.PARTIAL, "gap 8..9", 9.0)
    assert trust.since_s == 5.0
    assert trust.reason == "gap 8..9"
    trust.become(Trust.SYNCED, "cleared", 11.0)
    assert trust.since_s == 11.0


class FailingIndex(PrefixIndex):
    """Runs out of memory while it applies the third batch and all after it."""

    left = 2

    def _fail(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise MemoryError("no room")

    def ingest(self, worker_id: str, payload: bytes, **rest: object) -> object:
        self._fail()
        return super().ingest(worker_id, payload, **rest)

    def ingest_run(self, worker_id: str, payloads: list[bytes], start: int = 0, **rest: object) -> object:
        self._fail()
        return super().ingest_run(worker_id, payloads, start, **rest)


@pytest.mark.parametrize("runs", [False, True])
def test_a_failure_while_applying_is_a_loss(*, runs: bool) -> None:
    """Nobody knows what of the batches was applied: the caller hears of the failure, and nothing is wholly believed."""
    index = FailingIndex(BlockKeyHasher(seed=1))
    index.add_worker("w", block_size=4)
    source = EventSource("w", index, TrustState(), ManualClock())
    source.on_status("syncing", "first contact")
    source.on_status("live", "caught up")
    for seq in range(2):
        source.on_batch(seq, batch(stored(seq + 1, parent=seq or None)))
    assert source.trust.level is Trust.SYNCED
    call = source.on_batches if runs else source.on_batch
    third, fourth = batch(stored(3, parent=2)), batch(stored(4, parent=3))
    with pytest.raises(MemoryError):
        call(2, [third, fourth] if runs else third)
    assert source.trust.level is Trust.PARTIAL
    assert "failed: MemoryError" in source.trust.reason
    assert ("batches 2 to 3" if runs else "batch 2") in source.trust.reason
    assert hit(index) == 0
    assert claimed(index) > 0
