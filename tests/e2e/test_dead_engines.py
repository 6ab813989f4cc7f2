"""Engines that die, hang, fall silent or are replaced: noticed within the times that docs/trust.md states."""

import asyncio
import socket
import time
from collections.abc import Callable

import aiohttp
import pytest

from kvatlas.config import WorkerConfig
from kvatlas.fleet import Fleet, Trust, Worker
from kvatlas.index import PrefixIndex
from kvatlas.simulator import EngineConfig, LatencyConfig, ServedEngine
from support.engines import BLOCK, Pages, Stream, fleet_of, serving, until

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

INTERVAL_S = TIMEOUT_S = 0.4
SLACK_S = 0.4  # two busy cores
SILENT_S = 0.3


def hit(index: PrefixIndex, worker: Worker, number: int) -> int:
    match = index.match([*[number] * BLOCK, 7]).get(worker.worker_id)
    return match.hit_tokens if match else 0


def configured(engine: Pages, stream: Stream, *, replay: bool) -> WorkerConfig:
    return WorkerConfig(
        url=engine.url,
        events=f"tcp://127.0.0.1:{stream.port}",
        replay=f"tcp://127.0.0.1:{stream.replay_port}" if replay else None,
    )


async def seconds_until_out(fleet: Fleet) -> float:
    begun_s = time.monotonic()
    await until(lambda: not fleet.candidates(None), "no candidate")
    return time.monotonic() - begun_s


async def test_an_engine_that_refuses_connections_is_out_in_one_interval_and_a_quarter() -> None:
    """No TCP: one failed check, another a quarter of the interval later, no traffic."""
    engine = Pages()
    async with serving(engine):
        fleet_context = fleet_of(WorkerConfig(url=engine.url), health_interval_s=INTERVAL_S, health_timeout_s=TIMEOUT_S)
        fleet, _ = await fleet_context.__aenter__()
        assert fleet.ready
    try:
        assert await seconds_until_out(fleet) < INTERVAL_S * 1.25 + SLACK_S
    finally:
        await fleet_context.__aexit__(None, None, None)


@pytest.mark.parametrize("fault", ["503", "hang"])
async def test_an_engine_that_fails_its_health_checks_is_out_in_time(fault: str) -> None:
    """A refusal costs no waiting, a hang two timeouts; one good answer brings the engine back."""
    engine = Pages()
    settings = {"health_interval_s": INTERVAL_S, "health_timeout_s": TIMEOUT_S}
    async with serving(engine), fleet_of(WorkerConfig(url=engine.url), **settings) as (fleet, _):
        assert fleet.ready
        engine.status, engine.hangs = (503, False) if fault == "503" else (200, True)
        bound_s = INTERVAL_S * 1.25 + (2 * TIMEOUT_S if fault == "hang" else 0.0)
        assert await seconds_until_out(fleet) < bound_s + SLACK_S
        engine.status, engine.hangs = 200, False
        await until(lambda: fleet.ready, "back")


async def test_engines_that_hang_do_not_delay_the_checks_of_the_others() -> None:
    """A hundred and twenty hanging engines beside a good one: its checks go on before any of theirs ends."""
    good = Pages()
    hanging = socket.create_server(("127.0.0.1", 0), backlog=1024)  # connects, and nobody ever answers
    url = f"http://127.0.0.1:{hanging.getsockname()[1]}"
    settings = {"health_interval_s": 0.2, "health_timeout_s": 8.0}
    with hanging:
        async with serving(good), fleet_of(WorkerConfig(url=good.url, events="none"), **settings) as (fleet, _):
            for number in range(120):
                fleet.add(WorkerConfig(url=f"{url}/{number}", events="none"))
            await asyncio.sleep(0.3)  # all of them are asked by now
            before = good.scraped
            await until(lambda: good.scraped >= before + 3, "three checks", seconds=6.0)
            assert fleet.workers[0].healthy


