"""`kvatlas demo`, as the README promises it."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e


def test_cost_doubles_the_hit_rate_and_keeps_the_balance() -> None:
    """The whole demo: at least twice round robin's hit rate, max/mean work at most 1.5, every request answered."""
    command = [sys.executable, "-m", "kvatlas", "demo", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    policies = json.loads(done.stdout)["policies"]
    assert list(policies) == ["round_robin", "cost"]
    assert policies["cost"]["hit_rate"] >= 2 * policies["round_robin"]["hit_rate"] > 0
    assert policies["cost"]["max_over_mean_work"] <= 1.5
    for summary in policies.values():
        assert (summary["requests"], summary["failed"]) == (240, 0)
        assert summary["predicted"] == 240
        assert summary["ttft_p90_ms"] >= summary["ttft_p50_ms"] > 0
    assert policies["cost"]["predicted_equal"] >= 0.9 * 240
