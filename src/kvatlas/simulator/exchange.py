"""One client's request from its prompts to its last reply: check, queue, collect, and drop when the client is gone."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from aiohttp import web

from kvatlas.errors import BadRequest, KvAtlasError, ModelNotFound
from kvatlas.hashing import Lora, RequestExtras
from kvatlas.rendering import ParsedRequest, RenderedPrompt
from kvatlas.simulator.api_bodies import ClientOptions, GenerationBody
from kvatlas.simulator.config import EngineConfig
from kvatlas.simulator.ranks import EngineRanks
from kvatlas.simulator.reply_text import ReplyText
from kvatlas.simulator.request import EngineRequest
from kvatlas.simulator.responses import DONE, Choice, ResponseShape, Usage, error_chunk
from kvatlas.simulator.sampling import FinishReason, SamplingParams
from kvatlas.simulator.step import RequestOutput
from kvatlas.simulator.streams import OutputStream
from kvatlas.simulator.vocabulary import ReplyVocabulary

__all__ = ["Exchange", "check_prompts", "check_request"]

_MOST_REPLIES = 16_384
_serial_numbers = itertools.count()


def check_request(parsed: ParsedRequest, body: GenerationBody, config: EngineConfig) -> None:
    """Refuse what the engine refuses before it looks at the prompt's tokens.

    Raises:
        ModelNotFound: this engine serves another model.
        BadRequest: limits that cannot be met, or a feature that is not simulated.
    """
    if parsed.model and parsed.model != config.model and parsed.model not in config.lora_modules:
        raise ModelNotFound(f"The model `{parsed.model}` does not exist.")
    if parsed.unsupported is not None:
        raise BadRequest(parsed.unsupported)
    if body.echo:
        raise BadRequest("echo is not simulated: leave it out")
    if parsed.max_tokens is not None and parsed.max_tokens < 1:
        raise BadRequest(f"max_tokens must be at least 1, got {parsed.max_tokens}.")
    if parsed.max_tokens is not None and (body.min_tokens or 0) > parsed.max_tokens:
        raise BadRequest(f"min_tokens must not be above max_tokens={parsed.max_tokens}, got {body.min_tokens}.")


def check_prompts(parsed: ParsedRequest, prompts: tuple[RenderedPrompt, ...], config: EngineConfig) -> None:
    """Refuse prompts that are empty, too long or too many.

    Raises:
        BadRequest: says which bound, and by how much.
    """
    if len(prompts) * parsed.num_choices > _MOST_REPLIES:
        raise BadRequest(
            f"{len(prompts)} prompts with n={parsed.num_choices} make more than {_MOST_REPLIES} replies: ask for fewer"
        )
    for prompt in prompts:
        _check_length(len(prompt.token_ids), parsed.max_tokens, config.max_model_len)


def _check_length(prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> None:
    if not prompt_tokens:
        raise BadRequest("The prompt has no tokens: give at least one")
    if prompt_tokens + (max_tokens or 1) > max_model_len:
        asked = f"{max_tokens} output tokens and " if max_tokens is not None else ""
        raise BadRequest(
            f"This model's maximum context length is {max_model_len} tokens, but the request asks for {asked}a prompt "
            f"of {prompt_tokens} tokens: shorten the prompt or ask for fewer output tokens"
        )


@dataclass(slots=True)
class _OpenReply:
    choice: Choice
    text: ReplyText
    request: EngineRequest | None = None


class Exchange:
    """The replies to one HTTP request.

    Args:
        ranks: do the work.
        shape: words the response.
        vocabulary: texts of output tokens.
        config: limits and what to report.
    """

    def __init__(
        self, ranks: EngineRanks, shape: ResponseShape, vocabulary: ReplyVocabulary, config: EngineConfig
    ) -> None:
        self._ranks = ranks
        self._shape = shape
        self._vocabulary = vocabulary
        self._config = config
        self._stream = OutputStream()
        self._replies: dict[str, _OpenReply] = {}
        self._prompt_tokens = 0
        self._is_chat = False

    def submit(
        self,
        response_id: str,
        parsed: ParsedRequest,
        body: GenerationBody,
        prompts: tuple[RenderedPrompt, ...],
        options: ClientOptions,
    ) -> None:
        """Queue one engine request per prompt and choice.

        Raises:
            HashingError: a token id is out of range. What was queued before is dropped.
        """
        self._is_chat = parsed.api == "chat"
        indexes = itertools.count()
        text = ReplyText(self._vocabulary, body.stop_strings, keep_stop=bool(body.include_stop_str_in_output))
        for prompt in prompts:
            self._prompt_tokens += len(prompt.token_ids)
            extras = self._with_lora(prompt.extras, parsed.model)
            for number in range(parsed.num_choices):
                request_id = f"{response_id}-{next(_serial_numbers)}"
                self._replies[request_id] = _OpenReply(Choice(next(indexes), prompt.token_ids), text.fresh())
                self._ranks.add_request(
                    request_id,
                    prompt.token_ids,
                    self._params(parsed, body, len(prompt.token_ids), number, options),
                    rank=options.rank,
                    extras=extras,
                    stream=self._stream,
                )

    def _params(
        self, parsed: ParsedRequest, body: GenerationBody, prompt_tokens: int, choice: int, options: ClientOptions
    ) -> SamplingParams:
        room = self._config.max_model_len - prompt_tokens
        return SamplingParams(
            max_tokens=room if parsed.max_tokens is None else parsed.max_tokens,
            min_tokens=body.min_tokens or 0,
            ignore_eos=bool(body.ignore_eos),
            seed=body.seed,
            choice=choice,
            priority=options.priority,
            skip_reading_prefix_cache=body.prompt_logprobs is not None,
            kv_cache_report_mode=body.kv_cache_report_mode,
            session_id=options.session_id,
        )

    def _with_lora(self, extras: RequestExtras, model: str | None) -> RequestExtras:
        """A model name that is an adapter's makes the adapter part of every block's identity."""
        path = self._config.lora_modules.get(model or "")
        return extras if path is None else replace(extras, lora=Lora(model or "", path))

    def abandon(self) -> None:
        """Drop whatever has not ended: the client is gone, or the request failed. Safe to call at any time."""
        for request_id in self._stream.open_request_ids:
            self._ranks.abort(request_id)
        self._ranks.forget(tuple(self._replies))

    async def whole(self) -> web.Response:
        """Wait for all replies and answer with one JSON body."""
        if any(reply.text.has_stop_strings for reply in self._replies.values()):
            async for outputs in self._stream:  # each token may end a reply
                for output in outputs:
                    self._grow(output)
        else:
            for output in await self._stream.whole():
                self._grow(output)
        body = self._shape.whole(self._choices(), self._usage())
        return web.Response(body=body, content_type="application/json")

    async def streamed(
        self,
        http_request: web.Request,
        headers: dict[str, str],
        *,
        include_usage: bool,
        on_piece: Callable[[int], None] | None = None,
    ) -> web.StreamResponse:
        """Answer with server-sent events, one write per engine step. `on_piece` is told how many there were."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", **headers})
        await response.prepare(http_request)
        try:
            # The opening (the role) waits for the first token, as vLLM's does: clients and routers take the first
            # byte of the body for the end of prefill.
            opening = self._shape.opening(self._choices())
            pieces = itertools.count(1)
            async for outputs in self._stream:
                await response.write(b"".join([opening, *(self._chunk(output) for output in outputs)]))
                opening = b""
                if on_piece is not None:
                    on_piece(next(pieces))
            ending = self._shape.usage_chunk(self._usage()) if include_usage else b""
        except ConnectionError:
            return response  # the client hung up between two writes; the caller abandons what is left
        except KvAtlasError as error:
            ending = error_chunk(error.message)
        await response.write_eof(ending + DONE)
        return response

    def _chunk(self, output: RequestOutput) -> bytes:
        choice = self._replies[output.request_id].choice
        text = self._grow(output)
        return b"" if text is None else self._shape.chunk(choice, text, output.token_ids)

    def _grow(self, output: RequestOutput) -> str | None:
        """Add one step's tokens to their reply and return the new text; None when a stop string had ended the reply.

        Raises:
            KvAtlasError: the engine ended the request with an error.
        """
        if output.finish_reason is FinishReason.ERROR:
            raise KvAtlasError("the engine could not load this request's KV from outside the device: send it again")
        reply = self._replies[output.request_id]
        choice = reply.choice
        if choice.finish_reason is not None:
            return None
        reply.request = output.request
        text = reply.text.push(output.token_ids, is_last=output.finish_reason is not None)
        choice.text += text
        choice.token_ids.extend(output.token_ids)
        if reply.text.stop_reason is not None:
            choice.finish_reason = FinishReason.STOP.value
            choice.stop_reason = reply.text.stop_reason
            self._ranks.abort(output.request_id, FinishReason.STOP)
        elif output.finish_reason is not None:
            choice.finish_reason = output.finish_reason.value
        return text

    def _choices(self) -> list[Choice]:
        return [reply.choice for reply in self._replies.values()]

    def _usage(self) -> Usage:
        replies = list(self._replies.values())
        completion_tokens = sum(len(reply.choice.token_ids) for reply in replies)
        last = replies[-1].request
        if not self._config.enable_prompt_tokens_details or last is None:
            return Usage.of(self._prompt_tokens, completion_tokens, None)
        cached = last.cached_tokens or 0
        created = last.created_tokens if self._is_chat else None  # only chat replies report it
        return Usage.of(self._prompt_tokens, completion_tokens, cached, created)
