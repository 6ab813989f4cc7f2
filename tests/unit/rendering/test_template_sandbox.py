"""The short way to fields of messages answers as the plain sandbox does, for all that a template may ask."""

import re
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvatlas.clock import ManualClock
from kvatlas.errors import RenderError
from kvatlas.rendering import ChatRequest
from kvatlas.rendering.chat_template import ChatTemplate

MESSAGE: dict[str, Any] = {
    "role": "user",
    "content": "a {} b",
    "items": "shadowed",
    "_private": "seen",
    "nothing": None,
    "parts": [1, {"first": 2}],
}
QUESTIONS = (
    *("role", "content.upper()", "content.format(1)", "content.format_map({})", "nothing", "missing", "missing or 1"),
    *("missing.more", "items", "items()", "keys() | list", "get('role')", "_private", "parts[1].first", "parts.first"),
    *(
        "__class__",
        "__class__.__mro__",
        "update({'role': 1})",
        "pop('role')",
        "clear",
        "copy().role",
        "content.missing",
    ),
)
LOOPS = (
    *("first", "last", "index", "index0", "revindex", "length", "depth", "previtem", "nextitem.role", "missing"),
    *("_iterable", "cycle(1, 2)", "changed(1)", "__init__", "__call__"),
)


def answers(template: str) -> tuple[str, str]:
    """What ours and the plain sandbox make of a template: the text, or the kind of error."""
    messages = [dict(MESSAGE), dict(MESSAGE, role="assistant")]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    try:
        plain = environment.from_string(template).render(messages=[dict(each) for each in messages])
    except Exception as error:  # noqa: BLE001 - a template may fail with anything
        plain = f"{type(error).__name__}: {error}"
    # Fields no engine passes on are dropped before rendering, so the template is asked with its variables.
    chat = ChatRequest((), template_variables={"messages_": messages})
    try:
        ours = ChatTemplate(template.replace("messages", "messages_"), {}, ManualClock()).render(chat)
    except RenderError as error:
        ours = error.message.partition("conversation: ")[2]
    return re.sub("0x[0-9a-f]+", "", ours), re.sub("0x[0-9a-f]+", "", plain)


@pytest.mark.parametrize("question", QUESTIONS)
def test_fields_of_messages(question: str) -> None:
    """Fields, missing ones, names that dicts have themselves, private and unsafe ones, methods."""
    ours, plain = answers("{% for m in messages %}[{{ m." + question + " }}]{% endfor %}")
    assert ours == plain


@pytest.mark.parametrize("question", LOOPS)
def test_places_of_loops(question: str) -> None:
    """Where a loop stands, and what else can be asked of it."""
    ours, plain = answers("{% for m in messages %}[{{ loop." + question + " }}]{% endfor %}")
    assert ours == plain
