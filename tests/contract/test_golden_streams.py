"""Recorded streams of a real vLLM: every prediction made while the state was wholly known is what the engine reported."""

from pathlib import Path

import pytest

from kvatlas.replay import replay_recording
from support.golden import golden_dir, golden_files

NAMES = ("vllm-bytes-serial", "vllm-cbor-serial", "vllm-cbor-mix", "vllm-xxcbor-mix", "vllm-gemma-mix")
FULL_COMPARED = {"vllm-bytes-serial": 123, "vllm-cbor-serial": 62}
"""Requests known to be comparable in the full recordings: from the first batch on, or from the recorded reset on."""


@pytest.mark.parametrize("path", golden_files("streams", NAMES), ids=lambda path: path.stem)
def test_predictions_equal_reports(path: Path) -> None:
    """Whatever the hash algorithm and form, alone or four at a time, one KV cache group or two."""
    report = replay_recording(path, seed=5)
    assert report.differences == []
    assert report.equal == report.compared
    assert report.malformed == 0
    folder = golden_dir()
    if folder is not None and folder in path.parents:
        assert report.compared >= FULL_COMPARED.get(path.stem, 1)


def test_any_seed_of_the_block_keys_gives_the_same_report() -> None:
    """Predictions rest on content, not on the key's seed."""
    (path,) = golden_files("streams", ("vllm-bytes-serial",))
    first, second = replay_recording(path, seed=1), replay_recording(path, seed=2)
    assert first == second
    assert first.compared > 0
