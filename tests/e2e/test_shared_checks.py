"""Ranks behind one URL share its health checks: one round of questions an interval, whatever their number."""

import asyncio
import time

import pytest
from aiohttp import web

from kvatlas.config import WorkerConfig
from kvatlas.fleet import Fleet
from support.engines import BLOCK, Pages, fleet_of, serving, until

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

INTERVAL_S = 0.1


class Counted(Pages):
    """Counts rounds of questions, and tells a load of its own for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = {"health": 0, "models": 0, "metrics": 0}

    async def health(self, request: web.Request) -> web.Response:
        self.rounds["health"] += 1
        return await super().health(request)

    async def models(self, request: web.Request) -> web.Response:
        self.rounds["models"] += 1
        return await super().models(request)

    async def metrics(self, _: web.Request) -> web.Response:
        self.rounds["metrics"] += 1
        lines = ["process_start_time_seconds 1000.0"]
        for rank in range(4):
            lines += [
                f'vllm:num_requests_running{{engine="{rank}"}} {rank + 1}.0',
                f'vllm:cache_config_info{{engine="{rank}",block_size="{BLOCK}",num_gpu_blocks="{100 + rank}"}} 1.0',
            ]
        return web.Response(text="\n".join(lines) + "\n")


def ranks_of(engine: Pages, *ranks: int) -> list[WorkerConfig]:
    return [WorkerConfig(url=engine.url, rank=rank, events="none") for rank in ranks]


async def rounds_in(engine: Counted, intervals: int) -> float:
    """Rounds of questions an interval."""
    before, begun_s = engine.rounds["health"], time.monotonic()
    await asyncio.sleep(intervals * INTERVAL_S)
    return (engine.rounds["health"] - before) * INTERVAL_S / (time.monotonic() - begun_s)


async def test_four_ranks_are_one_round_an_interval_and_each_gets_its_own_gauges() -> None:
    """At the start as later; block counts and running requests are those of the rank."""
    engine = Counted()
    async with serving(engine), fleet_of(*ranks_of(engine, 0, 1, 2, 3), health_interval_s=INTERVAL_S) as (fleet, _):
        assert engine.rounds == {"health": 1, "models": 1, "metrics": 1}
        assert len(fleet.candidates("m")) == 4
        assert [worker.gauges.running_requests for worker in fleet.workers] == [1, 2, 3, 4]
        assert [worker.gauges.num_blocks for worker in fleet.workers] == [100, 101, 102, 103]
        assert await rounds_in(engine, 10) < 1.2  # pauses are between 0.9 and 1 interval
        await until(lambda: [worker.foreign_running for worker in fleet.workers] == [1, 2, 3, 4], "two scrapes")


async def test_all_ranks_fall_and_rise_with_their_engine() -> None:
    """Two failed rounds take every rank out, one good round brings every rank back."""
    engine = Counted()
    async with serving(engine), fleet_of(*ranks_of(engine, 0, 1), health_interval_s=INTERVAL_S) as (fleet, _):
        engine.status = 503
        rounds = engine.rounds["health"]
        await until(lambda: not fleet.ready, "both out")
        assert engine.rounds["health"] == rounds + 2
        assert [worker.failed_checks for worker in fleet.workers] == [2, 2]
        engine.status = 200
        await until(lambda: len(fleet.candidates("m")) == 2, "both back")


async def test_ranks_come_and_go_while_the_checks_go_on() -> None:
    """A new rank is checked at once, not an interval later; the last that goes ends the questions."""
    engine = Counted()
    async with serving(engine), fleet_of(*ranks_of(engine, 0, 1), health_interval_s=30.0) as (fleet, index):
        (config,) = ranks_of(engine, 2)
        added = fleet.add(config)
        await until(lambda: added.healthy, "the new rank", seconds=5)
        assert added.gauges.num_blocks == 102
        await fleet.remove(f"{added.host}:{added.port}#0")
        rounds = engine.rounds["health"]
        fleet.check_soon(added.worker_id)
        await until(lambda: engine.rounds["metrics"] == rounds + 1, "the others are checked on")
        assert len(fleet.candidates("m")) == 2
        for worker in fleet.workers:
            await fleet.remove(worker.worker_id)
        assert (checks(), index.worker_ids) == (0, ())
        fleet.add(config)
        await until(lambda: len(fleet.candidates("m")) == 1, "checked anew")


async def test_a_rank_removed_while_its_engine_is_asked_stays_removed() -> None:
    """The answer comes when the rank has gone: nothing of it is used, the other rank is not disturbed."""
    engine = Counted()
    async with serving(engine), fleet_of(*ranks_of(engine, 0, 1), health_interval_s=30.0) as (fleet, _):
        gone, stays = fleet.workers
        engine.hangs = True
        fleet.check_soon(stays.worker_id)
        await until(lambda: engine.rounds["health"] == 2, "asked")
        await fleet.remove(gone.worker_id)
        await until(lambda: stays.failed_checks == 1, "no answer in time")
        assert gone.failed_checks == 0
        assert fleet.candidates("m") == [stays]


async def test_what_fails_for_one_rank_is_no_failure_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours in one rank's part of a check takes that rank out alone."""
    engine = Counted()
    learn = Fleet._learn_cache

    def stumble(fleet: Fleet, worker_id: str, block_size: int | None, num_blocks: int | None) -> None:
        if worker_id.endswith("#1"):
            raise RuntimeError("stumbled")
        learn(fleet, worker_id, block_size, num_blocks)

    monkeypatch.setattr(Fleet, "_learn_cache", stumble)
    async with serving(engine), fleet_of(*ranks_of(engine, 0, 1, 2)) as (fleet, _):
        assert [worker.config.rank for worker in fleet.candidates("m")] == [0, 2]
        assert "stumbled" in fleet.workers[1].health_reason


def checks() -> int:
    """Tasks that check an engine."""
    return sum(task.get_name().startswith("health ") for task in asyncio.all_tasks())
