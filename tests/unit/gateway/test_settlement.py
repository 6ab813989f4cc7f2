"""What a planner over a fleet learns when a request ends, and what it asks of engines it does not wholly know."""

import json

import pytest

from kvatlas.cli.service import Service
from kvatlas.clock import ManualClock
from kvatlas.config import ServeConfig, WorkerConfig
from kvatlas.errors import ConfigError
from kvatlas.events import BlockRemoved, BlockStored
from kvatlas.fleet import Cause, EventSource, FleetSpeed, LoadLedger, PrefillSpeed, Trust, TrustState, Worker
from kvatlas.gateway.candidates import UncachedTokens
from kvatlas.gateway.fleet_planner import FleetPlanner
from kvatlas.gateway.values import GatewayRequest, Outcome
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import CopyMode, PrefixIndex
from kvatlas.routing import Candidate, DecisionLog, Picker, make_policy

BLOCK = 4
PROMPT = list(range(33))


class OneWorkerFleet:
    """A fleet of one, as far as the planner asks."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.workers = (worker,)
        self.ready = True
        self.models = ()

    def candidates(self, _model: str | None) -> list[Worker]:
        return [self.worker]

    def left_out(self, _model: str | None) -> list[Worker]:
        return []

    def get(self, worker_id: str) -> Worker | None:
        return self.worker if worker_id == self.worker.worker_id else None

    def check_soon(self, worker_id: str) -> None:
        raise AssertionError(worker_id)


class Setup:
    """A planner, its index and its worker, whose stream is live."""

    def __init__(self, *, copy_mode: str = "count", full_report_share: float = 0.0) -> None:
        clock = ManualClock()
        self.index = PrefixIndex(BlockKeyHasher(1))
        self.index.add_worker("w:1", block_size=BLOCK, copy_mode=CopyMode(copy_mode))
        self.index.set_capacity("w:1", 20)
        config = WorkerConfig(url="http://w:1", copy_mode=copy_mode)
        load = LoadLedger(clock, PrefillSpeed(clock, FleetSpeed(1000.0)), decode_step_s=0.02)
        self.worker = Worker("w:1", config, "w", 1, "", load, TrustState(), healthy=True)
        self.worker.source = EventSource("w:1", self.index, self.worker.trust, clock)
        self.worker.source.on_status("live", "caught up")
        log = DecisionLog(10)
        self.planner = FleetPlanner(
            OneWorkerFleet(self.worker),  # type: ignore[arg-type]
            self.index,
            Picker(make_policy("cost", seed=1), clock, log),
            log,
            renderers={},
            session=None,  # type: ignore[arg-type]
            config=ServeConfig(full_report_share=full_report_share),
        )

    def store(self, first: int, count: int) -> None:
        """Blocks of the prompt enter the worker."""
        self.index.apply(
            "w:1",
            BlockStored(
                block_hashes=[number + 1 for number in range(first, first + count)],
                parent_block_hash=first or None,
                token_ids=PROMPT[first * BLOCK : (first + count) * BLOCK],
                block_size=BLOCK,
                medium="GPU",
            ),
        )

    def send(self, **fields: object):
        """Plan and dispatch one completion of the prompt."""
        body = json.dumps({"model": "m", "prompt": PROMPT, **fields}).encode()
        request = GatewayRequest("r", "POST", b"/v1/completions", "/v1/completions", b"", body)
        plan = self.planner.plan(request)
        self.planner.dispatched(request, plan, plan.targets[0])
        return request, plan

    def answer(self, sent, cached_tokens: int | None, prompt_tokens: int = len(PROMPT)) -> None:
        """The engine answers."""
        request, plan = sent
        outcome = Outcome("ok", 200, 0.1, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        self.planner.finished(request, plan, plan.targets[0], outcome)

    def ask(self, cached_tokens: int) -> None:
        """One request and its answer."""
        self.answer(self.send(), cached_tokens)

    @property
    def claims(self) -> bytes:
        """2 = held, 1 = in doubt, 0 = not, for each block of the prompt."""
        return self.index.claims("w:1", PROMPT)


def test_a_kept_promise() -> None:
    """Promised and reported are equal: counted, nothing learnt."""
    setup = Setup()
    setup.store(0, 4)
    setup.ask(16)
    audit = setup.worker.audit
    assert (audit.compared, audit.equal, audit.adopted_blocks) == (1, 1, 0)
    assert setup.worker.load.in_flight == 0


def test_reports_end_doubts() -> None:
    """After a loss no promise is made; the engine's count confirms what it covers and refutes the rest."""
    setup = Setup()
    setup.store(0, 8)
    setup.worker.source.on_gap(3, 5)
    sent = setup.send()
    assert sent[1].predicted_tokens is None
    assert setup.claims == b"\x01" * 8
    setup.answer(sent, 12)
    assert setup.claims == b"\x02" * 3 + bytes(5)
    audit = setup.worker.audit
    assert (audit.confirmed_blocks, audit.refuted_blocks, audit.compared) == (3, 5, 0)


def test_half_credit_for_doubted_claims() -> None:
    """The decision shows the claim and how much of it counts."""
    setup = Setup()
    setup.store(0, 8)
    setup.worker.source.on_gap(3, 5)
    _, plan = setup.send()
    (scored,) = plan.record.candidates
    assert (scored.hit_tokens, scored.confidence) == (32, 0.5)


def test_unknown_blocks_are_adopted() -> None:
    """An engine that reports more than was claimed teaches what it holds."""
    setup = Setup()
    setup.worker.source.on_gap(0, 5)
    setup.ask(16)
    assert setup.claims[:5] == b"\x02\x02\x02\x02\x00"
    assert setup.worker.audit.adopted_blocks == 4


