"""The JSON of completions and chat replies, whole or streamed, field for field as vLLM sends it.

A streamed chunk is the costliest thing per token, so what does not change between the chunks of one response is
encoded once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

__all__ = ["DONE", "ChatShape", "Choice", "CompletionShape", "ResponseShape", "Usage", "error_chunk"]

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


class _PromptDetails(msgspec.Struct):
    cached_tokens: int
    created_cache_tokens: int | None = None
    multimodal_tokens: dict[str, int] | None = None


class Usage(msgspec.Struct):
    """Token counts of a response. `details` is None when the engine does not report them."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: None = None

    @classmethod
    def of(
        cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int | None, created_tokens: int | None = None
    ) -> "Usage":
        """Count a response; `cached_tokens` None leaves the details out."""
        details = None if cached_tokens is None else _PromptDetails(cached_tokens, created_tokens)
        return cls(prompt_tokens, prompt_tokens + completion_tokens, completion_tokens, details)


@dataclass(slots=True)
class Choice:
    """One finished (or growing) reply of a response."""

    index: int
    prompt_token_ids: Sequence[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None


class ResponseShape(Protocol):
    """How one API words its responses."""

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """Chunks sent before any token."""
        ...

    def chunk(self, choice: Choice, text: str, token_ids: Sequence[int]) -> bytes:
        """One SSE chunk with the text and tokens that are new."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """The SSE chunk that ends a stream with `include_usage`."""
        ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The body of a response that is not streamed."""
        ...


def error_chunk(message: str) -> bytes:
    """The SSE chunk that ends a stream when the engine fails after the headers were sent."""
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    return b"data: " + _encode({"error": error}) + b"\n\n"


class _Shape:
    """What both APIs share: the head of every chunk."""

    stream_object = ""

    def __init__(self, response_id: str, created: int, model: str, *, with_token_ids: bool) -> None:
        self._id = response_id
        self._created = created
        self._model = model
        self._with_token_ids = with_token_ids
        head = {"id": response_id, "object": self.stream_object, "created": created, "model": model}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['

    def usage_chunk(self, usage: Usage) -> bytes:
        """See `ResponseShape`."""
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"

    def _ids(self, token_ids: Sequence[int]) -> list[int] | None:
        return list(token_ids) if self._with_token_ids else None

    def _ids_json(self, token_ids: Sequence[int]) -> bytes:
        return _encode(token_ids) if self._with_token_ids else b"null"


class CompletionShape(_Shape):
    """POST /v1/completions."""

    stream_object = "text_completion"

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """See `ResponseShape`."""
        return b""

    def chunk(self, choice: Choice, text: str, token_ids: Sequence[int]) -> bytes:
        """See `ResponseShape`."""
        is_first = len(choice.token_ids) == len(token_ids)
        prompt_ids = self._ids_json(choice.prompt_token_ids) if is_first else b"null"
        return (
            self._head
            + b'{"index":%d,"text":%b,"logprobs":null,' % (choice.index, _encode(text))
            + b'"finish_reason":%b,"stop_reason":%b,' % (_encode(choice.finish_reason), _encode(choice.stop_reason))
            + b'"prompt_token_ids":%b,"token_ids":%b}],"usage":null}\n\n' % (prompt_ids, self._ids_json(token_ids))
        )

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """See `ResponseShape`."""
        return _encode(
            {
                "id": self._id,
                "object": "text_completion",
                "created": self._created,
                "model": self._model,
                "choices": [self._choice(choice) for choice in choices],
                "service_tier": None,
                "system_fingerprint": None,
                "usage": usage,
                "kv_transfer_params": None,
            }
        )

    def _choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": self._ids(choice.token_ids),
            "prompt_logprobs": None,
            "prompt_token_ids": self._ids(choice.prompt_token_ids),
        }


class ChatShape(_Shape):
    """POST /v1/chat/completions."""

    stream_object = "chat.completion.chunk"

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """See `ResponseShape`."""
        prompt_ids = self._ids_json(choices[0].prompt_token_ids) if choices else b"null"
        return b"".join(
            self._head
            + b'{"index":%d,"delta":{"role":"assistant","content":""},' % choice.index
            + b'"logprobs":null,"finish_reason":null}],"prompt_token_ids":%b}\n\n' % prompt_ids
            for choice in choices
        )

    def chunk(self, choice: Choice, text: str, token_ids: Sequence[int]) -> bytes:
        """See `ResponseShape`."""
        ending = b"null"
        if choice.finish_reason is not None:
            ending = b'%b,"stop_reason":%b' % (_encode(choice.finish_reason), _encode(choice.stop_reason))
        return (
            self._head
            + b'{"index":%d,"delta":{"content":%b},"logprobs":null,' % (choice.index, _encode(text))
            + b'"finish_reason":%b,"token_ids":%b}]}\n\n' % (ending, self._ids_json(token_ids))
        )

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """See `ResponseShape`."""
        return _encode(
            {
                "id": self._id,
                "object": "chat.completion",
                "created": self._created,
                "model": self._model,
                "choices": [self._choice(choice) for choice in choices],
                "service_tier": None,
                "system_fingerprint": None,
                "usage": usage,
                "prompt_logprobs": None,
                "prompt_token_ids": self._ids(choices[0].prompt_token_ids) if choices else None,
                "kv_transfer_params": None,
            }
        )

    def _choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {
                "role": "assistant",
                "content": choice.text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "tool_calls": [],
                "reasoning": None,
            },
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": self._ids(choice.token_ids),
        }
