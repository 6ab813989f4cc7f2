"""Hold conversations with an OpenAI-compatible endpoint and note what each turn cost."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from kvatlas.clock import Clock
from kvatlas.fleet import describe_failure
from kvatlas.replay.conversations import Conversation

__all__ = ["TurnResult", "hold_conversations"]


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One request and its answer. Token counts are the engine's own; `predicted_tokens` is what the gateway promised.

    Attributes:
        status: HTTP status; 0 when there was no answer.
        error: what went wrong, None when nothing did.
        ttft_s: from sending to the first piece of the reply.
    """

    conversation: str
    turn: int
    worker: str
    status: int
    error: str | None
    prompt_tokens: int
    cached_tokens: int | None
    predicted_tokens: int | None
    completion_tokens: int
    ttft_s: float
    duration_s: float


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None


@dataclass(slots=True)
class _Reply:
    text: str = ""
    usage: _Usage | None = None
    first_s: float | None = None
    ended: bool = False


async def hold_conversations(
    base_url: str,
    model: str,
    conversations: Sequence[Conversation],
    clock: Clock,
    *,
    on_turn: Callable[[TurnResult], None] = lambda _: None,
    timeout_s: float = 120.0,
) -> list[TurnResult]:
    """Run all conversations at once, each turn after the reply to the one before.

    A turn that fails ends its conversation; its result says why.

    Args:
        base_url: where `/v1/chat/completions` is.
        on_turn: told of every finished turn, e.g. for a progress bar.

    Returns:
        One result per request sent.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        talkers = [_Talker(session, base_url, model, clock, on_turn) for _ in conversations]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(t.hold(c)) for t, c in zip(talkers, conversations, strict=True)]
    return [result for task in tasks for result in task.result()]


class _Talker:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        model: str,
        clock: Clock,
        on_turn: Callable[[TurnResult], None],
    ) -> None:
        self._session = session
        self._url = base_url.rstrip("/") + "/v1/chat/completions"
        self._model = model
        self._clock = clock
        self._on_turn = on_turn

    async def hold(self, conversation: Conversation) -> list[TurnResult]:
        messages = [{"role": "system", "content": conversation.system}]
        results: list[TurnResult] = []
        for turn, (question, pause_s) in enumerate(zip(conversation.questions, conversation.pauses_s, strict=True)):
            await asyncio.sleep(pause_s)
            messages.append({"role": "user", "content": question})
            result, reply = await self._ask(conversation, turn, messages)
            results.append(result)
            self._on_turn(result)
            if result.error is not None:
                break
            messages.append({"role": "assistant", "content": reply.text})
        return results

    async def _ask(
        self, conversation: Conversation, turn: int, messages: list[dict[str, str]]
    ) -> tuple[TurnResult, _Reply]:
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": conversation.reply_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"content-type": "application/json", "x-request-id": f"{conversation.name}-{turn}"}
        sent_s = self._clock.monotonic_s()
        reply, status, worker, predicted, error = _Reply(), 0, "", None, None
        try:
            async with self._session.post(self._url, data=msgspec.json.encode(body), headers=headers) as response:
                status = response.status
                worker = response.headers.get("x-kvatlas-worker", "")
                predicted = response.headers.get("x-kvatlas-predicted-tokens")
                if status == 200:
                    await self._read_stream(response, reply)
                else:
                    error = (await response.text())[:500]
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as fault:
            error = describe_failure(fault)
        now_s = self._clock.monotonic_s()
        if error is None and not reply.ended:
            error = "the stream ended without data: [DONE]"
        usage = reply.usage or _Usage()
        details = usage.prompt_tokens_details
        result = TurnResult(
            conversation=conversation.name,
            turn=turn,
            worker=worker,
            status=status,
            error=error,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=details.cached_tokens if details else None,
            predicted_tokens=int(predicted) if predicted is not None else None,
            completion_tokens=usage.completion_tokens,
            ttft_s=(reply.first_s or now_s) - sent_s,
            duration_s=now_s - sent_s,
        )
        return result, reply

    async def _read_stream(self, response: aiohttp.ClientResponse, reply: _Reply) -> None:
        async for line in response.content:
            data = line.strip().removeprefix(b"data:").strip()
            if not data:
                continue
            if data == b"[DONE]":
                reply.ended = True
                continue
            chunk = msgspec.json.decode(data, type=_Chunk)
            if chunk.usage is not None:
                reply.usage = chunk.usage
            text = "".join(choice.delta.content or "" for choice in chunk.choices)
            if text:
                reply.text += text
                if reply.first_s is None:
                    reply.first_s = self._clock.monotonic_s()
