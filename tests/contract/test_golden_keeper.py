"""Recorded streams of a real vLLM through the keeper: whole and compacted, predictions stay what the engine reported."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from kvatlas.clock import ManualClock
from kvatlas.keeper import Keeper, KeeperConfig
from kvatlas.replay import replay_recording
from kvatlas.stream import (
    Journal,
    RecordedFrames,
    RecordedRequest,
    RecordingWriter,
    ReplayServerConfig,
    SubscriberConfig,
    read_recording,
)
from support.golden import golden_files

NAMES = ("vllm-bytes-serial", "vllm-cbor-serial", "vllm-cbor-mix", "vllm-xxcbor-mix", "vllm-gemma-mix")
CONFIG = KeeperConfig(
    SubscriberConfig("inproc://engine", "inproc://replay"), ReplayServerConfig("inproc://a", "inproc://b")
)


def keeper_over(journal: Journal) -> Keeper:
    """A keeper without sockets, told by hand."""
    return Keeper(CONFIG, journal, ManualClock())


def tell(keeper: Keeper, record: RecordedFrames) -> None:
    """What a subscriber would tell the keeper of a recorded frame."""
    last = keeper.last_engine_seq
    if record.seq <= last:
        keeper.on_life("the numbers went back")
        last = -1
    if record.seq > last + 1:
        keeper.on_gap(last + 1, record.seq - 1)
    keeper.on_batch(record.seq, record.payload)


@pytest.mark.parametrize("path", golden_files("streams", NAMES), ids=lambda path: path.stem)
def test_a_recording_that_went_through_the_keeper_is_the_recording(path: Path, tmp_path: Path) -> None:
    """Every frame comes out with its number and its bytes."""
    records = list(read_recording(path))
    kept = []
    with Journal(tmp_path / "data", "engine", segment_bytes=50_000) as journal:
        keeper = keeper_over(journal)
        for record in records:
            if isinstance(record, RecordedFrames):
                tell(keeper, record)
                kept.append(next(journal.read_from(journal.next_seq - 1)))
    frames = [record for record in records if isinstance(record, RecordedFrames)]
    assert [(each.seq, each.payload) for each in kept] == [(frame.seq, frame.payload) for frame in frames]


@pytest.mark.parametrize("share", [0.3, 0.7])
@pytest.mark.parametrize("path", golden_files("streams", NAMES), ids=lambda path: path.stem)
def test_a_consumer_of_the_compacted_stream_predicts_what_the_engine_reports(
    path: Path, share: float, tmp_path: Path
) -> None:
    """It comes after a compaction in the middle, gets the resident blocks and the rest live: no prediction differs."""
    records = list(read_recording(path))
    frames = [record for record in records if isinstance(record, RecordedFrames)]
    middle = frames[int(share * len(frames))]
    seen = asyncio.run(through_compaction(records, middle, tmp_path))
    report = replay_recording(seen, seed=5)
    whole = replay_recording(path, seed=5)
    assert report.differences == []
    assert report.malformed == 0
    if whole.known_from_line is None:
        return  # a sample too short to have anything to compare
    known_from_s = next(r.sent_s for r in records if isinstance(r, RecordedRequest) and r.line == whole.known_from_line)
    late = [
        record
        for record in records
        if isinstance(record, RecordedRequest)
        and record.sent_s > middle.t_s
        and record.sent_s >= known_from_s
        and record.cached_tokens is not None
        and record.prompt_token_ids is not None
    ]
    assert report.compared == len(late)


async def through_compaction(records: list, middle: RecordedFrames, folder: Path) -> Path:
    """The recording as a consumer would have made it that came to the keeper just after a compaction at `middle`."""
    path = folder / "seen.jsonl"
    with Journal(folder / "data", "engine", segment_bytes=50_000) as journal, RecordingWriter(path) as writer:
        keeper = keeper_over(journal)
        has_come = False
        for record in records:
            if isinstance(record, RecordedFrames):
                tell(keeper, record)
                if has_come:
                    writer.write(dataclasses.replace(record, seq=journal.next_seq - 1))
            elif has_come and not (isinstance(record, RecordedRequest) and record.sent_s <= middle.t_s):
                writer.write(record)
            if record is middle:
                assert keeper.start_compaction()
                while not keeper.counters.compactions:
                    await asyncio.sleep(0.001)
                for kept in journal.read_from(0):
                    writer.write(dataclasses.replace(record, seq=kept.seq, payload=kept.payload))
                has_come = True
    return path
