"""A fleet that starts from a snapshot of another fleet: whose past it is, and what becomes of parts nobody has taken."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvatlas.clock import SystemClock
from kvatlas.config import ServeConfig, WorkerConfig
from kvatlas.fleet import Fleet, Trust, WarmStart, fleet_snapshot
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex, Snapshot, read_snapshot
from support.engines import BLOCK, Pages, Stream, fleet_of, serving, until

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]


def worker_of(engine: Pages, stream: Stream, *, found: bool, replay: bool = False) -> WorkerConfig:
    """A worker whose events are configured, or told by the engine."""
    source = stream.source if replay else stream.source | {"replay_endpoint": None}
    engine.sources = {"0": source} if found else None
    if found:
        return WorkerConfig(url=engine.url)
    return WorkerConfig(
        url=engine.url,
        events=f"tcp://127.0.0.1:{stream.port}",
        replay=f"tcp://127.0.0.1:{stream.replay_port}" if replay else None,
    )


def take(fleet: Fleet, index: PrefixIndex) -> Snapshot:
    return read_snapshot(b"".join(fleet_snapshot(fleet, index, SystemClock())), "it")


@asynccontextmanager
async def started_from(snapshot: Snapshot, *workers: WorkerConfig) -> AsyncIterator[tuple[Fleet, PrefixIndex]]:
    """A running fleet that starts from a snapshot."""
    index, clock = PrefixIndex(BlockKeyHasher(1)), SystemClock()
    config = ServeConfig(workers=workers, health_interval_s=0.02)
    fleet = Fleet(config, index, clock, warm_start=WarmStart(snapshot, "it", clock))
    await fleet.start()
    try:
        yield fleet, index
    finally:
        await fleet.close()


def claims(index: PrefixIndex, worker_id: str, number: int) -> tuple[int, int]:
    """Tokens of block `number` held, and held in doubt."""
    match = index.match([number] * BLOCK + [0], worker_ids=[worker_id]).get(worker_id)
    return (match.hit_tokens, match.doubted_tokens) if match else (0, 0)


@pytest.mark.parametrize("found", [False, True])
@pytest.mark.parametrize("replaced", [False, True])
async def test_the_engines_start_time_tells_whose_past_it_is(replaced: bool, found: bool) -> None:
    """Without replay the past is doubted while the process may be the same, and forgotten when it is another one."""
    engine, stream = Pages(), Stream()
    async with serving(engine):
        config = worker_of(engine, stream, found=found)
        async with fleet_of(config) as (fleet, index):
            (worker,) = fleet.workers
            await until(lambda: worker.stream is not None and worker.stream.connections == 1, "connected")
            while claims(index, worker.worker_id, 1) == (0, 0):  # the subscription must reach the publisher
                stream.store(1)
                await asyncio.sleep(0.02)
            snapshot = take(fleet, index)
        assert snapshot.workers[0].state.engine_started_s == 1_000.0
        if replaced:
            engine.started_s = 2_000.0
        async with started_from(snapshot, config) as (fleet, index):
            (worker,) = fleet.workers
            expected = (0, 0) if replaced else (0, BLOCK)
            await until(lambda: claims(index, worker.worker_id, 1) == expected, f"claims {expected}")
            await until(lambda: worker.trust.level is Trust.SYNCING, "connected")
            await asyncio.sleep(0.1)
            assert claims(index, worker.worker_id, 1) == expected
    stream.close()


async def test_parts_nobody_has_taken_are_handed_on() -> None:
    """The engine is not there at the start: the next snapshot still says what the last one did."""
    engine, stream = Pages(), Stream()
    async with serving(engine):
        config = worker_of(engine, stream, found=True, replay=True)
        async with fleet_of(config) as (fleet, index):
            (worker,) = fleet.workers
            stream.store(1)
            await until(lambda: claims(index, worker.worker_id, 1) == (BLOCK, 0), "the block")
            snapshot = take(fleet, index)
        engine.status = 503
        async with started_from(snapshot, config) as (fleet, index):
            assert take(fleet, index).workers == snapshot.workers
        async with started_from(snapshot) as (fleet, index):
            assert take(fleet, index).workers == snapshot.workers
            engine.status = 200
            worker = fleet.add(config)
            await until(lambda: worker.trust.level is Trust.SYNCED, "synced")
            assert claims(index, worker.worker_id, 1) == (BLOCK, 0)
            assert len(take(fleet, index).workers) == 1
    stream.close()
