"""Chat messages as the template must see them.

An engine does not hand the client's messages to the template as they came: parts are joined or wrapped, tool calls
are put in a fixed key order and their arguments parsed, unknown fields dropped. Every one of these steps can change
token ids.

Source: vLLM 0.32, renderers/chat_utils.py `parse_chat_messages`, renderers/hf.py `safe_apply_chat_template`,
entrypoints/openai/chat_completion/protocol.py (field order of tools and tool calls).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvatlas.errors import RenderError
from kvatlas.rendering.content_format import ContentFormat
from kvatlas.rendering.request import Message

__all__ = ["developer_as_system", "find_media", "template_messages", "template_tools"]

# Part types that are text, and the field that holds it.
_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MEDIA_FIELDS = (
    "image_url",
    "image_pil",
    "image_embeds",
    "input_image",
    "audio_url",
    "input_audio",
    "audio_embeds",
    "video_url",
    "video_embeds",
    "prompt_embeds",
)
# What the API defines for a part; only fields beyond these are passed on to a template.
_KNOWN_PART_FIELDS = frozenset(
    (
        *(
            "audio_embeds",
            "audio_url",
            "closed",
            "data",
            "file",
            "image_embeds",
            "image_pil",
            "image_url",
            "input_audio",
            "name",
        ),
        *("prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid", "video_embeds", "video_url"),
    )
)
_BILLING_HEADER = "x-anthropic-billing-header"


def find_media(messages: Iterable[Message]) -> str | None:
    """Name the first content part that is not text (image, audio, video, embeddings), or None."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict):
                continue
            for field in _MEDIA_FIELDS:
                if part.get("type") == field or field in part:
                    return field
    return None


def template_messages(messages: Sequence[Message], content_format: ContentFormat) -> list[Message]:
    """Rebuild messages in the form an engine gives to its chat template.

    Args:
        messages: as the client sent them, each with a string `role`.
        content_format: what the template wants.

    Returns:
        New messages; the given ones are not changed.

    Raises:
        RenderError: content that is not text, or of a shape that no engine takes.
    """
    media = find_media(messages)
    if media is not None:
        raise RenderError(f"a message part of type {media!r} is not supported yet: routed without the index")
    return [_template_message(message, content_format) for message in messages]


def _template_message(message: Message, content_format: ContentFormat) -> Message:
    role = message["role"]
    content: Any = message.get("content")
    if role == "system" or content_format == "openai" or not isinstance(content, str):
        content = _template_content(message, content_format)
    result: Message = {"role": role, "content": content}
    if role == "assistant":
        _add_assistant_fields(result, message)
    elif role == "tool":
        if "tool_call_id" in message:
            result["tool_call_id"] = message["tool_call_id"]
        if isinstance(content, list) and all(part["type"] == "text" for part in content):
            result["content"] = "\n".join(part["text"] for part in content)
    for field in ("name", "task"):
        if isinstance(message.get(field), str):
            result[field] = message[field]
    if role == "developer":
        result["tools"] = message.get("tools")
    return result


def _template_content(message: Message, content_format: ContentFormat) -> str | list[Message]:
    parts = _content_parts(message)
    if message["role"] == "system":
        parts = _without_billing_header(parts)
    if content_format == "openai":
        wrapped = [_wrapped_part(part) for part in parts]
        return [part for part in wrapped if part is not None]
    return "\n".join(text for part in parts if (text := _part_text(part)) is not None)


def _content_parts(message: Message) -> list[Any]:
    content = message.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return content
    raise RenderError(f"message content must be a string, a list of parts or null, not {type(content).__name__}")


def _part_text(part: Any) -> str | None:
    """A part's text; None for a text part without text, which the engine skips."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RenderError(f"a content part must be a string or an object, not {type(part).__name__}")
    kind = part.get("type", "text")
    field = "name" if kind == "tool_reference" else _TEXT_FIELDS.get(kind)
    if field is None:
        raise RenderError(f"a message part of type {kind!r} is not supported yet: routed without the index")
    text = part.get(field)
    if text is not None and not isinstance(text, str):
        raise RenderError(f"the {field!r} of a content part must be a string, not {type(text).__name__}")
    return text


def _wrapped_part(part: Any) -> Message | None:
    text = _part_text(part)
    if text is None:
        return None
    if isinstance(part, str):
        return {"type": "text", "text": text}
    if part.get("type") == "tool_reference":
        return {"type": "tool_reference", "name": text}
    extra = {name: value for name, value in part.items() if name not in _KNOWN_PART_FIELDS}
    return {"type": "text", "text": text, **extra}


def _without_billing_header(parts: list[Any]) -> list[Any]:
    """Drop the one line some coding agents put before a system prompt: it changes on every request."""
    kept: list[Any] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not (isinstance(text, str) and text.startswith(_BILLING_HEADER)):
            kept.append(part)
            continue
        rest = text.partition("\n")[2]
        if rest:
            kept.append({**part, "text": rest} if isinstance(part, dict) else rest)
    return kept


def _add_assistant_fields(result: Message, message: Message) -> None:
    calls = message.get("tool_calls")
    if calls:
        result["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        result["reasoning"] = reasoning
        result["reasoning_content"] = reasoning


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise RenderError(
            "an assistant message's tool_calls must be objects of type 'function' with a 'function' object"
        )
    ordered = _known_first(function, ("arguments", "name"))
    ordered["arguments"] = _parsed_arguments(function.get("arguments"))
    return _known_first({**call, "function": ordered}, ("id", "function", "type"))


def _parsed_arguments(arguments: Any) -> dict[str, Any]:
    """Templates expect a mapping; history with broken arguments counts as no arguments, as in the engine."""
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _known_first(record: Mapping[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    head = {name: record[name] for name in known if name in record}
    return head | {name: value for name, value in record.items() if name not in head}


def template_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools with the fields, order and defaults that an engine gives to its template.

    Raises:
        RenderError: a tool without a named function.
    """
    return None if tools is None else [_template_tool(tool) for tool in tools]


def _template_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RenderError('each tool must look like {"type": "function", "function": {"name": ..., "parameters": ...}}')
    defer = tool.get("defer_loading")
    shown = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    optional = {
        "strict": function.get("strict"),
        "defer_loading": defer if function.get("defer_loading") is None else function["defer_loading"],
    }
    shown |= {name: value for name, value in optional.items() if value is not None}
    result: dict[str, Any] = {"type": "function", "function": shown}
    return result if defer is None else {**result, "defer_loading": defer}


def developer_as_system(messages: list[Message]) -> list[Message]:
    """Turn developer messages into system messages, and all system messages into one at the front.

    For templates that do not know the role "developer".
    """
    renamed = [
        {**{name: value for name, value in message.items() if name != "tools"}, "role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    system_places = [place for place, message in enumerate(renamed) if message["role"] == "system"]
    if system_places in ([], [0]):
        return renamed
    texts = [text for place in system_places if (text := _flat_text(renamed[place]["content"]))]
    others = [message for message in renamed if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _flat_text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if "text" in part)
    return str(content)
