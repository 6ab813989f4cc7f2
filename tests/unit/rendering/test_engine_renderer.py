"""Rendering through an engine's /tokenize, against a small server on loopback."""

import asyncio
import json

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from kvatlas.errors import RenderError
from kvatlas.rendering import EngineRenderer, parse_request

MESSAGES = [{"role": "user", "content": "hello"}]


class Engine:
    """Answers /tokenize as told and remembers what it was asked."""

    def __init__(self):
        self.asked = []
        self.answer = {"count": 2, "max_model_len": 100, "tokens": [7, 8]}
        self.status = 200
        self.delay_s = 0.0

    async def tokenize(self, request):
        """The handler."""
        self.asked.append(await request.json())
        await asyncio.sleep(self.delay_s)
        body = self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()
        return web.Response(body=body, status=self.status, content_type="application/json")


@pytest_asyncio.fixture
async def engine():
    """A running engine double."""
    double = Engine()
    app = web.Application()
    app.router.add_post("/base/tokenize", double.tokenize)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    double.url = f"http://127.0.0.1:{runner.addresses[0][1]}/base/"
    yield double
    await runner.cleanup()


@pytest_asyncio.fixture
async def session():
    """An aiohttp session that is closed in the end."""
    async with aiohttp.ClientSession() as open_session:
        yield open_session


def chat(**fields):
    """A parsed chat request."""
    return parse_request("/v1/chat/completions", json.dumps({"messages": MESSAGES, **fields}).encode())


@pytest.mark.asyncio
async def test_chat_goes_out_in_the_chat_form(engine, session):
    """All that changes token ids is sent; what the form has no field for goes with the template's variables."""
    tool = {"type": "function", "function": {"name": "f"}}
    request = chat(model="m", tools=[tool], reasoning_effort="low", documents=[{"text": "d"}], cache_salt="s")
    (prompt,) = await EngineRenderer(engine.url, session).render(request)
    assert (prompt.token_ids, prompt.extras.cache_salt) == ([7, 8], "s")
    assert engine.asked == [
        {
            "model": "m",
            "messages": MESSAGES,
            "tools": [tool],
            "add_generation_prompt": True,
            "continue_final_message": False,
            "add_special_tokens": False,
            "chat_template_kwargs": {"documents": [{"text": "d"}], "reasoning_effort": "low", "enable_thinking": True},
        }
    ]


@pytest.mark.asyncio
async def test_the_older_reasoning_field_is_sent_under_its_new_name(engine, session):
    """/tokenize does not rename it as the chat API does: unrenamed, the ids would differ."""
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "So.", "reasoning_content": "hmm"},
        {"role": "assistant", "content": "So.", "reasoning_content": "old", "reasoning": "new"},
    ]
    await EngineRenderer(engine.url, session).render(chat(messages=messages))
    sent = engine.asked[0]["messages"]
    assert sent[1] == {"role": "assistant", "content": "So.", "reasoning": "hmm"}
    assert sent[2]["reasoning"] == "new"


@pytest.mark.asyncio
async def test_completions_ask_once_per_text(engine, session):
    """Token ids need no engine; texts keep the request's flag."""
    request = parse_request("/v1/completions", b'{"prompt": ["a", [1, 2], "b"], "add_special_tokens": false}')
    prompts = await EngineRenderer(engine.url, session).render(request)
    assert [prompt.token_ids for prompt in prompts] == [[7, 8], [1, 2], [7, 8]]
    assert engine.asked == [{"prompt": text, "add_special_tokens": False} for text in ("a", "b")]


@pytest.mark.parametrize(
    ("status", "answer", "expected"),
    [
        (400, {"error": {"message": "no"}}, "answered 400"),
        (404, b"", "answered 404"),
        (200, b"<html>", "not a list of token ids"),
        (200, {"count": 1}, "not a list of token ids"),
        (200, {"tokens": ["a"]}, "not a list of token ids"),
    ],
)
@pytest.mark.asyncio
async def test_bad_answers_are_render_errors(engine, session, status, answer, expected):
    """Routing goes on without the index."""
    engine.status, engine.answer = status, answer
    with pytest.raises(RenderError, match=expected):
        await EngineRenderer(engine.url, session).render(chat())


@pytest.mark.asyncio
async def test_a_slow_engine_is_given_up(engine, session):
    """The timeout bounds what rendering may cost a request."""
    engine.delay_s = 5.0
    with pytest.raises(RenderError, match=r"within 0\.05 s"):
        await EngineRenderer(engine.url, session, timeout_s=0.05).render(chat())


@pytest.mark.asyncio
async def test_a_dead_engine_is_a_render_error(session):
    """No connection, no crash."""
    with pytest.raises(RenderError, match="failed"):
        await EngineRenderer("http://127.0.0.1:1", session).render(chat())


@pytest.mark.asyncio
async def test_what_cannot_be_rendered_is_not_sent(engine, session):
    """Media and unsupported fields are refused before a round trip."""
    renderer = EngineRenderer(engine.url, session)
    image = chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    for request in (image, chat(chat_template="x"), parse_request("/v1/models", b"")):
        with pytest.raises(RenderError):
            await renderer.render(request)
    with pytest.raises(RenderError, match="Unicode"):
        await renderer.render(parse_request("/v1/completions", b'{"prompt": "\\ud800"}'))
    assert engine.asked == []
