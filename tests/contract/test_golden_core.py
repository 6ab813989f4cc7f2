"""The prefix cache against recordings of vLLM 0.32.0's own KVCacheManager, line by line and field by field."""

import json

import pytest

from support.core_replay import first_difference, replay
from support.golden import VECTORS, golden_dir

SAMPLES = sorted((VECTORS / "core").glob("*.jsonl"))


def recordings():
    """Every full recording there is, of whatever kind, seed and size; the samples where there are none."""
    folder = golden_dir()
    return sorted((folder / "core").glob("*.jsonl")) if folder else SAMPLES


FILES = recordings()


def label(path):
    return f"{path.stem}-{'sample' if path in SAMPLES else 'full'}"


def test_there_are_recordings():
    """A run that found no data would prove nothing."""
    assert FILES
    assert {json.loads(path.read_text().splitlines()[0])["groups"][-1]["kind"] for path in SAMPLES} == {
        "full_attention",
        "sliding_window",
        "chunked_local_attention",
        "mamba",
    }


@pytest.mark.parametrize("path", FILES, ids=label)
def test_every_recorded_field_of_every_line(path):
    """Hits, blocks, events, queue order, usage, keys, tables, statistics: all equal to what the engine did."""
    done = replay(path)
    assert done.difference is None, f"{path.name}: {done.difference}"
    assert done.lines == len(path.read_text().splitlines()) - 1
    assert done.has_stats or path in SAMPLES


@pytest.mark.parametrize("path", SAMPLES, ids=label)
def test_committed_samples_replay_too(path):
    """The samples that travel with the sources are enough to notice a broken cache."""
    done = replay(path)
    assert done.difference is None, f"{path.name}: {done.difference}"
    assert done.lines > 35


def test_a_difference_is_found_and_told(tmp_path):
    """The replayer stops at the first wrong field and prints line, field and both values."""
    lines = (VECTORS / "core" / "full-bs16-small.jsonl").read_text().splitlines()
    wrong = json.loads(lines[5])
    wrong["usage"] = 0.5
    lines[5] = json.dumps(wrong)
    broken = tmp_path / "broken.jsonl"
    broken.write_text("\n".join(lines))
    difference = replay(broken).difference
    assert (difference.line, difference.field, difference.recorded) == (6, "usage", 0.5)
    assert "line 6" in str(difference)
    assert "recorded 0.5" in str(difference)


def test_fields_on_one_side_only_are_differences():
    """A field we do not produce, or produce beyond the recording, is a difference, not a pass."""
    assert first_difference(2, {"op": "reset", "ok": True}, {}).field == "ok"
    assert first_difference(2, {"op": "reset"}, {"ok": True}).field == "ok"
    assert first_difference(2, {"op": "reset", "tokens": [1]}, {}) is None
