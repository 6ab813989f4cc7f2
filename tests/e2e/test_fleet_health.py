"""What the fleet learns of engines over HTTP: models, adapters, load, life; and a fleet that serves several models."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from kvatlas.clock import ManualClock, SystemClock
from kvatlas.config import ServeConfig, WorkerConfig
from kvatlas.errors import ConfigError, IndexStateError, ModelNotFound, NoWorkerAvailable
from kvatlas.fleet import Fleet
from kvatlas.gateway import GatewayConfig, GatewayRequest, GatewayServer, Reply
from kvatlas.gateway.fleet_planner import FleetPlanner
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex
from kvatlas.routing import DecisionLog, Picker, make_policy

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]


class Engine:
    """An engine's side pages, to be changed while it runs."""

    def __init__(self, *models: str) -> None:
        self.models: list[dict] = [{"id": model, "object": "model", "parent": None} for model in models]
        self.status = 200
        self.metrics = 'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="300"} 1.0\n'
        self.url = ""

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.status)

    async def model_list(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models})

    async def metrics_page(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics)


@asynccontextmanager
async def running(*engines: Engine) -> AsyncIterator[None]:
    runners = []
    for engine in engines:
        app = web.Application()
        app.router.add_get("/health", engine.health)
        app.router.add_get("/v1/models", engine.model_list)
        app.router.add_get("/metrics", engine.metrics_page)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        runners.append(runner)
    try:
        yield
    finally:
        for runner in runners:
            await runner.cleanup()


@asynccontextmanager
async def fleet_of(*engines: Engine, interval_s: float = 0.02) -> AsyncIterator[tuple[Fleet, PrefixIndex]]:
    index = PrefixIndex(BlockKeyHasher(1))
    config = ServeConfig(
        workers=tuple(WorkerConfig(url=engine.url) for engine in engines),
        health_interval_s=interval_s,
        health_failures=2,
    )
    fleet = Fleet(config, index, SystemClock())
    await fleet.start()
    try:
        yield fleet, index
    finally:
        await fleet.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


def make_planner(fleet: Fleet, index: PrefixIndex, session: aiohttp.ClientSession) -> FleetPlanner:
    log = DecisionLog(10)
    picker = Picker(make_policy("cost"), ManualClock(), log)
    return FleetPlanner(
        fleet, index, picker, log, renderers={}, session=session, config=ServeConfig(render_timeout_s=1.0)
    )


def get(path: str) -> GatewayRequest:
    return GatewayRequest("r", "GET", path.encode(), path, b"", b"")


def completion(model: str) -> GatewayRequest:
    body = b'{"model":"%b","prompt":[1,2,3]}' % model.encode()
    return GatewayRequest("r", "POST", b"/v1/completions", "/v1/completions", b"", body)


async def test_first_check_tells_models_block_size_and_load() -> None:
    """One round before the first request: name, block size, load that is not ours (after two scrapes agree)."""
    engine = Engine("m")
    engine.metrics += 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1.0\n'
    async with running(engine), fleet_of(engine) as (fleet, index):
        (worker,) = fleet.candidates("m")
        assert fleet.ready
        assert index.block_size(worker.worker_id) == 32
        await until(lambda: (worker.foreign_running, worker.foreign_waiting) == (2, 1))


async def test_failures_in_a_row_take_a_worker_out_and_one_success_brings_it_back() -> None:
    """A single failed check changes nothing; two do; the next good one heals."""
    engine = Engine("m")
    async with running(engine), fleet_of(engine, interval_s=30.0) as (fleet, _):
        (worker,) = fleet.workers
        monitor = fleet._running[worker.worker_id].monitor
        engine.status = 503
        await monitor.check()
        assert fleet.candidates("m") == [worker]
        await monitor.check()
        assert fleet.candidates("m") == []
        assert "503" in worker.health_reason
        engine.status = 200
        await monitor.check()
        assert fleet.candidates("m") == [worker]


async def test_metrics_page_that_comes_in_pieces_is_read_whole() -> None:
    """Real pages are large: what arrives late counts as well."""
    engine = Engine("m")

    async def in_pieces(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"# HELP first piece\n")
        await asyncio.sleep(0.05)
        await response.write(b'vllm:num_requests_running{engine="0"} 42.0\n' + engine.metrics.encode())
        return response

    engine.metrics_page = in_pieces  # type: ignore[method-assign]
    async with running(engine), fleet_of(engine, interval_s=30.0) as (fleet, index):
        assert fleet.workers[0].gauges.running_requests == 42
        assert index.block_size(fleet.workers[0].worker_id) == 32


