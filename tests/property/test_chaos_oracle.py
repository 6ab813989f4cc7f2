"""The index against the true contents of every engine's cache, under every fault, in virtual time.

`KVATLAS_CHAOS_REQUESTS` makes the runs longer (300 requests each), `KVATLAS_CHAOS_SEEDS` more (1).
"""

import os

import pytest

from kvatlas.chaos import DEFAULT_SCENARIOS, ChaosRow, ChaosRun, ChaosSettings, run_chaos
from kvatlas.fleet import EventSource
from kvatlas.simulator import FAULT_NAMES

REQUESTS = int(os.environ.get("KVATLAS_CHAOS_REQUESTS", "300"))
SEEDS = range(1, 1 + int(os.environ.get("KVATLAS_CHAOS_SEEDS", "1")))
IS_LONG = REQUESTS >= 1000


def row(fault: str, *, seed: int = 1, workers: int = 4, requests: int = REQUESTS) -> ChaosRow:
    (only,) = run_chaos(ChaosSettings(workers=workers, requests=requests, seed=seed), [fault]).rows
    return only


def test_every_fault_has_a_row() -> None:
    """No fault of the simulator is left out."""
    alone = {part.split(":")[0] for scenario in DEFAULT_SCENARIOS for part in scenario.split("+")}
    assert set(FAULT_NAMES) <= alone


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", DEFAULT_SCENARIOS)
def test_guarantees_hold(fault: str, seed: int) -> None:
    """No over-claim once a loss is detectable, no loss found later than the poll that finds it, doubts end in time."""
    assert row(fault, seed=seed).broken == ()


@pytest.mark.parametrize("fault", ["cut+replay:mode=truncated,keep=3", "cut+no_replay", "drop+no_replay", "crash"])
def test_recall_comes_back_within_one_turnover(fault: str) -> None:
    """Knowledge lost for good is made good by new events, reports, and digests that place what hangs from the unknown."""
    recall = row(fault, requests=max(REQUESTS, 800)).recall_99_after_turnovers
    assert recall is not None
    assert recall <= 1.0


def test_without_faults_all_claims_are_true_and_whole() -> None:
    """Block for block: at the end every worker's claims are its engine's contents, and no instant differed upwards."""
    run = ChaosRun(ChaosSettings(workers=4, requests=REQUESTS), "none")
    run.run()
    for worker_id in run.index.worker_ids:
        truth = run.truth(worker_id)
        claims = run.index.claimed(worker_id, truth.keys)
        assert claims == bytes(2 * held for held in truth.resident)
        assert run.outcome.findings[worker_id].overclaimed_after == 0


def test_a_mixture_on_sixteen_workers() -> None:
    """All faults at random, on a wide fleet."""
    assert row("mixture", workers=16, requests=10_000 if IS_LONG else 1200).broken == ()


@pytest.mark.parametrize(
    ("sabotaged", "fault"),
    [("on_gap", "drop+no_replay"), ("on_life", "restart"), ("on_status", "cut")],
)
def test_the_oracle_sees_an_index_that_does_not_listen(
    sabotaged: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that ignores gaps, lives or lost connections is found out."""
    original = EventSource.on_status

    def deaf(self: EventSource, *args: object) -> None:
        if sabotaged == "on_status" and args[0] == "live":
            original(self, "live", "as ever")

    monkeypatch.setattr(EventSource, sabotaged, deaf)
    found = row(fault)
    assert found.overclaimed_blocks_after_detection > 0
    assert "after detection" in found.broken[0]


def test_equal_seeds_give_equal_rows() -> None:
    """A run is its settings: whoever repeats it sees the same."""
    assert row("mixture", requests=150) == row("mixture", requests=150)
    assert row("mixture", requests=150) != row("mixture", requests=150, seed=2)
