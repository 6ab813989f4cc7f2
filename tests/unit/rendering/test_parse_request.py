"""Request bodies: what is read, what is refused, and what is left to the engine."""

import json

import pytest

from kvatlas.errors import BadRequest
from kvatlas.rendering import parse_request

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def parse(path, **fields):
    """Parse a JSON object given as keywords."""
    return parse_request(path, json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ("text",)),
        ([1, 2, 3], ([1, 2, 3],)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ([1], [2, 3])),
        (["a", [1, 2]], ("a", [1, 2])),
        ([], ()),
    ],
)
def test_every_form_of_prompt_is_understood(prompt, expected):
    """A text, token ids, or many of either."""
    assert parse(COMPLETIONS, prompt=prompt).prompts == expected


@pytest.mark.parametrize("prompt", [[1, "a"], ["a", 1], [[1], 2], [1, [2]], [-1], [1.5], {"a": 1}, 7, "", None])
def test_prompts_of_no_known_form_are_refused(prompt):
    """Mixed lists, negative ids, other shapes and empty texts get a 400."""
    with pytest.raises(BadRequest):
        parse(COMPLETIONS, prompt=prompt)


def test_fields_that_decide_load_and_usage_are_read():
    """Model, stream, usage, limits, choices and the salt."""
    request = parse(
        COMPLETIONS,
        model="m",
        prompt="x",
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=7,
        n=3,
        cache_salt="s",
        temperature=0.1,
        unknown={"a": [1]},
    )
    assert (request.api, request.model, request.stream, request.include_usage) == ("completions", "m", True, True)
    assert (request.max_tokens, request.num_choices, request.cache_salt) == (7, 3, "s")
    assert request.unsupported is None
    assert request.add_special_tokens


def test_absent_fields_have_the_engines_defaults():
    """Completions generate 16 tokens unless told; chat has no limit and adds no special tokens."""
    request = parse(COMPLETIONS, prompt="x")
    assert (request.max_tokens, request.num_choices, request.stream, request.include_usage) == (16, 1, False, False)
    assert parse(COMPLETIONS, prompt="x", max_tokens=None).max_tokens is None
    request = parse(CHAT, messages=HELLO)
    assert (request.max_tokens, request.add_special_tokens) == (None, False)
    assert request.chat.add_generation_prompt
    assert not request.chat.continue_final_message


def test_max_completion_tokens_wins_over_max_tokens():
    """The newer field counts when both are there."""
    assert parse(CHAT, messages=HELLO, max_tokens=5, max_completion_tokens=9).max_tokens == 9
    assert parse(CHAT, messages=HELLO, max_tokens=5).max_tokens == 5


def test_template_variables_are_merged_as_the_engine_does():
    """Request fields win over chat_template_kwargs; null and "auto" count as absent."""
    request = parse(
        CHAT,
        messages=HELLO,
        documents=[{"text": "d"}],
        reasoning_effort="none",
        chat_template_kwargs={"documents": [], "custom": 1, "gone": None, "also_gone": "auto"},
    )
    assert request.chat.template_variables == {
        "documents": [{"text": "d"}],
        "custom": 1,
        "reasoning_effort": "none",
        "enable_thinking": False,
    }


@pytest.mark.parametrize("salt", ["", 5, "a" * 129, "a@b", "a/b", "a\\b", "a\0b", ["x"], False])
def test_salts_the_engine_refuses_are_refused(salt):
    """The engine would answer 400: so do we."""
    with pytest.raises(BadRequest, match="cache_salt"):
        parse(CHAT, messages=HELLO, cache_salt=salt)


def test_salts_the_engine_takes_are_taken():
    """Up to 128 characters; null is no salt."""
    assert parse(CHAT, messages=HELLO, cache_salt="é" * 128).cache_salt == "é" * 128
    assert parse(CHAT, messages=HELLO, cache_salt=None).cache_salt is None


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {},
        {"messages": "hello"},
        {"messages": ["hello"]},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": 1}]},
        {"messages": HELLO, "tools": []},
        {"messages": HELLO, "tools": ["f"]},
        {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
        {"messages": HELLO, "max_tokens": "many"},
        {"messages": HELLO, "stream": {}},
    ],
)
def test_chat_bodies_the_engine_refuses_are_refused(fields):
    """Wrong shapes and contradicting flags get a 400 that says what to do."""
    with pytest.raises(BadRequest) as caught:
        parse(CHAT, **fields)
    assert caught.value.http_status == 400


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"prompt": }', b"[" * 100_000])
def test_bodies_that_are_not_a_json_object_are_refused(body):
    """Nothing a client sends raises anything but BadRequest."""
    for path in (CHAT, COMPLETIONS):
        with pytest.raises(BadRequest):
            parse_request(path, body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "x", "temperature": NaN, "stream": "true", "max_tokens": "16"}',
        b'\xef\xbb\xbf{"prompt": "x", "stream": 1, "max_tokens": 16.0}',
        b'{"prompt": "x", "stream": true, "max_tokens": 16, "vllm_xargs": {"big": 123456789012345678901234567890}}',
    ],
)
def test_what_the_engines_lenient_reader_takes_is_taken(body):
    """Quoted scalars, NaN, a byte order mark and huge numbers are no reason to refuse."""
    request = parse_request(COMPLETIONS, body)
    assert (request.stream, request.max_tokens, request.prompts) == (True, 16, ("x",))


def test_huge_numbers_in_tools_reach_the_template():
    """A JSON schema may name limits beyond 64 bits."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 10**30}}}
    assert parse(CHAT, messages=HELLO, tools=[tool]).chat.tools == (tool,)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}),
        (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 5}),
        (CHAT, {"messages": HELLO, "chat_template": "{{ messages }}"}),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"chat_template": "x"}}),
        (CHAT, {"messages": HELLO, "truncate_prompt_tokens": -1}),
    ],
)
def test_requests_that_cannot_be_rendered_here_say_why(path, fields):
    """They are good requests: the engine decides, routing goes without the index."""
    assert "without the index" in parse(path, **fields).unsupported


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/embeddings", b'{"model": "e", "input": "x"}', "e"),
        ("/v1/embeddings?x=1", b'{"model": 5}', None),
        ("/v1/audio/transcriptions", b"--boundary", None),
        ("/v1/completions/", b"{}", None),
        ("/v1/models", b"", None),
    ],
)
def test_other_apis_are_passed_by(path, body, model):
    """Only the model's name is read, and nothing is refused."""
    request = parse_request(path, body)
    assert (request.api, request.model, request.chat, request.prompts) == ("other", model, None, ())
    assert request.unsupported


def test_a_query_string_does_not_hide_the_api():
    """The path is matched without what follows the question mark."""
    assert parse_request(f"{CHAT}?trace=1", b'{"messages": [{"role": "user"}]}').api == "chat"