async def traffic(engine: Pages, tokens: int, requests: int, until_true: Callable[[], bool]) -> float:
    """Move the engine's counters every 20 ms until something is true; seconds it took."""
    begun_s = time.monotonic()
    while not until_true():
        assert time.monotonic() - begun_s < 10, "waited 10 s in vain"
        engine.computed += tokens
        engine.ended += requests
        await asyncio.sleep(0.02)
    return time.monotonic() - begun_s


@pytest.mark.parametrize("replay", [False, True])
async def test_an_engine_whose_stream_is_silent_while_it_works_is_out_in_time(replay: bool) -> None:
    """Connected, blocks stored by the counters, nothing comes, no replay: no credit and no candidate, till a batch."""
    engine, other, stream = Pages(), Pages(), Stream()
    async with serving(engine, other):
        workers = configured(engine, stream, replay=replay), WorkerConfig(url=other.url, events="none")
        async with fleet_of(*workers, silent_stream_s=SILENT_S) as (fleet, index):
            worker, unheard = fleet.workers
            await until(lambda: worker.stream is not None and worker.stream.connections == 1, "connected")
            await stream.subscribed()
            stream.store(1)
            await until(lambda: hit(index, worker, 1) == BLOCK, "the block")
            assert worker.trust.level is Trust.SYNCED
            stream.mute = replay
            took_s = await traffic(engine, 20 * BLOCK, 1, lambda: fleet.candidates("m") == [unheard])
            assert SILENT_S <= took_s < SILENT_S + 2 * 0.02 + SLACK_S
            assert worker.trust.level is Trust.STALE
            assert "silent while the engine works" in worker.trust.reason
            other.status = 503
            await until(lambda: fleet.candidates("m") == [worker], "a candidate again, since nobody else is healthy")
            other.status = 200
            await until(lambda: fleet.candidates("m") == [unheard], "out again")
            stream.mute = False
            stream.store(2)
            await until(lambda: worker.trust.level is Trust.SYNCED, "believed again, since no number is missing")
            assert hit(index, worker, 2) == BLOCK
            assert len(fleet.candidates("m")) == 2
    stream.close()


async def test_the_tail_is_asked_for_before_a_stream_is_called_silent() -> None:
    """Batches that were published and not heard come by the poll that doubt sends: no alarm, nothing lost."""
    engine, stream = Pages(), Stream()
    async with serving(engine):
        following = fleet_of(configured(engine, stream, replay=True), silent_stream_s=SILENT_S)
        async with following as (fleet, index):
            (worker,) = fleet.workers
            await until(lambda: worker.trust.level is Trust.SYNCED, "synced")
            stream.store(1, heard=False)
            await traffic(engine, 20 * BLOCK, 1, lambda: hit(index, worker, 1) == BLOCK)
            assert worker.trust.level is Trust.SYNCED
    stream.close()


async def test_traffic_that_stores_nothing_is_no_silence() -> None:
    """Decoding, cached prompts, prompts of less than a block: hundreds of them, and the stream stays believed."""
    engine, stream = Pages(), Stream()
    async with serving(engine):
        following = fleet_of(configured(engine, stream, replay=True), silent_stream_s=0.05)
        async with following as (fleet, _):
            (worker,) = fleet.workers
            await until(lambda: worker.trust.level is Trust.SYNCED, "synced")
            end_s = time.monotonic() + 0.6
            await traffic(engine, 9 * (BLOCK - 1), 9, lambda: time.monotonic() > end_s)
            assert worker.trust.level is Trust.SYNCED
    stream.close()


