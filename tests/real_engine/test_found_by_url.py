"""Real engines given as nothing but a URL: their answers are what discovery and the silence watch were written for."""

import asyncio

import aiohttp

from kvatlas.config import WorkerConfig
from kvatlas.fleet import EventAddress, Trust
from support.engines import fleet_of, until
from support.real_vllm import BLOCK_SIZE_TOKENS, MODEL_NAME, RealVllm

SHORT_TOKENS = BLOCK_SIZE_TOKENS - 1


def test_streams_are_found_and_short_prompts_are_no_silence(two_engines: tuple[RealVllm, RealVllm]) -> None:
    """The answer of /kv_event_sources leads to the sockets; prompts below a block move counters, and nobody is alarmed."""
    # Tokens enough for 38 blocks, if they were one prompt's.
    assert asyncio.run(_computed_unalarmed(two_engines)) == 40 * SHORT_TOKENS


async def _computed_unalarmed(engines: tuple[RealVllm, RealVllm]) -> float:
    workers = [WorkerConfig(url=engine.base_url) for engine in engines]
    async with (
        fleet_of(*workers, health_interval_s=0.2, silent_stream_s=0.5) as (fleet, index),
        aiohttp.ClientSession(engines[0].base_url) as client,
    ):
        await until(lambda: all(worker.trust.level is Trust.SYNCED for worker in fleet.workers), "synced")
        assert [worker.events_at for worker in fleet.workers] == [
            EventAddress(engine.events_endpoint, engine.replay_endpoint) for engine in engines
        ]
        first = fleet.workers[0]
        assert index.block_size(first.worker_id) == BLOCK_SIZE_TOKENS
        assert first.gauges.started_s is not None
        assert first.gauges.traffic is not None
        before = first.gauges.traffic
        for number in range(40):
            body = {"model": MODEL_NAME, "prompt": [number + 5] * SHORT_TOKENS, "max_tokens": 1}
            async with client.post("/v1/completions", json=body) as response:
                assert response.status == 200
        await asyncio.sleep(2.0)
        assert first.trust.level is Trust.SYNCED
        return first.gauges.traffic.computed_tokens - before.computed_tokens
