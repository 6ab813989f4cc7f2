"""Data-parallel ranks behind one port: caches, event streams, labels, and who gets a request."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import pytest
import zmq
import zmq.asyncio

from kvatlas.errors import ConfigError
from kvatlas.events import BlockStored, decode_batch
from kvatlas.simulator import EngineConfig, EventsConfig, LatencyConfig, ServedEngine, SimulatedFleet, config_for_engine

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

FAST = LatencyConfig(time_scale=0.0)
TWO = EngineConfig(data_parallel_size=2, latency=FAST)
PROMPT = list(range(100, 164))


@asynccontextmanager
async def serving(config):
    """A server and a session on it."""
    async with ServedEngine(config) as served, aiohttp.ClientSession(served.address.base_url) as session:
        yield served, session


async def complete(session, prompt=PROMPT, rank=None, **body):
    """Status and body of a completion, sent to a rank if one is named."""
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    async with session.post("/v1/completions", json={"prompt": prompt, **body}, headers=headers) as response:
        return response.status, await response.json()


async def cached(session, **request):
    """Cached tokens of a completion that must succeed."""
    status, body = await complete(session, **request)
    assert status == 200
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


async def sample(session, name):
    """One sample of /metrics."""
    async with session.get("/metrics") as response:
        for line in (await response.text()).splitlines():
            if line.startswith(f"vllm:{name} "):
                return float(line.rpartition(" ")[2])
    raise AssertionError(f"no vllm:{name}")


async def test_each_rank_has_a_cache_of_its_own():
    """What one rank has cached is cold on the other; both are labelled by their rank."""
    async with serving(TWO) as (_, session):
        assert [await cached(session, rank=rank) for rank in (0, 0, 1, 1)] == [0, 48, 0, 48]
        for rank in "01":
            assert await sample(session, f'prefix_cache_hits_total{{engine="{rank}",model_name="kvatlas-sim"}}') == 48
        page = await (await session.get("/metrics")).text()
        assert page.count("vllm:cache_config_info{") == 2
        assert 'num_gpu_blocks="8192"' in page


async def test_rank_header():
    """Scenario 71: a rank that is no integer is ignored, one that does not exist is refused."""
    async with serving(TWO) as (_, session):
        assert (await complete(session, rank="abc"))[0] == 200
        for rank in (99, 2, -1):
            status, body = await complete(session, rank=rank)
            assert status == 400
            assert "out of range" in body["error"]["message"]


async def test_event_sources_and_streams():
    """Scenarios 60 and 72: a source for each rank; each stream counts by itself and names its rank."""
    async with serving(TWO) as (served, session):
        sources = await (await session.get("/kv_event_sources")).json()
        assert sorted(sources) == ["0", "1"]
        assert [source["endpoint"] for source in sources.values()] == [e for e, _ in served.address.rank_endpoints]
        with zmq.asyncio.Context() as context:
            for rank in (0, 1):
                socket = context.socket(zmq.DEALER)
                socket.connect(sources[str(rank)]["replay_endpoint"])
                for number in range(rank + 1):
                    await cached(session, prompt=[rank * 10 + number] * 40, rank=rank, max_tokens=1)
                await asyncio.sleep(0.3)  # the publisher's own thread has sent them by then
                await socket.send_multipart([b"", (0).to_bytes(8, "big")])
                seqs = []
                while (frames := await asyncio.wait_for(socket.recv_multipart(), 5))[2] != b"\xff" * 8:
                    seqs.append(int.from_bytes(frames[2], "big"))
                    batch = decode_batch(frames[3]).batch
                    assert batch.data_parallel_rank == rank
                    assert all(isinstance(event, BlockStored) for event in batch.events)
                assert seqs == list(range(rank + 1))
                socket.close(linger=0)


async def test_fixed_ports_count_up():
    """Scenario 72: ranks take the configured event ports and the ones above; a fleet spaces its engines by them."""
    first = EngineConfig(
        data_parallel_size=2, events=EventsConfig(endpoint="tcp://*:5557", replay_endpoint="tcp://*:6557")
    )
    second = config_for_engine(first, 1)
    assert (second.events.endpoint, second.events.replay_endpoint) == ("tcp://*:5559", "tcp://*:6559")
    crowded = EngineConfig(
        data_parallel_size=2,
        events=EventsConfig(endpoint="tcp://127.0.0.1:5557", replay_endpoint="tcp://127.0.0.1:5558"),
    )
    with pytest.raises(ConfigError, match="5558"):
        SimulatedFleet(1, crowded)


async def test_the_balancer_evens_out():
    """Without a header requests go round while all ranks are equally loaded, and to the less loaded one otherwise."""
    slow = EngineConfig(data_parallel_size=2, latency=LatencyConfig(decode_step_s=0.02))
    async with serving(slow) as (served, session):
        busy = [
            asyncio.create_task(complete(session, rank=0, max_tokens=200, ignore_eos=True, stream=True))
            for _ in range(2)
        ]
        await asyncio.sleep(0.1)
        schedulers = [engine.core.scheduler for engine in served.ranks.engines]
        others = [asyncio.create_task(complete(session, max_tokens=200, ignore_eos=True)) for _ in range(4)]
        await asyncio.sleep(0.2)
        assert [scheduler.num_unfinished for scheduler in schedulers] == [3, 3]
        for task in (*busy, *others):
            task.cancel()
        await asyncio.gather(*busy, *others, return_exceptions=True)


async def test_choices_are_spread():
    """Each of the `n` replies to a prompt is a request of its own and may go to another rank."""
    async with serving(TWO) as (_, session):
        _, body = await complete(session, n=4, max_tokens=3, ignore_eos=True)
        assert len({choice["text"] for choice in body["choices"]}) == 4
        for rank in "01":
            assert (
                await sample(session, f'prefix_cache_queries_total{{engine="{rank}",model_name="kvatlas-sim"}}') == 128
            )


async def test_reset_concerns_all_ranks():
    """`success` is that of all: one busy rank is enough to refuse, though the idle one was reset."""
    async with serving(EngineConfig(data_parallel_size=2)) as (_, session):
        await cached(session, rank=0)
        busy = asyncio.create_task(complete(session, rank=1, max_tokens=500, ignore_eos=True))
        await asyncio.sleep(0.1)
        assert await (await session.post("/reset_prefix_cache")).json() == {"success": False}
        assert await cached(session, rank=0) == 0
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
