"""What an engine's options and its development routes change, over HTTP: sleep, resets, limits, adapters, tiers, drafts."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kvatlas.simulator import (
    ConnectorConfig,
    EngineConfig,
    GroupConfig,
    LatencyConfig,
    ServedEngine,
    SimulatedFleet,
    SpeculativeConfig,
)

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

FAST = LatencyConfig(time_scale=0.0)
PROMPT = list(range(100, 164))
LABELS = 'engine="0",model_name="kvatlas-sim"'


@asynccontextmanager
async def serving(**settings):
    """A server and a session on it."""
    config = EngineConfig(**{"latency": FAST, **settings})
    async with ServedEngine(config) as served, aiohttp.ClientSession(served.address.base_url) as session:
        yield served, session


async def post(session, path, body=None, **headers):
    """Status and decoded body."""
    async with session.post(path, json=body, headers=headers) as response:
        return response.status, await response.json(content_type=None)


async def complete(session, prompt=PROMPT, **body):
    """The body of a completion that must succeed."""
    status, reply = await post(session, "/v1/completions", {"prompt": prompt, "max_tokens": 1, **body})
    assert status == 200, reply
    return reply


async def cached(session, prompt=PROMPT, **body):
    """Its cached tokens."""
    return (await complete(session, prompt, **body))["usage"]["prompt_tokens_details"]["cached_tokens"]


async def sample(session, name, labels=LABELS):
    """One sample of /metrics."""
    async with session.get("/metrics") as response:
        page = await response.text()
    for line in page.splitlines():
        if line.startswith(f"vllm:{name}{{{labels}}} "):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no vllm:{name}{{{labels}}}")


async def long_request(session, **body):
    """A request that runs until it is cancelled."""
    request = {"prompt": [7] * 40, "max_tokens": 5000, "ignore_eos": True, **body}
    task = asyncio.create_task(post(session, "/v1/completions", request))
    await asyncio.sleep(0.15)
    return task


async def end(task):
    """Cancel a request and wait for it."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class TestSleep:
    """`/sleep`, `/wake_up`, `/is_sleeping`, `/pause`, `/resume`."""

    async def test_sleep_forgets_the_cache(self):
        """At level 1 the cache is gone, requests wait while it sleeps, and are answered cold after it woke."""
        async with serving() as (_, session):
            await complete(session)
            assert await post(session, "/sleep") == (200, {"status": "sleeping", "level": 1})
            assert await (await session.get("/is_sleeping")).json() == {"is_sleeping": True}
            state = 'engine="0",model_name="kvatlas-sim",sleep_state="weights_offloaded"'
            assert await sample(session, "engine_sleep_state", state) == 1
            waits = asyncio.create_task(cached(session))
            await asyncio.sleep(0.1)
            assert not waits.done()
            assert await sample(session, "num_requests_waiting") == 1
            assert await post(session, "/wake_up") == (200, {"status": "awake", "tags": None})
            assert await waits == 0
            assert await (await session.get("/is_sleeping")).json() == {"is_sleeping": False}

    async def test_level_0_keeps_the_cache(self):
        """Level 0 only pauses; waking up in parts is waking up when all parts are there."""
        async with serving() as (_, session):
            await complete(session)
            await post(session, "/sleep?level=0")
            assert (await post(session, "/wake_up?tags=scheduling"))[1]["status"] == "awake"
            assert await cached(session) == 48
            await post(session, "/sleep?level=2")
            assert (await post(session, "/wake_up?tags=weights"))[1] == {"status": "sleeping", "tags": ["weights"]}
            assert (await post(session, "/wake_up?tags=kv_cache"))[1]["status"] == "awake"
            assert await cached(session) == 0

    async def test_what_becomes_of_running_requests(self):
        """Abort ends them with what they have, wait lets them end first, keep freezes them and has them start over."""
        async with serving(latency=LatencyConfig(decode_step_s=0.01)) as (_, session):
            task = await long_request(session)
            await post(session, "/sleep?mode=abort")
            choice = (await task)[1]["choices"][0]
            assert choice["finish_reason"] == "abort"
            await post(session, "/wake_up")
            task = await long_request(session, max_tokens=40)
            await post(session, "/sleep?mode=wait")
            assert task.done() or (await asyncio.wait_for(task, 1))[0] == 200
            assert (await task)[1]["choices"][0]["finish_reason"] == "length"
            await post(session, "/wake_up")
            alone = await complete(session, [7] * 40, max_tokens=60, ignore_eos=True)
            task = await long_request(session, max_tokens=60)
            await post(session, "/sleep?mode=keep")
            await asyncio.sleep(0.2)
            assert not task.done()
            assert await sample(session, "num_requests_waiting") == 1
            await post(session, "/wake_up")
            assert (await task)[1]["choices"][0]["text"] == alone["choices"][0]["text"]

    async def test_pause_and_resume(self):
        """A pause that keeps the cache; bad values are refused by name."""
        async with serving() as (_, session):
            await complete(session)
            assert await post(session, "/pause?mode=wait&clear_cache=false") == (200, {"status": "paused"})
            assert await (await session.get("/is_paused")).json() == {"is_paused": True}
            assert await post(session, "/resume") == (200, {"status": "resumed"})
            assert await cached(session) == 48
            for path, named in [("/sleep?level=3", "level"), ("/pause?mode=x", "mode"), ("/sleep?level=a", "level")]:
                status, body = await post(session, path)
                assert status == 400
                assert named in body["error"]["message"]

    async def test_not_in_production(self):
        """Without development mode none of these routes exist (scenario 69)."""
        async with serving(dev_mode=False) as (_, session):
            for path in ("/sleep", "/wake_up", "/reset_prefix_cache", "/pause"):
                assert (await post(session, path))[0] == 404


