"""A model's Jinja chat template, run the way the transformers library and an engine run it.

The environment's settings (sandbox, block trimming, filters, globals) are part of the output: a missing
`lstrip_blocks` is a different prompt. So are the variables a template sees.

Source: transformers 5.19, utils/chat_template_utils.py; vLLM 0.32, renderers/hf.py `safe_apply_chat_template`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvatlas.clock import Clock
from kvatlas.errors import ConfigError, RenderError
from kvatlas.rendering.content_format import detect_content_format
from kvatlas.rendering.conversation import developer_as_system, template_messages, template_tools
from kvatlas.rendering.request import ChatRequest, Message

__all__ = ["ChatTemplate"]

_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class _GenerationTag(Extension):
    """Accepts `{% generation %}...{% endgeneration %}`, which marks text for training and prints its body as it is."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # jinja2 declares a mutable set; nothing mutates it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a short way for what templates read most: fields of messages, and where a loop stands."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox answers, which first asks for an attribute, and a plain dict has none but these."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is LoopContext and attribute in _LOOP_PLACES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


_DICT_ATTRIBUTES = frozenset(dir({}))
_LOOP_PLACES = frozenset(("first", "index", "index0", "last", "length"))


class ChatTemplate:
    """One compiled chat template.

    Args:
        source: the template's text.
        special_tokens: the tokenizer's named tokens (`bos_token`, ...), which templates use by name.
        clock: what `strftime_now` reads.

    Raises:
        ConfigError: the template does not compile.
    """

    __slots__ = ("_knows_developer", "_source", "_special_tokens", "_template", "content_format")

    def __init__(self, source: str, special_tokens: Mapping[str, str], clock: Clock) -> None:
        environment = _environment(clock)
        try:
            self._template = environment.from_string(source)
            self._template.globals = dict(self._template.globals)  # flat: a chain of maps is copied with every render
            self.content_format = detect_content_format(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}; check the model's files") from None
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._knows_developer = '"developer"' in source or "'developer'" in source

    def render(self, chat: ChatRequest) -> str:
        """Render a conversation to the text that is tokenised.

        Raises:
            RenderError: the template refuses the conversation, or the request's flags contradict each other.

        Cost: about 12 us plus 3 us per message for a ChatML template.
        """
        if chat.continue_final_message and chat.add_generation_prompt:
            raise RenderError(
                "continue_final_message needs add_generation_prompt=false: the engine refuses both together"
            )
        messages = template_messages(chat.messages, self.content_format)
        if not self._knows_developer and any(message["role"] == "developer" for message in messages):
            messages = developer_as_system(messages)
        final_text = self._mark_final_message(messages) if chat.continue_final_message else None
        variables = {
            **self._special_tokens,
            "documents": None,
            "tools": template_tools(chat.tools),
            **chat.template_variables,
            "messages": messages,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        try:
            text = self._template.render(variables)
        except Exception as error:  # noqa: BLE001 - a template is foreign code: it may fail with anything
            raise RenderError(f"the chat template refused the conversation: {type(error).__name__}: {error}") from None
        return text if final_text is None else _cut_at_mark(text, final_text)

    def _mark_final_message(self, messages: Sequence[Message]) -> str:
        """Append the mark to the last message's last text, in place, and return that text without it."""
        content = messages[-1]["content"]
        if "content" not in self._source:
            raise RenderError("continue_final_message is set but the chat template does not use message content")
        if isinstance(content, str):
            messages[-1]["content"] = content + _CONTINUE_MARK
            return content
        for part in reversed(content):
            if "text" in part:
                text: str = part["text"]
                part["text"] = text + _CONTINUE_MARK
                return text
        raise RenderError("continue_final_message is set but the last message has no text to continue")


def _cut_at_mark(rendered: str, final_text: str) -> str:
    mark = _CONTINUE_MARK.strip()
    if final_text.strip() not in rendered or mark not in rendered:
        raise RenderError(
            "continue_final_message is set but the chat template does not print the final message as it is"
        )
    place = rendered.rindex(mark)
    head = rendered[:place]
    # When the template trimmed the message, the space after the mark is gone, and so is what stood before it.
    return head if rendered.startswith(_CONTINUE_MARK, place) else head.rstrip()


def _environment(clock: Clock) -> ImmutableSandboxedEnvironment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])

    def strftime_now(pattern: str) -> str:
        return datetime.fromtimestamp(clock.wall_s(), tz=UTC).astimezone().strftime(pattern)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates may pass it by place
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - as above
) -> str:
    """Plain JSON: unlike Jinja's own filter, it does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
