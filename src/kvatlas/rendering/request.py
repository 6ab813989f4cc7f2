"""A client's HTTP body, reduced to what routing needs to know.

The body itself is forwarded as it came: nothing here is ever sent to an engine in its place. So parsing is as lenient
as the engine's own (numbers and booleans in quotes, `NaN`, a byte order mark), and fields nobody reads here are
skipped, not checked.

What is made for every request is a msgspec struct: 0.3 us to make, where a frozen dataclass takes ten times that.
"""

import json
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec

from kvatlas.errors import BadRequest

__all__ = ["ChatRequest", "Message", "ParsedRequest", "parse_request", "with_report_mode", "without_report_mode"]

# A chat message is free-form JSON that belongs to the model's template: the one place where a dict is the record.
Message: TypeAlias = dict[str, Any]

_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_COMPLETIONS_DEFAULT_MAX_TOKENS = 16
_MAX_CACHE_SALT_CHARS = 128
_REPORT_MODE = "kv_cache_report_mode"
_CACHE_SALT_FORBIDDEN = frozenset("@/\\\0")


class ChatRequest(msgspec.Struct, frozen=True, gc=False):
    """What a chat template is applied to.

    `template_variables` are the named values the template may use beside messages and tools: the client's
    `chat_template_kwargs` with `documents`, `reasoning_effort` and what follows from it merged in as the engine does.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    template_variables: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ParsedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request as routing sees it.

    `prompts` holds the texts or token ids of a completions request, `chat` the conversation of a chat request; both
    are empty for any other API. `max_tokens` is what the engine will take as the limit (None: up to the model's
    context). `unsupported` says why the token ids cannot be worked out here although the request is fine; None when
    they can. `body_bytes` is the body's size.

    `skips_cache`: the engine will not read its prefix cache for this request. `unpredictable` says why the cached
    tokens that the engine will report cannot be foretold; None when they can. `asks_full_report`: the request wants the
    engine to announce reused blocks again (`kv_cache_report_mode`), which nobody but a router should ask for.
    """

    api: Literal["completions", "chat", "other"]
    model: str | None
    stream: bool
    include_usage: bool
    max_tokens: int | None
    prompts: tuple[str | list[int], ...]
    chat: ChatRequest | None
    cache_salt: str | None
    num_choices: int
    add_special_tokens: bool
    unsupported: str | None
    body_bytes: int
    skips_cache: bool = False
    unpredictable: str | None = None
    asks_full_report: bool = False


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _AnyBody(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


class _GenerateBody(_AnyBody):
    """Fields that completions and chat share."""

    max_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    n: int | None = None
    cache_salt: Any = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Any = None
    use_beam_search: bool | None = None
    kv_transfer_params: Any = None
    vllm_xargs: dict[str, Any] | None = None


class _CompletionsBody(_GenerateBody):
    prompt: str | list[_TokenId | str | list[_TokenId]] | None = None
    prompt_embeds: Any = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class _ChatBody(_GenerateBody):
    messages: list[Message] = msgspec.field(default_factory=list)
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


def parse_request(path: str, body: bytes) -> ParsedRequest:
    """Read the fields of a request that decide where it goes.

    Args:
        path: the request's path; a query string is ignored. `/v1/completions` and `/v1/chat/completions` are
            understood, anything else gives api "other", with the model's name when the body is a JSON object that has
            one.
        body: the request's body as received.

    Returns:
        The parsed request.

    Raises:
        BadRequest: the body is not JSON, has a field of the wrong shape, or breaks a rule that the engine answers
            with 400.

    Cost: about 10 us plus 1 us per kB of body.
    """
    route = path.partition("?")[0]
    if route == "/v1/completions":
        return _parse_completions(_decode(body, _completions_decoder), len(body))
    if route == "/v1/chat/completions":
        return _parse_chat(_decode(body, _chat_decoder), len(body))
    return _parse_other(body)


_BodyT = TypeVar("_BodyT", bound=_AnyBody)
_completions_decoder = msgspec.json.Decoder(_CompletionsBody, strict=False)
_chat_decoder = msgspec.json.Decoder(_ChatBody, strict=False)


def _decode(body: bytes, decoder: msgspec.json.Decoder[_BodyT]) -> _BodyT:
    try:
        decoded: _BodyT = decoder.decode(body)
        return decoded
    except (msgspec.DecodeError, RecursionError):
        pass
    # The engine's JSON reader takes a little more than strict JSON: what it would accept must not fail here.
    try:
        converted: _BodyT = msgspec.convert(json.loads(body), decoder.type, strict=False)
        return converted
    except msgspec.ValidationError as error:
        raise BadRequest(f"the request body has the wrong shape: {error}") from None
    except RecursionError:
        raise BadRequest("the request body is nested too deeply to be read; send a flatter JSON object") from None
    except ValueError as error:
        raise BadRequest(f"the request body of {len(body)} bytes is not JSON: {error}") from None


def _parse_other(body: bytes) -> ParsedRequest:
    shape = _AnyBody()
    if body[:1] == b"{":
        try:
            shape = msgspec.json.decode(body, type=_AnyBody, strict=False)
        except (msgspec.DecodeError, RecursionError):
            shape = _AnyBody()
    return ParsedRequest(
        api="other",
        model=shape.model,
        stream=bool(shape.stream),
        include_usage=_include_usage(shape),
        max_tokens=None,
        prompts=(),
        chat=None,
        cache_salt=None,
        num_choices=1,
        add_special_tokens=False,
        unsupported="only completions and chat requests are rendered",
        body_bytes=len(body),
    )


def _parse_completions(body: _CompletionsBody, body_bytes: int) -> ParsedRequest:
    unsupported = _why_truncated(body)
    if body.prompt_embeds:
        unsupported = "prompt_embeds are not supported yet: routed without the index"
    elif body.suffix is not None:
        unsupported = "fill-in-the-middle (suffix) is not supported yet: routed without the index"
    elif body.prompt is None or body.prompt == "":
        raise BadRequest("`prompt` is missing or empty: give a string, a list of token ids, or a list of either")
    max_tokens = _COMPLETIONS_DEFAULT_MAX_TOKENS if body.max_tokens is msgspec.UNSET else body.max_tokens
    return ParsedRequest(
        api="completions",
        model=body.model,
        stream=bool(body.stream),
        include_usage=_include_usage(body),
        max_tokens=max_tokens,
        prompts=_prompts(body.prompt),
        chat=None,
        cache_salt=_checked_salt(body.cache_salt),
        num_choices=max(1, body.n or 1),
        add_special_tokens=body.add_special_tokens is not False,
        unsupported=unsupported,
        body_bytes=body_bytes,
        skips_cache=_skips_cache(body) or bool(body.echo and body.logprobs is not None),
        unpredictable=_why_unpredictable(body, max(body.n or 1, body.best_of or 1)),
        asks_full_report=_asks_full_report(body),
    )


def _prompts(prompt: str | list[int | str | list[int]] | None) -> tuple[str | list[int], ...]:
    """One prompt or many: a flat list of ids is one prompt, a list of texts or of lists is many."""
    if prompt is None:
        return ()
    if isinstance(prompt, str):
        return (prompt,)
    if prompt and isinstance(prompt[0], int):
        if not all(type(token_id) is int for token_id in prompt):
            raise BadRequest("`prompt` mixes token ids with other items: give a list of ids, or a list of lists of ids")
        return (prompt,)  # type: ignore[return-value]  # just checked: a flat list of ids
    many = tuple(item for item in prompt if not isinstance(item, int))
    if len(many) != len(prompt):
        raise BadRequest("`prompt` mixes token ids with texts or lists: put the ids in a list of their own")
    return many


def _parse_chat(body: _ChatBody, body_bytes: int) -> ParsedRequest:
    if not body.messages:
        raise BadRequest("`messages` is missing or empty: give at least one message")
    for index, message in enumerate(body.messages):
        if not isinstance(message.get("role"), str):
            raise BadRequest(f"`messages[{index}]` has no `role`: each message needs a string like 'user'")
    if body.continue_final_message and body.add_generation_prompt:
        raise BadRequest("`continue_final_message` and `add_generation_prompt` cannot both be true: drop one")
    if body.tools is not None and not body.tools:
        raise BadRequest("`tools` must not be an empty array: give at least one tool or leave the field out")
    chat = ChatRequest(
        messages=tuple(body.messages),
        tools=None if body.tools is None else tuple(body.tools),
        template_variables=_template_variables(body),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )
    max_tokens = None if body.max_tokens is msgspec.UNSET else body.max_tokens
    return ParsedRequest(
        api="chat",
        model=body.model,
        stream=bool(body.stream),
        include_usage=_include_usage(body),
        max_tokens=max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        prompts=(),
        chat=chat,
        cache_salt=_checked_salt(body.cache_salt),
        num_choices=max(1, body.n or 1),
        add_special_tokens=bool(body.add_special_tokens),
        unsupported=_why_own_template(body) or _why_truncated(body),
        body_bytes=body_bytes,
        skips_cache=_skips_cache(body),
        unpredictable=_why_unpredictable(body, body.n or 1),
        asks_full_report=_asks_full_report(body),
    )


def _skips_cache(body: _GenerateBody) -> bool:
    """Source: vLLM 0.32.0, sampling_params.py (skip_reading_prefix_cache)."""
    return body.prompt_logprobs is not None or body.prompt_logprob_token_ids is not None


def _why_unpredictable(body: _GenerateBody, sequences: int) -> str | None:
    if sequences > 1:
        return "several sequences of one prompt hit each other's blocks"
    if body.use_beam_search:
        return "beam search forks the prompt"
    if body.kv_transfer_params:
        return "KV is transferred from elsewhere"
    return None


def _asks_full_report(body: _GenerateBody) -> bool:
    return body.vllm_xargs is not None and _REPORT_MODE in body.vllm_xargs


def without_report_mode(body: bytes) -> bytes:
    """The body of a request with `asks_full_report`, with that wish taken out and all else kept.

    Clients must not set it: it makes copy counts drift, and with some models it ends the engine.
    """
    content = json.loads(body)
    content["vllm_xargs"].pop(_REPORT_MODE, None)
    if not content["vllm_xargs"]:
        del content["vllm_xargs"]
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")


def with_report_mode(body: bytes) -> bytes:
    """The body with the wish that the engine announce again what it reuses for this request; all else is kept.

    Source: vLLM 0.32.0, sampling_params.py (`extra_args["kv_cache_report_mode"]`, over HTTP `vllm_xargs`).
    """
    content = json.loads(body)
    content["vllm_xargs"] = {**(content.get("vllm_xargs") or {}), _REPORT_MODE: "full"}
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _template_variables(body: _ChatBody) -> dict[str, Any]:
    """The engine's merge: request fields win over `chat_template_kwargs`; None and "auto" count as not given.

    Source: vLLM 0.32, entrypoints/openai/chat_completion/protocol.py `build_chat_params`, renderers/params.py
        `merge_kwargs`.
    """
    own = body.chat_template_kwargs or {}
    merged = dict(own)
    if not own and body.documents is None and body.reasoning_effort is None:
        return merged
    if body.documents is not None:
        merged["documents"] = body.documents
    if body.reasoning_effort is not None:
        merged["reasoning_effort"] = body.reasoning_effort
        if "enable_thinking" not in own:
            merged["enable_thinking"] = body.reasoning_effort != "none"
    return {name: value for name, value in merged.items() if value is not None and value != "auto"}


def _why_own_template(body: _ChatBody) -> str | None:
    if body.chat_template is not None or "chat_template" in (body.chat_template_kwargs or {}):
        # Running a template from the network could hold the gateway for as long as its author likes.
        return "the request brings its own chat_template, which is not run here: routed without the index"
    return None


def _why_truncated(body: _GenerateBody) -> str | None:
    if body.truncate_prompt_tokens is None:
        return None
    return "truncate_prompt_tokens is not supported yet: routed without the index"


def _include_usage(body: _AnyBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _checked_salt(salt: Any) -> str | None:
    """The salt, when the engine would take it.

    Source: vLLM 0.32, entrypoints/generate/base/protocol.py `validate_cache_salt`.
    """
    if salt is None:
        return None
    if not isinstance(salt, str) or not salt:
        raise BadRequest("`cache_salt` must be a non-empty string when it is given")
    if len(salt) > _MAX_CACHE_SALT_CHARS or not _CACHE_SALT_FORBIDDEN.isdisjoint(salt):
        raise BadRequest("`cache_salt` must have at most 128 characters, none of them '@', '/', '\\' or NUL")
    return salt