class TestReset:
    """`/reset_prefix_cache`."""

    async def test_running_requests_start_over(self):
        """Scenario 54: with reset_running_requests it succeeds under load, and the reply is none the worse."""
        async with serving(latency=LatencyConfig(decode_step_s=0.01)) as (_, session):
            alone = await complete(session, [7] * 40, max_tokens=60, ignore_eos=True)
            task = await long_request(session, max_tokens=60)
            assert await post(session, "/reset_prefix_cache") == (200, {"success": False})
            reset = "/reset_prefix_cache?reset_running_requests=true"
            assert await post(session, reset) == (200, {"success": True})
            body = (await task)[1]
            assert body["choices"][0]["text"] == alone["choices"][0]["text"]
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
            assert await sample(session, "num_preemptions_total") == 1

    async def test_bad_flag(self):
        """A flag that is neither true nor false is refused."""
        async with serving() as (_, session):
            status, body = await post(session, "/reset_prefix_cache?reset_external=maybe")
            assert status == 400
            assert "reset_external" in body["error"]["message"]


class TestLimits:
    """Admission limits: 503, and a counter."""

    async def test_too_many_requests(self):
        """The request over the limit is refused, `n` replies count as `n`, and the engine goes on."""
        async with serving(max_num_queued_reqs=2, latency=LatencyConfig(decode_step_s=0.01)) as (_, session):
            task = await long_request(session)
            assert (await post(session, "/v1/completions", {"prompt": PROMPT, "n": 2}))[0] == 503
            await complete(session)
            reasons = 'model_name="kvatlas-sim",reason="max_num_queued_reqs"'
            assert await sample(session, "admission_rejections_total", reasons) == 1
            await end(task)

    async def test_too_many_tokens(self):
        """Prompt tokens that wait for their prefill are bounded too."""
        slow = LatencyConfig(prefill_tokens_per_s=100.0)
        async with serving(max_num_queued_tokens=50, latency=slow) as (_, session):
            task = asyncio.create_task(complete(session))
            await asyncio.sleep(0.1)
            status, body = await post(session, "/v1/completions", {"prompt": "a"})
            assert (status, body["error"]["type"]) == (503, "ServiceUnavailableError")
            await task
            await complete(session, "a")


class TestRequestFields:
    """Fields of a request that change how it is cached."""

    async def test_prompt_logprobs(self):
        """Scenario 27: a request for prompt logprobs reads nothing from the cache, and what it computed is cached."""
        async with serving() as (_, session):
            assert await cached(session, prompt_logprobs=1) == 0
            assert await cached(session, prompt_logprobs=1) == 0
            assert await cached(session) == 48

    async def test_adapters(self):
        """An adapter is a model of its own: listed, hashed apart, named in the reply; an unknown one is not found."""
        async with serving(lora_modules={"sql": "/adapters/sql"}) as (_, session):
            cards = (await (await session.get("/v1/models")).json())["data"]
            assert [(card["id"], card["parent"]) for card in cards] == [("kvatlas-sim", None), ("sql", "kvatlas-sim")]
            assert await cached(session) == 0
            assert await cached(session, model="sql") == 0
            assert await cached(session, model="sql") == 48
            assert (await complete(session, model="sql"))["model"] == "sql"
            assert (await post(session, "/v1/completions", {"model": "no", "prompt": PROMPT}))[0] == 404

    async def test_priority(self):
        """Under the priority policy the urgent request overtakes the one before it; the header wins over the body."""
        settings = {"scheduling_policy": "priority", "max_num_seqs": 1, "latency": LatencyConfig(decode_step_s=0.01)}
        async with serving(**settings) as (_, session):
            running = await long_request(session, max_tokens=40)
            ended = []

            async def ask(name, priority, **headers):
                body = {"prompt": PROMPT, "max_tokens": 1, "priority": priority}
                assert (await post(session, "/v1/completions", body, **headers))[0] == 200
                ended.append(name)

            tasks = [asyncio.create_task(ask("late", 3))]
            await asyncio.sleep(0.02)
            tasks.append(asyncio.create_task(ask("soon", 9, **{"X-Vllm-Priority": "-1"})))
            await asyncio.gather(running, *tasks)
            assert ended == ["soon", "late"]


