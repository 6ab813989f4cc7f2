"""A worker left out for its silence, as plans, /v1/models, /api/workers and /metrics show it."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from kvatlas.admin import MetricsCollector
from kvatlas.admin.views import view_worker
from kvatlas.clock import ManualClock
from kvatlas.config import ServeConfig, WorkerConfig
from kvatlas.fleet import Fleet, FleetSpeed, LoadLedger, PrefillSpeed, TrustState, Worker
from kvatlas.gateway import GatewayRequest, GatewayStats, Plan, Reply
from kvatlas.gateway.fleet_planner import FleetPlanner
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex
from kvatlas.routing import DecisionLog, Picker, make_policy

pytestmark = pytest.mark.asyncio


class Setting:
    """A fleet of workers by hand, and a planner over it."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.index = PrefixIndex(BlockKeyHasher(1))
        self.fleet = Fleet(ServeConfig(), self.index, ManualClock())
        log = DecisionLog(10)
        picker = Picker(make_policy("round_robin"), ManualClock(), log)
        self.planner = FleetPlanner(
            self.fleet, self.index, picker, log, renderers={}, session=session, config=ServeConfig()
        )

    def add(self, name: str, *models: str, silent: bool = False) -> Worker:
        clock = ManualClock()
        load = LoadLedger(clock, PrefillSpeed(clock, FleetSpeed(8000.0)), decode_step_s=0.02)
        config = WorkerConfig(url=f"http://{name}:1")
        worker = Worker(f"{name}:1", config, name, 1, "", load, TrustState(), models=models, healthy=True)
        worker.silent_reason = "the event stream is silent" if silent else None
        self.index.add_worker(worker.worker_id)
        self.fleet._workers[worker.worker_id] = worker
        return worker

    def targets(self) -> list[str]:
        """Where ten requests for model m go, first and second choice, each pair once."""
        body = b'{"model":"m","prompt":[1,2,3]}'
        request = GatewayRequest("r", "POST", b"/v1/completions", "/v1/completions", b"", body)
        plans = [self.planner.plan(request) for _ in range(10)]
        return sorted({" ".join(target.host for target in plan.targets) for plan in plans if isinstance(plan, Plan)})


@pytest_asyncio.fixture
async def setting() -> AsyncIterator[Setting]:
    async with aiohttp.ClientSession() as session:
        yield Setting(session)


async def test_a_silent_worker_is_the_second_choice_of_the_only_other_one(setting: Setting) -> None:
    """It gets nothing, unless the one that is heard cannot be reached; two that are heard stand in for each other."""
    setting.add("a", "m")
    setting.add("b", "m", silent=True)
    assert setting.targets() == ["a b"]
    setting.add("c", "m")
    assert setting.targets() == ["a c", "c a"]


async def test_the_only_worker_is_planned_once_although_it_is_silent(setting: Setting) -> None:
    """It serves, and is not its own second choice."""
    setting.add("a", "m", silent=True)
    assert setting.targets() == ["a"]


async def test_the_models_of_a_silent_worker_stay_listed(setting: Setting) -> None:
    """Requests for them are served, so clients must find them."""
    setting.add("a", "m")
    setting.add("b", "n", silent=True)
    reply = setting.planner.plan(GatewayRequest("r", "GET", b"/v1/models", "/v1/models", b"", b""))
    assert isinstance(reply, Reply)
    assert b'"m"' in reply.body
    assert b'"n"' in reply.body


async def test_the_admin_port_shows_it(setting: Setting) -> None:
    """The reason in the view, 0 and 1 in the metric."""
    heard, silent = setting.add("a", "m"), setting.add("b", "m", silent=True)
    views = [view_worker(worker, setting.index, 0.0) for worker in (heard, silent)]
    assert [view.silent_reason for view in views] == [None, "the event stream is silent"]
    collector = MetricsCollector(setting.fleet, setting.index, GatewayStats(), setting.planner, started_s=0.0)
    (metric,) = [metric for metric in collector.collect() if metric.name == "kvatlas_worker_silent"]
    assert {sample.labels["worker"]: sample.value for sample in metric.samples} == {"a:1": 0.0, "b:1": 1.0}
