"""A hit behind a queue counts for what the queue leaves of it, and only where removals are known."""

import json

import pytest

from kvatlas.clock import ManualClock
from kvatlas.config import ServeConfig, WorkerConfig
from kvatlas.events import BlockRemoved, BlockStored
from kvatlas.fleet import (
    EventSource,
    FleetRecency,
    FleetSpeed,
    LoadLedger,
    PrefillSpeed,
    RecencyWatch,
    TrustState,
    Worker,
)
from kvatlas.gateway.fleet_planner import FleetPlan, FleetPlanner
from kvatlas.gateway.values import GatewayRequest
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex
from kvatlas.routing import CandidateScore, DecisionLog, Picker, make_policy

BLOCK = 4
PROMPT = list(range(BLOCK * 10 + 1))


class Setup:
    """A planner over one worker that may know how old its blocks get."""

    def __init__(self, *, watched: bool = True) -> None:
        self.clock = ManualClock()
        self.index = PrefixIndex(BlockKeyHasher(1))
        self.index.add_worker("w:1", block_size=BLOCK)
        self.recency: RecencyWatch | None = FleetRecency(self.index, self.clock).watch("w:1") if watched else None
        load = LoadLedger(self.clock, PrefillSpeed(self.clock, FleetSpeed(1.0)), decode_step_s=0.02)
        self.worker = Worker("w:1", WorkerConfig(url="http://w:1"), "w", 1, "", load, TrustState(), healthy=True)
        self.worker.recency = self.recency
        self.worker.source = EventSource("w:1", self.index, self.worker.trust, self.clock)
        self.worker.source.on_status("live", "caught up")
        self.workers = (self.worker,)
        self.ready = True
        log = DecisionLog(10)
        self.planner = FleetPlanner(
            self,  # type: ignore[arg-type]
            self.index,
            Picker(make_policy("cost", seed=1), self.clock, log),
            log,
            renderers={},
            session=None,  # type: ignore[arg-type]
            config=ServeConfig(),
        )
        self.next_hash = 1000
        self.held: list[int] = []

    def candidates(self, _model: str | None) -> list[Worker]:
        """The worker; what a planner asks a fleet for."""
        return [self.worker]

    def left_out(self, _model: str | None) -> list[Worker]:
        """Nobody: what a planner asks a fleet for."""
        return []

    def churn(self, blocks: int, capacity: int) -> None:
        """Other prompts' blocks enter, and the oldest of them go where there is no room."""
        for _ in range(blocks):
            number = self.next_hash
            self.next_hash += 1
            if len(self.held) == capacity:
                self.index.apply("w:1", BlockRemoved([self.held.pop(0)], medium="GPU"))
            self.index.apply("w:1", BlockStored([number], None, [number, number, 1, 1], BLOCK, medium="GPU"))
            self.held.append(number)

    def store_prompt(self) -> None:
        """The whole prompt enters."""
        self.index.apply("w:1", BlockStored(list(range(1, 11)), None, PROMPT[: BLOCK * 10], BLOCK, medium="GPU"))

    def plan(self) -> CandidateScore:
        """How the worker looks to a request for the prompt."""
        body = json.dumps({"model": "m", "prompt": PROMPT}).encode()
        plan = self.planner.plan(GatewayRequest("r", "POST", b"/v1/completions", "/v1/completions", b"", body))
        assert isinstance(plan, FleetPlan)
        assert plan.record is not None
        assert plan.predicted_tokens == BLOCK * 10
        return plan.record.candidates[0]

    def live(self, capacity: int) -> None:
        """Some turnovers, looked at every two seconds."""
        for _ in range(8):
            self.churn(1000, capacity)
            self.clock.advance(2.0)
            self.plan_only()
        self.store_prompt()

    def plan_only(self) -> None:
        """What looking at the worker with a queue does."""
        if self.recency is not None:
            self.recency.surviving_share(1)


@pytest.mark.parametrize("queued_tokens", [0, 100, 100_000])
def test_without_pressure_decisions_are_the_same(queued_tokens: int) -> None:
    """While the pool never removed anything, a plan with the discount is the plan without it, whatever the queue."""
    seen = []
    for watched in (False, True):
        setup = Setup(watched=watched)
        setup.live(capacity=100_000)
        if queued_tokens:
            setup.worker.load.dispatch(queued_tokens)
        seen.append(setup.plan())
    assert seen[0] == seen[1]
    assert seen[1].confidence == 1.0


def test_under_pressure_a_long_queue_costs_credit() -> None:
    """The pool turns over in 1,600 blocks. Behind 4,000 blocks of others the hit is gone, behind 100 it is whole."""
    setup = Setup()
    setup.live(capacity=1_600)
    assert setup.plan().confidence == 1.0
    ticket = setup.worker.load.dispatch(100 * BLOCK)
    assert setup.plan().confidence == 1.0
    setup.worker.load.finish(ticket)
    setup.worker.load.dispatch(4_000 * BLOCK)
    found = setup.plan()
    assert found.hit_tokens == BLOCK * 10
    assert found.confidence == pytest.approx(0.0, abs=0.01)
