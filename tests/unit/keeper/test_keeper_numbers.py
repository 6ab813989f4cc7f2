"""The keeper told by hand: its numbers, its lives, and losses that stay visible."""

import asyncio
import os
import threading

import pytest

from kvatlas.clock import ManualClock
from kvatlas.errors import ConfigError, IndexStateError
from kvatlas.events import BlockRemoved, BlockStored, EventBatch, decode_batch, encode_batch
from kvatlas.keeper import Keeper, KeeperConfig
from kvatlas.keeper import keeper as keeper_module
from kvatlas.stream import Journal, ReplayServerConfig, SubscriberConfig

SIZE = 4


def config(replay="inproc://replay", **settings):
    serve = ReplayServerConfig("inproc://published", "inproc://replayed")
    return KeeperConfig(SubscriberConfig("inproc://engine", replay), serve, **settings)


@pytest.fixture(name="journal")
def _journal(tmp_path):
    with Journal(tmp_path, "engine") as journal:
        yield journal


@pytest.fixture(name="keeper")
def _keeper(journal):
    return Keeper(config(), journal, ManualClock())


def batch(number, *events):
    """Bytes of a batch that stores one block with the number's tokens, or of these events."""
    events = events or (BlockStored([number], None, [number] * SIZE, SIZE, medium="GPU"),)
    return encode_batch(EventBatch(1_000.0 + number, list(events), 2))


def kept(journal):
    """(number, engine's number, events) of what is journaled."""
    return [(r.seq, r.engine_seq, list(decode_batch(r.payload).batch.events)) for r in journal.read_from(0)]


def numbers(journal):
    return [(record.seq, record.engine_seq) for record in journal.read_from(0)]


async def compacted(keeper):
    """Compact now."""
    assert keeper.start_compaction()
    done = keeper.counters.compactions + keeper.counters.failed_compactions + 1
    while keeper.counters.compactions + keeper.counters.failed_compactions < done:
        await asyncio.sleep(0)


def test_numbers_are_the_engines_and_known_losses_are_holes(keeper, journal):
    """What the engine's replay does not have is missing here under the same numbers."""
    keeper.on_gap(0, 4)
    for seq in (5, 6):
        keeper.on_batch(seq, batch(seq))
    keeper.on_gap(7, 8)
    keeper.on_batch(9, batch(9))
    assert numbers(journal) == [(5, 5), (6, 6), (9, 9)]
    assert keeper.counters.lost_batches == 7


def test_a_loss_of_unknown_length_is_one_missing_number_seen_at_once(keeper, journal):
    """An empty batch behind the hole shows it before the engine says anything more; later numbers stand above it."""
    keeper.on_batch(0, batch(0))
    keeper.on_gap(1, None)
    assert numbers(journal) == [(0, 0), (2, -1)]
    assert kept(journal)[-1][2] == []
    keeper.on_batch(1, batch(1))
    keeper.on_batch(2, batch(2))
    assert numbers(journal) == [(0, 0), (2, -1), (3, 1), (4, 2)]


def test_numbers_go_on_after_a_restart_also_behind_a_hole(keeper, journal):
    """The distance to the engine's numbers is read from the journal."""
    keeper.on_batch(0, batch(0))
    keeper.on_gap(1, None)
    again = Keeper(config(), journal, ManualClock())
    assert again.counters.resumed
    again.on_batch(1, batch(1))
    assert numbers(journal) == [(0, 0), (2, -1), (3, 1)]


@pytest.mark.parametrize("replay", ["inproc://replay", None])
def test_a_restarted_keeper_demands_the_bytes_of_its_last_batch(journal, replay):
    """It asks the engine from that batch on and believes nothing before it was the same; without replay it is a loss."""
    Keeper(config(replay), journal, ManualClock()).on_batch(0, batch(0))
    keeper = Keeper(config(replay), journal, ManualClock())
    (step,) = keeper.subscriber.tracker.connected()
    if replay:
        assert (type(step).__name__, step.from_seq) == ("AskReplay", 0)
        steps = keeper.subscriber.tracker.replayed(step.token, 0, batch(7))
        assert type(steps[0]).__name__ == "NewLife"
    else:
        assert (type(step).__name__, step.first_seq, step.last_seq) == ("Lost", 1, None)


def test_the_same_bytes_prove_the_engines_life(journal):
    """Then what follows applies."""
    Keeper(config(), journal, ManualClock()).on_batch(0, batch(0))
    tracker = Keeper(config(), journal, ManualClock()).subscriber.tracker
    (ask,) = tracker.connected()
    assert tracker.replayed(ask.token, 0, batch(0)) == []
    (step,) = tracker.replayed(ask.token, 1, batch(1))
    assert (type(step).__name__, step.seq) == ("Apply", 1)


def test_a_life_of_the_engine_is_a_life_of_the_keeper(keeper, journal):
    """The old one's batches are gone, numbers start again."""
    keeper.on_batch(0, batch(0))
    keeper.on_life("other bytes")
    keeper.on_batch(0, batch(1))
    assert journal.life == 2
    assert kept(journal)[0][2][0].block_hashes == [1]
    assert len(kept(journal)) == 1


