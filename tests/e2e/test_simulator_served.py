"""A simulated engine inside this process: what its switches change."""

import asyncio

import aiohttp
import pytest

from kvatlas.errors import ConfigError
from kvatlas.simulator import EngineConfig, EventsConfig, LatencyConfig, ServedEngine

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

FAST = LatencyConfig(time_scale=0.0)
PROMPT = list(range(100, 164))


async def post(session, address, path, body=None, headers=None):
    """Status, headers and decoded body."""
    async with session.post(address.base_url + path, json=body, headers=headers) as response:
        return response.status, response.headers, await response.json(content_type=None)


async def test_defaults_of_a_plain_server():
    """Scenario 68 and 69: without their flags there are no prompt details, no reset, no request id, no events."""
    config = EngineConfig(
        enable_prompt_tokens_details=False,
        dev_mode=False,
        enable_server_load_tracking=False,
        events=EventsConfig(enabled=False),
        latency=FAST,
    )
    async with ServedEngine(config) as served, aiohttp.ClientSession() as session:
        address = served.address
        status, headers, body = await post(
            session, address, "/v1/completions", {"prompt": PROMPT}, {"X-Request-Id": "abc"}
        )
        assert status == 200
        assert body["usage"]["prompt_tokens_details"] is None
        assert "X-Request-Id" not in headers
        assert body["id"] == "cmpl-abc"
        assert (await post(session, address, "/reset_prefix_cache"))[0] == 404
        async with session.get(address.base_url + "/kv_event_sources") as response:
            assert await response.json() == {}
        assert address.events_endpoint is None


async def test_request_id_is_echoed_when_asked_for():
    """`enable_request_id_headers`: whole and streamed."""
    config = EngineConfig(enable_request_id_headers=True, latency=FAST)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    async with ServedEngine(config) as served, aiohttp.ClientSession(served.address.base_url) as session:
        for stream in (False, True):
            request = {"json": {**body, "stream": stream}, "headers": {"X-Request-Id": "abc"}}
            async with session.post("/v1/chat/completions", **request) as response:
                assert response.headers["X-Request-Id"] == "abc"
                assert "chatcmpl-abc" in await response.text()


async def test_no_prefix_caching():
    """Without a prefix cache every prompt is cold, and no blocks are announced."""
    config = EngineConfig(enable_prefix_caching=False, latency=FAST)
    async with ServedEngine(config) as served, aiohttp.ClientSession() as session:
        for _ in range(2):
            _, _, body = await post(session, served.address, "/v1/completions", {"prompt": PROMPT})
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_equal_request_ids_do_not_meet():
    """Two clients that send the same X-Request-Id each get their own reply."""
    async with ServedEngine(EngineConfig(latency=FAST)) as served, aiohttp.ClientSession() as session:
        replies = await asyncio.gather(
            *[
                post(
                    session,
                    served.address,
                    "/v1/completions",
                    {"prompt": [number] * 20, "max_tokens": 8, "ignore_eos": True},
                    {"X-Request-Id": "same"},
                )
                for number in (5, 6)
            ]
        )
        texts = [body["choices"][0]["text"] for _, _, body in replies]
        assert texts[0] != texts[1]
        assert all(len(text.split()) == 8 for text in texts)


async def test_a_dead_engine_is_unhealthy():
    """When the loop dies, clients get 500 in the engine's shape and /health turns 503."""
    async with ServedEngine(EngineConfig(latency=FAST)) as served, aiohttp.ClientSession() as session:
        served.ranks.engines[0].core.begin_step = None
        status, _, body = await post(session, served.address, "/v1/completions", {"prompt": PROMPT})
        assert (status, body["error"]["code"], body["error"]["type"]) == (500, 500, "InternalServerError")
        async with session.get(served.address.base_url + "/health") as response:
            assert response.status == 503


async def test_replies_under_block_pressure_are_whole():
    """Many clients on a pool for two of them: everybody waits, is preempted, resumed, and gets the reply it would get alone."""
    config = EngineConfig(num_blocks=17, max_model_len=256, latency=FAST)
    body = {"max_tokens": 120, "ignore_eos": True, "return_token_ids": True}
    async with ServedEngine(config) as crowded, ServedEngine(config) as quiet, aiohttp.ClientSession() as session:
        prompts = [[number, *PROMPT] for number in range(8)]
        together = await asyncio.gather(
            *[post(session, crowded.address, "/v1/completions", {"prompt": prompt, **body}) for prompt in prompts]
        )
        for prompt, (status, _, reply) in zip(prompts, together, strict=True):
            alone = (await post(session, quiet.address, "/v1/completions", {"prompt": prompt, **body}))[2]
            assert status == 200
            assert reply["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
        async with session.get(crowded.address.base_url + "/metrics") as response:
            page = await response.text()
        assert 'vllm:num_preemptions_total{engine="0",model_name="kvatlas-sim"} 0.0' not in page
        assert 'vllm:num_requests_running{engine="0",model_name="kvatlas-sim"} 0.0' in page


async def test_port_in_use():
    """A second engine on the same port is refused with the port and what to do; nothing of it stays open."""
    async with ServedEngine(EngineConfig(latency=FAST)) as served:
        with pytest.raises(ConfigError, match="choose another port"):
            await ServedEngine(EngineConfig(port=served.address.port, latency=FAST)).start()
