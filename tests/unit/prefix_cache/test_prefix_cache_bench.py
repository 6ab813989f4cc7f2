"""The prefix-cache benchmark measures what it says, and tells why it cannot."""

import sys

import pytest

from kvatlas.bench.prefix_cache import run_prefix_cache_bench
from kvatlas.errors import ConfigError
from support.golden import VECTORS

SAMPLES = [
    VECTORS / "core" / f"{name}.jsonl"
    for name in ("hybrid-full8-mamba8-fine4", "hybrid-full8-swa4", "chunkedlocal-bs4")
]


def test_ours_alone():
    """One row a recording of any kind, then requests a second and bytes a block; no peer, no ratio."""
    report = run_prefix_cache_bench(SAMPLES, against=None, rounds=1, num_requests=3)
    *files, rate, memory = report.rows
    assert [row.work.split(": ")[1] for row in files] == [path.stem for path in SAMPLES]
    assert [rate.unit, memory.unit] == ["requests/s", "bytes/block"]
    assert all(row.ours > 0 and row.peer is None and row.ratio is None for row in report.rows)
    assert 100 < memory.ours < 1000


def test_without_requests():
    """The long workload can be left out."""
    assert len(run_prefix_cache_bench(SAMPLES[:1], against=None, rounds=1, num_requests=0).rows) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"against": "sglang"}, "measured against vllm"),
        ({"against": None, "rounds": 0}, "at least one round"),
        ({"interpreter": "/nowhere/python"}, "cannot be started"),
        ({"interpreter": "/bin/false"}, "process ended"),
    ],
)
def test_what_it_refuses(settings, message):
    """Unknown peers, no rounds, and an interpreter that is absent or has no vLLM are named."""
    with pytest.raises(ConfigError, match=message):
        run_prefix_cache_bench(SAMPLES[:1], **settings)


def test_peer_without_vllm(capfd):
    """An interpreter without vLLM says so itself, on stderr."""
    with pytest.raises(ConfigError, match=r"vllm 0\.32"):
        run_prefix_cache_bench(SAMPLES[:1], interpreter=sys.executable)
    assert "No module named" in capfd.readouterr().err