class TestModels:
    """What the simulated model is made of."""

    async def test_drafts(self):
        """Speculative decoding changes neither the reply nor what is cached; it is counted."""
        replies = []
        for num_tokens in (0, 3):
            async with serving(speculative=SpeculativeConfig(num_tokens=num_tokens)) as (_, session):
                reply = await complete(session, max_tokens=60, ignore_eos=True, return_token_ids=True)
                replies.append(reply["choices"][0]["token_ids"])
                whole = [*PROMPT, *replies[-1]]
                assert await cached(session, whole) == (len(whole) - 1) // 16 * 16
                drafts = await sample(session, "spec_decode_num_draft_tokens_total")
                accepted = await sample(session, "spec_decode_num_accepted_tokens_total")
                assert 0 < accepted < drafts if num_tokens else drafts == accepted == 0
        assert replies[0] == replies[1]

    async def test_two_groups(self):
        """A model with sliding-window layers: the resend hits, and both groups are in the events' source."""
        groups = (GroupConfig(kind="sliding_window", window=32), GroupConfig(kind="full_attention"))
        async with serving(groups=groups) as (_, session):
            assert [await cached(session) for _ in range(2)] == [0, 48]


class TestConnector:
    """KV outside the device."""

    @pytest.mark.parametrize("kind", ["host", "disk", "tiered"])
    @pytest.mark.parametrize("async_loads", [False, True])
    async def test_what_the_device_forgot(self, tmp_path, kind, async_loads):
        """A prompt the device forgot is loaded, counted by its source, and reported as cached."""
        connector = ConnectorConfig(kind=kind, directory=str(tmp_path), async_loads=async_loads)
        async with serving(connector=connector) as (_, session):
            await complete(session)
            await asyncio.sleep(0.05)
            assert await post(session, "/reset_prefix_cache") == (200, {"success": True})
            hit = await cached(session)
            assert hit in {48, 64}  # an asynchronous load may bring the last block, whose last token is computed anew
            assert await sample(session, "external_prefix_cache_hits_total") == hit
            assert await sample(session, "external_prefix_cache_queries_total") == 128
            source = {"host": "host", "disk": "disk", "tiered": "host"}[kind]
            by_source = f'engine="0",model_name="kvatlas-sim",source="{source}"'
            assert await sample(session, "prompt_tokens_cached_by_source_total", by_source) == hit
            external = 'engine="0",model_name="kvatlas-sim",source="external_kv_transfer"'
            assert await sample(session, "prompt_tokens_by_source_total", external) == hit
            assert await sample(session, "kv_cache_usage_perc") == 0

    @pytest.mark.parametrize("async_loads", [False, True])
    @pytest.mark.parametrize(("policy", "status"), [("fail", 500), ("recompute", 200)])
    async def test_a_load_that_fails(self, tmp_path, async_loads, policy, status):
        """Scenarios 49 and 50 over HTTP: corrupt files are never served; by policy the request fails or computes anew."""
        connector = ConnectorConfig(kind="disk", directory=str(tmp_path), async_loads=async_loads)
        async with serving(connector=connector, kv_load_failure_policy=policy) as (_, session):
            await complete(session)
            await asyncio.sleep(0.05)
            await post(session, "/reset_prefix_cache")
            files = [path for path in tmp_path.rglob("*.kv") if path.is_file()]
            assert len(files) >= 4
            for path in files:
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)
            assert (await post(session, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1}))[0] == status
            assert await sample(session, "kv_cache_usage_perc") == 0
            assert await cached(session) in ({48, 64} if policy == "recompute" else {0})

    async def test_reset_external(self):
        """`reset_external` forgets the tier too."""
        async with serving(connector=ConnectorConfig(kind="host")) as (_, session):
            await complete(session)
            await asyncio.sleep(0.05)
            assert await post(session, "/reset_prefix_cache?reset_external=true") == (200, {"success": True})
            assert await cached(session) == 0

    async def test_disk_outlives_the_process_and_is_shared(self, tmp_path):
        """Two engines on one directory: what one computed, the other loads; a restart loses nothing."""
        config = EngineConfig(
            latency=FAST, hash_seed="0", connector=ConnectorConfig(kind="disk", directory=str(tmp_path))
        )
        with SimulatedFleet(2, config) as fleet:
            hits = []
            for index in (0, 1):
                async with aiohttp.ClientSession(fleet.engines[index].base_url) as session:
                    hits.append(await cached(session))
                    await asyncio.sleep(0.1)
            address = fleet.restart(0)
            async with aiohttp.ClientSession(address.base_url) as session:
                hits.append(await cached(session))
        assert hits[0] == 0
        assert min(hits[1:]) >= 48
