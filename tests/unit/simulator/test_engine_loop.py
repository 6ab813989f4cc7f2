"""The engine's loop on a clock that moves only when the engine waits."""

import asyncio

import pytest

from kvatlas.clock import ManualClock
from kvatlas.errors import KvAtlasError
from kvatlas.events import BlockStored
from kvatlas.simulator import (
    EngineConfig,
    EngineCore,
    EngineMetrics,
    LatencyConfig,
    OutputStream,
    ReplySampler,
    SamplingParams,
    SimulatedEngine,
)

STEP = LatencyConfig(prefill_tokens_per_s=1000.0, decode_step_s=0.010, decode_per_request_s=0.0, step_overhead_s=0.0)


class Publisher:
    """Keeps the batches."""

    def __init__(self):
        self.batches = []

    def publish(self, batch):
        """See the class."""
        self.batches.append(batch)


class Bench:
    """An engine on a manual clock; waiting moves the clock and lets others run."""

    def __init__(self, **config):
        self.clock = ManualClock()
        self.config = EngineConfig(block_size=4, num_blocks=65, max_model_len=256, latency=STEP, **config)
        self.core = EngineCore(self.config, ReplySampler(range(100, 200), eos_token_id=None))
        self.metrics = EngineMetrics(self.config, self.core.scheduler)
        self.publisher = Publisher()
        self.engine = SimulatedEngine(
            self.core, self.metrics, publisher=self.publisher, clock=self.clock, sleep=self._sleep
        )

    async def _sleep(self, seconds):
        self.clock.advance(seconds)
        await asyncio.sleep(0)

    async def __aenter__(self):
        self.engine.start()
        return self

    async def __aexit__(self, *_):
        await self.engine.close()


async def collect(stream):
    """All outputs of a stream."""
    return [output async for outputs in stream for output in outputs]


@pytest.mark.asyncio
async def test_time_of_a_request():
    """A prompt of 100 tokens at 1000 a second and four more tokens at 10 ms each: 0.14 s."""
    async with Bench() as bench:
        outputs = await collect(bench.engine.add_request("a", range(100), SamplingParams(max_tokens=5)))
        assert len(outputs) == 5
        assert bench.clock.monotonic_s() == pytest.approx(0.140)
        assert outputs[0].request.first_token_s == pytest.approx(0.100)


@pytest.mark.asyncio
async def test_a_hit_saves_its_prefill():
    """The same prompt again computes one block instead of 25."""
    async with Bench() as bench:
        await collect(bench.engine.add_request("a", range(100), SamplingParams(max_tokens=1)))
        start_s = bench.clock.monotonic_s()
        outputs = await collect(bench.engine.add_request("b", range(100), SamplingParams(max_tokens=1)))
        assert outputs[0].request.cached_tokens == 96
        assert bench.clock.monotonic_s() - start_s == pytest.approx(0.004)


@pytest.mark.asyncio
async def test_time_scale_shortens_the_wait():
    """At a scale of 0.5 everything takes half as long."""
    async with Bench() as bench:
        bench.core.latency._config = LatencyConfig(prefill_tokens_per_s=1000.0, step_overhead_s=0.0, time_scale=0.5)
        await collect(bench.engine.add_request("a", range(100), SamplingParams(max_tokens=1)))
        assert bench.clock.monotonic_s() == pytest.approx(0.050)


@pytest.mark.asyncio
@pytest.mark.parametrize(("async_scheduling", "batches"), [(False, [[2], [1], [1]]), (True, [[2, 1], [1]])])
async def test_one_event_batch_per_step(async_scheduling, batches):
    """Each step that completed blocks is one batch, stamped with the wall clock at the step's end.

    With overlapping steps the first batch also holds what the second step, already planned, completes.
    """
    async with Bench(max_num_batched_tokens=8, async_scheduling=async_scheduling) as bench:
        await collect(bench.engine.add_request("a", range(12), SamplingParams(max_tokens=6)))
        stores = [[len(event.block_hashes) for event in batch.events] for batch in bench.publisher.batches]
        assert stores == batches
        assert all(isinstance(event, BlockStored) for batch in bench.publisher.batches for event in batch.events)
        assert bench.publisher.batches[0].ts == pytest.approx(1_700_000_000.008)


@pytest.mark.asyncio
async def test_several_requests_on_one_stream():
    """A stream ends when the last of its requests does."""
    async with Bench() as bench:
        stream = OutputStream()
        bench.engine.add_request("a", range(4), SamplingParams(max_tokens=2), stream=stream)
        bench.engine.add_request("b", range(4), SamplingParams(max_tokens=3, choice=1), stream=stream)
        outputs = await collect(stream)
        assert [output.request_id for output in outputs] == ["a", "b", "a", "b", "b"]


@pytest.mark.asyncio
async def test_abort_ends_the_stream():
    """An aborted request's stream ends, its blocks are free, and the abort is counted."""
    async with Bench() as bench:
        stream = bench.engine.add_request("a", range(20), SamplingParams(max_tokens=200))
        async for _ in stream:
            assert bench.engine.abort("a") or not stream.open_request_ids
        assert not bench.core.has_requests
        assert bench.core.scheduler.usage == 0
        page = bench.metrics.exposition().decode()
        assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="kvatlas-sim"} 1.0' in page


@pytest.mark.asyncio
async def test_a_dead_loop_tells_everybody(caplog):
    """When a step raises, those who wait get an error, and so do later requests; health says so."""
    async with Bench() as bench:
        stream = bench.engine.add_request("a", range(20), SamplingParams(max_tokens=200))
        bench.publisher.publish = None
        with pytest.raises(KvAtlasError, match="engine died"):
            await collect(stream)
        assert not bench.engine.is_healthy
        with pytest.raises(KvAtlasError, match="engine died"):
            bench.engine.add_request("b", range(20), SamplingParams())
    assert "loop died" in caplog.text


@pytest.mark.asyncio
async def test_metrics_follow_the_work():
    """Counters after a cold prompt of 96 tokens and the same again: scenario 65 in small, scenario 67 in its names."""
    async with Bench() as bench:
        for name in "ab":
            await collect(bench.engine.add_request(name, range(96), SamplingParams(max_tokens=3)))
        page = bench.metrics.exposition().decode()
    labels = '{engine="0",model_name="kvatlas-sim"}'
    expected = {
        "prefix_cache_queries_total": 192,
        "prefix_cache_hits_total": 92,
        "prompt_tokens_total": 192,
        "prompt_tokens_cached_total": 92,
        "generation_tokens_total": 6,
        "num_preemptions_total": 0,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "time_to_first_token_seconds_count": 2,
        "inter_token_latency_seconds_count": 4,
        "e2e_request_latency_seconds_count": 2,
    }
    for name, value in expected.items():
        assert f"vllm:{name}{labels} {float(value)}" in page
