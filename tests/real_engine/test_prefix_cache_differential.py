"""The prefix cache against the installed vLLM's own KVCacheManager, in one process, under random operations. No engine is started.

A recording holds what somebody thought of; this finds what nobody did. More than the seeds of every run:

    KVATLAS_DIFFERENTIAL_CONFIGURATIONS=5000 .venv/bin/pytest tests/real_engine/test_prefix_cache_differential.py
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from support.golden import PROJECT_ROOT

SCRIPT = Path("tests", "support", "prefix_cache_differential.py")
CONFIGURATIONS = int(os.environ.get("KVATLAS_DIFFERENTIAL_CONFIGURATIONS", "250"))  # 0.15 s each
SECONDS_ALLOWED = 120 + CONFIGURATIONS

KINDS = {
    "ChunkedLocalAttentionSpec",
    "CircularBufferSpec",
    "CrossAttentionSpec",
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "MambaSpec",
    "RSWASpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
}
HAPPENINGS = {
    "admissions", "admissions refused", "copies", "diverged hits", "drafts", "events", "evict", "external loads", "free",
    "hit tokens", "hits cut", "hits inside a block", "pop", "preempt", "resets done", "step", "steps refused",
}  # fmt: skip


@pytest.fixture(autouse=True)
def engines_running() -> None:
    """Instead of this folder's fixture of the same name, which starts two engines."""


def run_script(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script that has both managers in one process."""
    command = [str(python), str(SCRIPT), *arguments]
    return subprocess.run(
        command, cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=SECONDS_ALLOWED, check=False
    )


@pytest.mark.timeout(SECONDS_ALLOWED + 10)
def test_random_operations_give_what_vllm_gives(vllm_python: Path):
    """Hits, blocks, events, free queue, usage, tables, hashes, statistics and refusals are equal after every operation."""
    done = run_script(vllm_python, "--configurations", str(CONFIGURATIONS))
    assert done.returncode == 0, done.stdout + done.stderr
    exercised = json.loads(done.stdout.splitlines()[-1])
    assert exercised["configurations"] + exercised["configurations refused"] == CONFIGURATIONS
    if CONFIGURATIONS >= 100:  # a run that meets nothing proves nothing
        assert {name for name in KINDS | HAPPENINGS if not exercised.get(name)} == set()
        assert exercised["ended by an assertion of the engine"] < CONFIGURATIONS / 5


def test_a_difference_is_told_with_the_way_back_to_it(vllm_python: Path):
    """With a field of ours made wrong: seed, operation, configuration, field, both values, and a command that repeats it."""
    first = run_script(vllm_python, "--seed", "4", "--configurations", "3", "--spoil", "free queue")
    told = first.stdout.splitlines()[-6:]
    assert first.returncode == 1, first.stderr
    assert told[0].startswith("seed 4, operation 1 (")
    assert told[1] == f"  rerun {vllm_python} {SCRIPT} --seed 4 --operations 350 --spoil 'free queue'"
    assert told[2].startswith("  Setup(groups=(KVCacheGroup(spec=")
    assert told[3] == "field free queue:"
    assert told[4].startswith("  vLLM [")
    assert told[5] == "  ours None"