async def test_another_process_at_the_same_address_is_another_life() -> None:
    """The pod is replaced and nothing in the stream shows it: the start time in the metrics does; all is forgotten."""
    engine, stream = Pages(), Stream()
    async with serving(engine), fleet_of(configured(engine, stream, replay=True)) as (fleet, index):
        (worker,) = fleet.workers
        stream.store(1)
        await until(lambda: hit(index, worker, 1) == BLOCK, "the block")
        stream.batches.clear()  # what replay has now is the new pod's
        stream.store(2)
        engine.started_s = 2_000.5
        await until(lambda: hit(index, worker, 1) == 0 and hit(index, worker, 2) == BLOCK, "only the new pod's block")
        await until(lambda: worker.trust.level is Trust.SYNCED, "synced")
        assert worker.source is not None
        assert worker.source.stats.lives >= 2
    stream.close()


async def test_counters_that_go_back_are_another_life_where_no_start_time_is_told() -> None:
    """Without process_start_time_seconds the engine's own counters tell: they never fall in one life."""
    engine, stream = Pages(), Stream()
    engine.started_s, engine.computed = None, 5_000
    async with serving(engine), fleet_of(configured(engine, stream, replay=True)) as (fleet, index):
        (worker,) = fleet.workers
        stream.store(1)
        await until(lambda: hit(index, worker, 1) == BLOCK, "the block")
        stream.batches.clear()
        engine.computed = 10
        await until(lambda: hit(index, worker, 1) == 0, "forgotten")
        assert worker.source is not None
        assert worker.source.stats.lives == 2
    stream.close()


async def test_a_restart_that_the_stream_told_is_not_told_twice() -> None:
    """What was learnt of the new life before the metrics showed it stays known, without replay too."""
    engine, old = Pages(), Stream()
    async with (
        serving(engine),
        fleet_of(configured(engine, old, replay=False), health_timeout_s=30.0) as (fleet, index),
    ):
        (worker,) = fleet.workers
        await old.subscribed()
        old.store(1)
        await until(lambda: hit(index, worker, 1) == BLOCK, "the old block")
        await engine.scrapes(2)  # a check sees the old life with its batch
        engine.hangs = True
        await until(lambda: engine.hanging > 0, "a check that ends in the new life")
        old.close()
        await until(lambda: worker.trust.level is Trust.STALE, "gone")
        new = await Stream.at(old.port)
        await new.subscribed()
        new.store(2)
        await until(lambda: hit(index, worker, 2) == BLOCK, "the new block")
        engine.started_s, engine.hangs = 2_000.0, False
        await engine.scrapes(3)
        assert (hit(index, worker, 1), hit(index, worker, 2)) == (0, BLOCK)
        assert worker.trust.level is Trust.SYNCED
    new.close()


async def test_a_simulated_engine_that_falls_silent() -> None:
    """Real counters, real traffic: live and replay are gone, HTTP works; stale, and back when the stream is."""
    config = EngineConfig(latency=LatencyConfig(time_scale=0.0))
    async with ServedEngine(config) as engine:
        assert engine.address is not None
        base_url = engine.address.base_url
        async with (
            fleet_of(WorkerConfig(url=base_url), health_interval_s=0.05, silent_stream_s=SILENT_S) as (fleet, _),
            aiohttp.ClientSession(base_url) as client,
        ):
            (worker,) = fleet.workers
            await until(lambda: worker.trust.level is Trust.SYNCED, "synced")

            async def complete(number: int) -> None:
                body = {"prompt": [number % 200 + 1] * 100, "max_tokens": 1}
                async with client.post("/v1/completions", json=body) as response:
                    assert response.status == 200

            for fault in ({"fault": "silence"}, {"fault": "replay", "mode": "refused"}):
                async with client.post("/sim/faults", json=fault) as response:
                    assert response.status == 200
            begun_s, number = time.monotonic(), 0
            while worker.trust.level is not Trust.STALE:
                assert time.monotonic() - begun_s < 10
                number += 1
                await complete(number)
                await asyncio.sleep(0.01)
            assert "silent while the engine works" in worker.trust.reason
            async with client.delete("/sim/faults") as response:
                assert response.status == 200
            await complete(number + 1)
            await until(lambda: worker.trust.level is Trust.SYNCED, "synced again, by replay")