@pytest.mark.asyncio
async def test_a_compaction_keeps_resident_blocks_only_and_the_engines_newest_batch(keeper, journal):
    """Numbers start at 0 in a new life; the newest batch stays as the engine sent it, for the proof after a restart."""
    for seq in range(4):
        keeper.on_batch(seq, batch(seq))
    keeper.on_batch(4, batch(4, BlockRemoved([0, 2], "GPU")))
    keeper.on_batch(5, batch(5))
    await compacted(keeper)
    assert journal.life == 2
    assert numbers(journal) == [(0, -1), (1, 5)]
    stored = kept(journal)[0][2]
    assert [event.block_hashes for event in stored] == [[1], [3]]
    record = next(journal.read_from(1))
    assert record.payload == batch(5)
    keeper.on_batch(6, batch(6))
    assert numbers(journal)[-1] == (2, 6)
    assert decode_batch(next(journal.read_from(0)).payload).batch.data_parallel_rank == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("when", ["before", "between", "after"])
async def test_a_compaction_does_not_hide_a_loss(keeper, journal, when):
    """A hole before or right behind what is compacted stays a hole; none is made up where nothing was lost."""
    keeper.on_batch(0, batch(0))
    if when == "before":
        keeper.on_gap(1, 1)
    keeper.on_batch(2 if when == "before" else 1, batch(2))
    if when == "between":
        keeper.on_gap(2, 2)
    keeper.on_batch(3 if when != "after" else 2, batch(3))
    if when == "after":
        keeper.on_gap(3, None)
    await compacted(keeper)
    seqs = [seq for seq, _ in numbers(journal)]
    assert len(set(range(seqs[-1] + 1)) - set(seqs)) == 1
    await compacted(keeper)
    seqs = [seq for seq, _ in numbers(journal)]
    assert len(set(range(seqs[-1] + 1)) - set(seqs)) == 1


@pytest.mark.asyncio
async def test_a_batch_that_cannot_be_read_is_a_loss_once_it_is_compacted(keeper, journal):
    """It may have held removals. Readers of the whole stream see its bytes, readers of the compacted one a hole."""
    keeper.on_batch(0, batch(0))
    keeper.on_batch(1, b"no batch")
    keeper.on_batch(2, batch(2))
    assert numbers(journal) == [(0, 0), (1, 1), (2, 2)]
    await compacted(keeper)
    assert [seq for seq, _ in numbers(journal)] == [0, 2, 3]


@pytest.mark.asyncio
async def test_what_comes_during_a_compaction_is_behind_it(keeper, journal):
    """Batches and holes since its start are copied, numbers go on."""
    for seq in range(3):
        keeper.on_batch(seq, batch(seq))
    assert keeper.start_compaction()
    assert not keeper.start_compaction()
    keeper.on_batch(3, batch(3))
    keeper.on_gap(4, 5)
    keeper.on_batch(6, batch(6))
    while not keeper.counters.compactions:
        await asyncio.sleep(0)
    assert numbers(journal) == [(0, -1), (1, 2), (2, 3), (5, 6)]


@pytest.mark.asyncio
async def test_a_compaction_that_a_new_life_overtakes_is_thrown_away(keeper, journal, tmp_path):
    """Nothing of the old life comes back."""
    for seq in range(3):
        keeper.on_batch(seq, batch(seq))
    assert keeper.start_compaction()
    keeper.on_life("restart")
    keeper.on_batch(0, batch(9))
    while list(tmp_path.glob("*.tmp")):
        await asyncio.sleep(0)
    assert (journal.life, numbers(journal)) == (2, [(0, 0)])
    assert keeper.counters.compactions == 0


@pytest.mark.asyncio
async def test_a_compaction_that_fails_leaves_everything(keeper, journal, tmp_path, monkeypatch):
    """A full disk: counted, and the journal grows on."""
    for seq in range(3):
        keeper.on_batch(seq, batch(seq))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    await compacted(keeper)
    monkeypatch.undo()
    assert keeper.counters.failed_compactions == 1
    assert numbers(journal) == [(0, 0), (1, 1), (2, 2)]
    assert not list(tmp_path.glob("*.tmp"))


def test_nothing_to_compact_is_no_compaction(keeper):
    """An empty life has nothing to replace."""
    assert not keeper.start_compaction()


@pytest.mark.asyncio
async def test_a_journal_that_cannot_be_written_ends_the_keeper(keeper, journal, monkeypatch):
    """Readers may have nothing that a restart would not know: no batch is published, and the run ends with the reason."""
    running = asyncio.create_task(keeper.run())
    await asyncio.sleep(0)
    keeper.on_status("live", "")
    assert keeper.server.is_open

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    keeper.on_batch(0, batch(0))
    keeper.on_batch(1, batch(1))
    with pytest.raises(ConfigError, match=r"the journal cannot be written: .*No space left"):
        await running
    assert keeper.server.counters.published == 0
    assert numbers(journal) == []


@pytest.mark.asyncio
async def test_the_end_does_not_wait_for_a_compaction(keeper, journal, tmp_path, monkeypatch):
    """It is called off, its file goes, and the journal is as it was."""
    for seq in range(3):
        keeper.on_batch(seq, batch(seq))
    begun, called_off = threading.Event(), []

    def endless(*_, is_called_off):
        begun.set()
        while not is_called_off():
            threading.Event().wait(0.001)
        called_off.append(True)
        raise IndexStateError("called off")

    monkeypatch.setattr(keeper_module, "compact", endless)
    running = asyncio.create_task(keeper.run())
    await asyncio.sleep(0)
    assert keeper.start_compaction()
    while not begun.is_set():
        await asyncio.sleep(0)
    keeper.close()
    await running
    assert called_off == [True]
    assert not list(tmp_path.glob("*.tmp"))
    assert numbers(journal) == [(0, 0), (1, 1), (2, 2)]
