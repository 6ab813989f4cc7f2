"""Rendering by an engine: its own `/tokenize` knows best, at the price of a round trip."""

import asyncio
from typing import Any

import aiohttp
import msgspec

from kvatlas.errors import RenderError
from kvatlas.rendering.conversation import find_media
from kvatlas.rendering.prompt import RenderedPrompt, extras_of
from kvatlas.rendering.request import ChatRequest, Message, ParsedRequest

__all__ = ["EngineRenderer"]


class _TokenizeResponse(msgspec.Struct):
    tokens: list[int]


class EngineRenderer:
    """Renders through one engine.

    Args:
        base_url: the engine, like "http://10.0.0.7:8000".
        session: an open aiohttp session; it stays the caller's.
        timeout_s: for one call, connecting included.
    """

    __slots__ = ("_session", "_timeout", "_url")

    def __init__(self, base_url: str, session: aiohttp.ClientSession, *, timeout_s: float = 2.0) -> None:
        self._url = base_url.rstrip("/") + "/tokenize"
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def render(self, request: ParsedRequest) -> tuple[RenderedPrompt, ...]:
        """The request's prompts, as the engine itself would tokenise them. Prompts of token ids need no call.

        Raises:
            RenderError: the engine refused, failed or did not answer in time.
        """
        if request.unsupported is not None:
            raise RenderError(request.unsupported)
        extras = extras_of(request)
        if request.chat is not None:
            token_ids = await self._tokenize(_chat_form(request.chat, request))
            return (RenderedPrompt(token_ids, extras),)
        prompts = []
        for prompt in request.prompts:
            ids = await self._tokenize(_completion_form(prompt, request)) if isinstance(prompt, str) else prompt
            prompts.append(RenderedPrompt(ids, extras))
        return tuple(prompts)

    async def _tokenize(self, form: dict[str, Any]) -> list[int]:
        try:
            body = msgspec.json.encode(form)
        except UnicodeError:
            raise RenderError(
                "the prompt is not valid Unicode text (a lone surrogate): it cannot be tokenised"
            ) from None
        headers = {"content-type": "application/json"}
        try:
            async with self._session.post(self._url, data=body, headers=headers, timeout=self._timeout) as response:
                answer = await response.read()
                status = response.status
        except asyncio.TimeoutError:  # noqa: UP041 - named as aiohttp documents it
            raise RenderError(
                f"{self._url} did not answer within {self._timeout.total} s: routed without the index"
            ) from None
        except aiohttp.ClientError as error:
            raise RenderError(f"{self._url} failed ({type(error).__name__}): routed without the index") from None
        if status != 200:
            raise RenderError(f"{self._url} answered {status}, expected 200 with token ids: routed without the index")
        try:
            return msgspec.json.decode(answer, type=_TokenizeResponse).tokens
        except msgspec.DecodeError as error:
            raise RenderError(f"{self._url} answered something that is not a list of token ids: {error}") from None


def _completion_form(prompt: str, request: ParsedRequest) -> dict[str, Any]:
    form: dict[str, Any] = {"prompt": prompt, "add_special_tokens": request.add_special_tokens}
    return _with_model(form, request)


def _chat_form(chat: ChatRequest, request: ParsedRequest) -> dict[str, Any]:
    """The chat form of /tokenize; what it has no field for (`documents`, ...) goes with the template's variables."""
    media = find_media(chat.messages)
    if media is not None:
        raise RenderError(f"a message part of type {media!r} is not supported yet: routed without the index")
    form: dict[str, Any] = {
        "messages": [_with_reasoning(message) for message in chat.messages],
        "add_generation_prompt": chat.add_generation_prompt,
        "continue_final_message": chat.continue_final_message,
        "add_special_tokens": request.add_special_tokens,
    }
    if chat.tools is not None:
        form["tools"] = chat.tools
    if chat.template_variables:
        form["chat_template_kwargs"] = chat.template_variables
    return _with_model(form, request)


def _with_reasoning(message: Message) -> Message:
    """The chat API renames the older field `reasoning_content`; /tokenize would not see it.

    Source: vLLM 0.32, entrypoints/openai/chat_completion/protocol.py `_normalize_messages_before`.
    """
    if message.get("reasoning_content") is None or message.get("reasoning") is not None:
        return message
    renamed = {name: value for name, value in message.items() if name != "reasoning_content"}
    return {**renamed, "reasoning": message["reasoning_content"]}


def _with_model(form: dict[str, Any], request: ParsedRequest) -> dict[str, Any]:
    if request.model is not None:
        form["model"] = request.model
    return form
