"""The HTTP face of a simulated engine: the routes a vLLM 0.32 server has that clients, routers and scrapers use."""

import functools
import itertools
import os
from collections.abc import Awaitable, Callable

from aiohttp import web

from kvatlas.clock import Clock
from kvatlas.errors import BadRequest, KvAtlasError, ModelNotFound
from kvatlas.rendering import LocalRenderer, parse_request
from kvatlas.simulator.api_bodies import ClientOptions, DetokenizeBody, GenerationBody, TokenizeBody, decode_body
from kvatlas.simulator.api_errors import engine_error, http_error, invalid_body, json_response
from kvatlas.simulator.config import EngineConfig
from kvatlas.simulator.dev_api import dev_routes
from kvatlas.simulator.exchange import Exchange, check_prompts, check_request
from kvatlas.simulator.metrics_page import MetricsPage
from kvatlas.simulator.ranks import EngineRanks
from kvatlas.simulator.responses import ChatShape, CompletionShape
from kvatlas.simulator.vocabulary import ReplyVocabulary

__all__ = ["VLLM_VERSION", "EngineApi"]

VLLM_VERSION = "0.32.0"
_MOST_BODY_BYTES = 64 * 2**20
_COMPLETIONS = "/v1/completions"
_CHAT = "/v1/chat/completions"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineApi:
    """Routes and handlers over one engine.

    Args:
        config: what is served.
        ranks: started engines.
        page: for `/metrics`.
        renderer: prompts and chats to tokens.
        vocabulary: output tokens to text.
        clock: for `created`.
        started_s: wall time at which the engine began, None = now.
        on_piece: told of each piece a streamed answer has sent, and how many it were.
    """

    def __init__(
        self,
        config: EngineConfig,
        ranks: EngineRanks,
        page: MetricsPage,
        renderer: LocalRenderer,
        vocabulary: ReplyVocabulary,
        clock: Clock,
        *,
        started_s: float | None = None,
        on_piece: Callable[[web.Request, int], None] | None = None,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._page = page
        self._renderer = renderer
        self._vocabulary = vocabulary
        self._clock = clock
        self._started_s = int(clock.wall_s() if started_s is None else started_s)
        self._on_piece = on_piece
        self._load = 0
        self._nonce = os.urandom(6).hex()
        self._serial_numbers = itertools.count()
        self._event_sources: dict[str, object] = {}

    def announce_events(self, rank: int, endpoint: str, replay_endpoint: str | None) -> None:
        """Tell `/kv_event_sources` where a rank's publisher listens, ports resolved."""
        events = self._config.events
        self._event_sources[str(rank)] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
            "replay_endpoint": replay_endpoint,
            "buffer_steps": events.buffer_steps,
            "hwm": events.hwm,
            "max_queue_size": events.max_queue_size,
            "topic": events.topic,
        }

    def application(self) -> web.Application:
        """The routes as an aiohttp application."""
        app = web.Application(client_max_size=_MOST_BODY_BYTES, middlewares=[_error_shape])
        app.add_routes(
            [
                web.post(_COMPLETIONS, self._generate),
                web.post(_CHAT, self._generate),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/ping", self._health),
                web.post("/ping", self._health),
                web.get("/version", self._version),
                web.get("/load", self._server_load),
                web.get("/metrics", self._exposition),
                web.get("/kv_event_sources", self._kv_event_sources),
            ]
        )
        if self._config.dev_mode:
            app.add_routes(dev_routes(self._ranks))
        return app

    async def _generate(self, http_request: web.Request) -> web.StreamResponse:
        raw = await http_request.read()
        try:
            parsed = parse_request(http_request.path, raw)
            body = decode_body(raw, GenerationBody)
        except KvAtlasError as error:
            return invalid_body(error)
        is_chat = parsed.api == "chat"
        request_id = http_request.headers.get("X-Request-Id") or body.request_id or self._new_id()
        response_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}"
        shape = (ChatShape if is_chat else CompletionShape)(
            response_id,
            int(self._clock.wall_s()),
            parsed.model or self._config.model,
            with_token_ids=bool(body.return_token_ids),
        )
        exchange = Exchange(self._ranks, shape, self._vocabulary, self._config)
        headers = {"X-Request-Id": request_id} if self._config.enable_request_id_headers else {}
        self._load += 1
        try:
            check_request(parsed, body, self._config)
            rank = self._ranks.check_rank(http_request.headers.get("X-data-parallel-rank"))
            prompts = await self._renderer.render(parsed)
            check_prompts(parsed, prompts, self._config)
            self._ranks.check_admission(len(prompts) * parsed.num_choices)
            exchange.submit(response_id, parsed, body, prompts, ClientOptions.read(body, http_request.headers, rank))
            if parsed.stream:
                return await exchange.streamed(
                    http_request,
                    headers,
                    include_usage=parsed.include_usage,
                    on_piece=None if self._on_piece is None else functools.partial(self._on_piece, http_request),
                )
            response = await exchange.whole()
            response.headers.update(headers)
            return response
        except KvAtlasError as error:
            return engine_error(error)
        finally:
            self._load -= 1
            exchange.abandon()  # the client hung up, or the engine refused one of several prompts

    async def _tokenize(self, http_request: web.Request) -> web.Response:
        raw = await http_request.read()
        try:
            body = decode_body(raw, TokenizeBody)
            chat = None if body.prompt is not None else parse_request(_CHAT, raw)
        except KvAtlasError as error:
            return invalid_body(error)
        try:
            self._check_model(body.model)
            if chat is not None:
                token_ids = list((await self._renderer.render(chat))[0].token_ids)
            else:
                token_ids = self._renderer.tokenize(body.prompt or "", add_special_tokens=body.add_special_tokens)
        except KvAtlasError as error:
            return engine_error(error)
        texts = (
            [self._renderer.tokenizer.token_text(token_id) for token_id in token_ids]
            if body.return_token_strs
            else None
        )
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": self._config.max_model_len,
                "tokens": token_ids,
                "token_strs": texts,
            }
        )

    async def _detokenize(self, http_request: web.Request) -> web.Response:
        try:
            body = decode_body(await http_request.read(), DetokenizeBody)
        except BadRequest as error:
            return invalid_body(error)
        try:
            self._check_model(body.model)
        except KvAtlasError as error:
            return engine_error(error)
        return json_response({"prompt": self._renderer.detokenize(body.tokens)})

    async def _models(self, _request: web.Request) -> web.Response:
        model = self._config.model
        cards = [self._card(model, root=model, parent=None, max_model_len=self._config.max_model_len)]
        cards += [
            self._card(name, root=path, parent=model, max_model_len=None)
            for name, path in self._config.lora_modules.items()
        ]
        return json_response({"object": "list", "data": cards})

    def _card(self, name: str, *, root: str, parent: str | None, max_model_len: int | None) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": max_model_len,
            "permission": [],
        }

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self._ranks.is_healthy else 503)

    async def _version(self, _request: web.Request) -> web.Response:
        return json_response({"version": VLLM_VERSION})

    async def _server_load(self, _request: web.Request) -> web.Response:
        return json_response({"server_load": self._load if self._config.enable_server_load_tracking else 0})

    async def _exposition(self, _request: web.Request) -> web.Response:
        page = self._page.exposition()
        return web.Response(body=page, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _kv_event_sources(self, _request: web.Request) -> web.Response:
        return json_response(self._event_sources)

    def _check_model(self, model: str | None) -> None:
        if model and model != self._config.model and model not in self._config.lora_modules:
            raise ModelNotFound(f"The model `{model}` does not exist.")

    def _new_id(self) -> str:
        return f"{self._nonce}{next(self._serial_numbers):08x}"


@web.middleware
async def _error_shape(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Give aiohttp's own errors (no such route, wrong method, body too large) the engine's shape."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return http_error(error.status)
