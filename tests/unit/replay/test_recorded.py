"""When a recording's requests are compared, and with what."""

import base64
import json
from pathlib import Path

import pytest

from kvatlas.errors import EventDecodeError
from kvatlas.events import AllBlocksCleared, BlockStored, EventBatch, encode_batch
from kvatlas.replay import Difference, replay_recording

TOKENS = list(range(9))


def frames(t: float, seq: int, *events: object) -> dict:
    payload = encode_batch(EventBatch(ts=t, events=list(events), data_parallel_rank=0))
    return {
        "kind": "frames",
        "t": t,
        "frames": [base64.b64encode(part).decode() for part in (b"kv", seq.to_bytes(8, "big"), payload)],
    }


def request(sent: float, cached: int | None) -> dict:
    usage = {
        "prompt_tokens": 9,
        "total_tokens": 10,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return {
        "kind": "request",
        "t": sent + 0.5,
        "sent": sent,
        "status": 200,
        "error": None,
        "body": {"prompt": TOKENS},
        "usage": usage,
        "token_ids": [1],
    }


def stored() -> BlockStored:
    return BlockStored(block_hashes=[1, 2], parent_block_hash=None, token_ids=TOKENS[:8], block_size=4, medium="GPU")


def write(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_request_is_predicted_at_the_moment_it_was_sent(tmp_path: Path) -> None:
    """A batch that arrived after sending is not used, wherever its line stands."""
    path = write(
        tmp_path / "r",
        frames(1.0, 0, stored()),
        request(2.0, 8),
        frames(4.0, 1, AllBlocksCleared()),
        request(3.0, 8),
        request(5.0, 0),
    )
    report = replay_recording(path)
    assert (report.compared, report.equal) == (3, 3)


def test_differences_name_line_and_both_numbers(tmp_path: Path) -> None:
    """What the engine did not confirm is listed, not averaged away."""
    path = write(tmp_path / "r", frames(1.0, 0, stored()), request(2.0, 4))
    assert replay_recording(path).differences == [Difference(line=2, predicted=8, reported=4)]


def test_nothing_is_compared_before_the_state_is_known(tmp_path: Path) -> None:
    """A recording that joins late is silent until the engine's cache was cleared."""
    path = write(
        tmp_path / "r", frames(1.0, 7, stored()), request(2.0, 8), frames(3.0, 8, AllBlocksCleared()), request(4.0, 0)
    )
    report = replay_recording(path)
    assert (report.compared, report.known_from_line, report.gaps) == (1, 4, 1)


def test_recorded_reset_counts_at_once(tmp_path: Path) -> None:
    """A successful reset call empties the cache before the engine's own event comes; a failed one changes nothing."""
    reset = {"kind": "reset", "t": 2.0, "status": 200, "text": '{"success":true}'}
    failed = {"kind": "reset", "t": 1.5, "status": 200, "text": '{"success":false}'}
    path = write(tmp_path / "r", frames(1.0, 0, stored()), failed, request(1.6, 8), reset, request(3.0, 0))
    report = replay_recording(path)
    assert (report.compared, report.equal) == (2, 2)


def test_gap_inside_ends_the_comparison(tmp_path: Path) -> None:
    """After a lost batch nothing is claimed until a clear."""
    path = write(tmp_path / "r", frames(1.0, 0, stored()), frames(2.0, 2, stored()), request(3.0, 8))
    report = replay_recording(path)
    assert (report.compared, report.gaps) == (0, 1)


def test_requests_without_a_count_are_left_out(tmp_path: Path) -> None:
    """An engine that does not report cached tokens proves nothing."""
    path = write(tmp_path / "r", frames(1.0, 0, stored()), request(2.0, None))
    assert replay_recording(path).requests == 0


@pytest.mark.parametrize("content", ["", "not json\n", '{"kind": "other"}\n'])
def test_what_is_no_recording_is_refused(tmp_path: Path, content: str) -> None:
    """An empty or foreign file is an error, not a report of zero."""
    path = tmp_path / "r"
    path.write_text(content)
    with pytest.raises(EventDecodeError):
        replay_recording(path)