def test_nothing_is_learnt_from_other_prompts_than_ours() -> None:
    """Where the engine counted another number of prompt tokens, its cached tokens are of another prompt."""
    setup = Setup()
    setup.worker.source.on_gap(0, 5)
    setup.answer(setup.send(), 16, prompt_tokens=40)
    assert setup.claims == bytes(8)
    assert setup.worker.audit.parity_mismatches == 1


def test_nothing_is_learnt_of_a_worker_without_credit() -> None:
    """While the stream is gone nothing would take a claim back."""
    setup = Setup()
    setup.worker.source.on_status("lost", "gone")
    setup.ask(16)
    assert setup.claims == bytes(8)


def test_causes_of_a_broken_promise() -> None:
    """A removal under way explains it; without one it is unexplained, and three of those put all in doubt."""
    setup = Setup()
    setup.store(0, 8)
    sent = setup.send()
    setup.index.apply("w:1", BlockRemoved(block_hashes=[8], medium="GPU"))
    setup.answer(sent, 16)
    assert setup.worker.audit.over_by_cause == {Cause.EVICTED: 1}
    for _ in range(3):
        assert setup.worker.trust.level is Trust.SYNCED
        setup.ask(8)
    assert setup.worker.audit.over_by_cause[Cause.UNEXPLAINED] == 3
    assert setup.worker.audit.alarms == 1
    assert setup.worker.trust.level is Trust.PARTIAL
    assert "events must be missing" in setup.worker.trust.reason
    assert 2 not in setup.claims[2:]


class TestFullReport:
    def asks(self, setup: Setup, **fields: object) -> bool:
        """Whether the body that is sent asks for a full report."""
        _, plan = setup.send(**fields)
        body = json.loads(plan.body) if plan.body is not None else {}
        return body.get("vllm_xargs", {}).get("kv_cache_report_mode") == "full"

    def test_asked_of_workers_that_are_not_wholly_known(self) -> None:
        """With a share of 1 every request to such a worker asks, and keeps the client's other arguments."""
        setup = Setup(copy_mode="set", full_report_share=1.0)
        assert not self.asks(setup)
        setup.store(0, 2)
        setup.worker.source.on_gap(3, 5)
        assert self.asks(setup)
        _, plan = setup.send(vllm_xargs={"other": 1}, max_tokens=5)
        assert json.loads(plan.body) == {
            "model": "m",
            "prompt": PROMPT,
            "max_tokens": 5,
            "vllm_xargs": {"other": 1, "kv_cache_report_mode": "full"},
        }

    def test_not_asked_without_the_setting(self) -> None:
        """By default nobody asks, and a client's own wish is taken out."""
        setup = Setup()
        setup.worker.source.on_gap(3, 5)
        assert not self.asks(setup)
        _, plan = setup.send(vllm_xargs={"kv_cache_report_mode": "full"})
        assert "vllm_xargs" not in json.loads(plan.body)

    def test_not_asked_where_it_ends_the_engine(self) -> None:
        """Not under decode context parallelism, whose blocks are longer than the engine's metrics say."""
        setup = Setup(copy_mode="set", full_report_share=1.0)
        setup.store(0, 2)
        setup.worker.source.on_gap(3, 5)
        setup.index.set_block_size("w:1", 2)
        assert not self.asks(setup)

    def test_needs_copies_that_are_not_counted(self) -> None:
        """With counted copies a report would leave claims that no removal takes back: refused at the start."""
        config = ServeConfig(workers=(WorkerConfig(url="http://w:1"),), full_report_share=0.1)
        with pytest.raises(ConfigError, match="copy_mode=set"):
            Service(config)


def test_uncached_tokens_are_reckoned_for_the_worker_asked_about() -> None:
    """What is not believed to be cached, at least one token; the default for a stranger."""

    def candidate(name: str, hit: int, confidence: float) -> Candidate:
        return Candidate(name, hit, confidence, 0, 0, 0, 0.0, 1000.0, 0.02, "synced")

    uncached = UncachedTokens(100, [candidate("a", 64, 1.0), candidate("b", 64, 0.5), candidate("c", 100, 1.0)])
    assert [uncached.get(name, 7) for name in "abcd"] == [36, 68, 1, 7]


@pytest.mark.parametrize(
    ("outcome", "uses"),
    [
        (Outcome("ok", 200, 0.1, cached_tokens=16, prompt_tokens=33), 2),
        (Outcome("client_abort", 200, 0.1), 2),
        (Outcome("ok", 400, 0.1), 1),
        (Outcome("rejected", 0, 0.1), 1),
    ],
)
def test_a_prompt_is_of_use_at_its_first_token_and_at_its_end(outcome: Outcome, uses: int) -> None:
    """Both move the worker's clock by the prompt's 8 blocks; a request that was refused or never came has no end there."""
    setup = Setup()
    setup.store(0, 8)
    request, plan = setup.send(stream=True)
    setup.planner.first_byte(request, plan, plan.targets[0])
    setup.planner.finished(request, plan, plan.targets[0], outcome)
    assert setup.index.uses.counts("w:1", 0).clock == 8 + uses * 8


def test_answers_that_come_whole_are_one_use() -> None:
    """The first byte of an answer that is no stream is its end."""
    setup = Setup()
    setup.store(0, 8)
    request, plan = setup.send()
    setup.planner.first_byte(request, plan, plan.targets[0])
    setup.planner.finished(request, plan, plan.targets[0], Outcome("ok", 200, 0.1, cached_tokens=32))
    assert setup.index.uses.counts("w:1", 0).clock == 16