async def test_a_check_that_fails_in_itself_is_a_failed_check_and_is_repeated() -> None:
    """No answer of an engine ends its monitor: it is unhealthy, then healthy again."""
    engine = Engine("m")
    async with running(engine), fleet_of(engine) as (fleet, _):
        (worker,) = fleet.workers
        monitor = fleet._running[worker.worker_id].monitor
        good, monitor.check = monitor.check, _stumble  # type: ignore[method-assign]
        await until(lambda: not worker.healthy)
        assert "stumbled" in worker.health_reason
        monitor.check = good  # type: ignore[method-assign]
        await until(lambda: worker.healthy)


async def _stumble() -> None:
    raise RuntimeError("stumbled")


async def test_model_whose_engines_are_down_is_503() -> None:
    """A model that exists is not "not found": clients retry a 503."""
    down, up = Engine("a"), Engine("b")
    async with running(down, up), fleet_of(down, up) as (fleet, index), aiohttp.ClientSession() as session:
        down.status = 500
        await until(lambda: len(fleet.candidates(None)) == 1)
        with pytest.raises(NoWorkerAvailable, match="answered 500"):
            make_planner(fleet, index, session).plan(completion("a"))


async def test_ranks_of_one_url_are_told_apart_and_pinned() -> None:
    """Each rank is a worker with its header, rank 0 too; one URL twice without ranks is refused."""
    engine = Engine("m")
    async with running(engine), fleet_of() as (fleet, index), aiohttp.ClientSession() as session:
        for rank in (0, 1):
            fleet.add(WorkerConfig(url=engine.url, rank=rank))
        await until(lambda: len(fleet.candidates("m")) == 2)
        headers = {target.headers for target in make_planner(fleet, index, session).plan(completion("m")).targets}
        assert headers == {((b"X-data-parallel-rank", b"0"),), ((b"X-data-parallel-rank", b"1"),)}
        with pytest.raises(ConfigError, match="give rank="):
            fleet.add(WorkerConfig(url=engine.url))


async def test_engine_without_metrics_or_models_still_serves() -> None:
    """Alive is alive: what cannot be read is named in the reason, and such a worker takes any model."""
    engine = Engine()
    engine.models = "nonsense"  # type: ignore[assignment]
    async with running(engine), fleet_of(engine) as (fleet, _):
        (worker,) = fleet.candidates("whatever")
        assert "cannot be read" in worker.health_reason


async def test_adapter_loaded_while_running_is_found() -> None:
    """A LoRA adapter that the engine loads later is served from the next check on, and known as an adapter."""
    engine = Engine("base")
    async with running(engine), fleet_of(engine) as (fleet, _):
        assert fleet.candidates("style") == []
        engine.models.append({"id": "style", "object": "model", "parent": "base"})
        await until(lambda: bool(fleet.candidates("style")))
        assert fleet.workers[0].adapters == {"style"}


async def test_models_of_a_mixed_fleet_are_listed_together_and_routed_apart() -> None:
    """/v1/models names every model once; each request goes to a worker that serves its model; others get 404."""
    one, two = Engine("a", "shared"), Engine("shared", "b")
    async with running(one, two), fleet_of(one, two) as (fleet, index), aiohttp.ClientSession() as session:
        planner = make_planner(fleet, index, session)
        reply = planner.plan(get("/v1/models"))
        assert isinstance(reply, Reply)
        server = GatewayServer(GatewayConfig(port=0), planner, SystemClock())
        port = await server.start()
        async with session.get(f"http://127.0.0.1:{port}/v1/models") as response:
            assert response.status == 200
            assert [card["id"] for card in (await response.json())["data"]] == ["a", "b", "shared"]
        await server.close(1.0)
        assert [target.worker_id for target in planner.plan(completion("b")).targets] == [
            two.url.removeprefix("http://")
        ]
        assert len(planner.plan(completion("shared")).targets) == 2
        with pytest.raises(ModelNotFound, match="a, b, shared"):
            planner.plan(completion("c"))


async def test_nobody_healthy_is_503_with_every_reason() -> None:
    """The error names each worker and what is wrong with it."""
    engine = Engine("m")
    engine.status = 500
    async with running(engine), fleet_of(engine) as (fleet, index), aiohttp.ClientSession() as session:
        await until(lambda: not fleet.ready)
        with pytest.raises(NoWorkerAvailable, match="GET /health answered 500"):
            make_planner(fleet, index, session).plan(completion("m"))


async def test_workers_come_and_go() -> None:
    """A worker may be added and removed while running; twice the same, or an unknown one, is refused."""
    first, second = Engine("m"), Engine("m")
    async with running(first, second), fleet_of(first) as (fleet, index):
        fleet.add(WorkerConfig(url=second.url))
        await until(lambda: len(fleet.candidates("m")) == 2)
        with pytest.raises(ConfigError, match="given twice"):
            fleet.add(WorkerConfig(url=second.url))
        worker_id = fleet.workers[0].worker_id
        await fleet.remove(worker_id)
        assert worker_id not in index.worker_ids
        assert len(fleet.candidates("m")) == 1
        with pytest.raises(IndexStateError, match="known workers"):
            await fleet.remove(worker_id)
