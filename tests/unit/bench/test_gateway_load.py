"""The load of the gateway benchmark is what its stand-in engine and its planner take it for."""

import json
import random
from pathlib import Path

from kvatlas.bench.backend import CACHED_TOKENS, PROMPT_TOKENS
from kvatlas.bench.load import TURN_BYTES, conversations, request_bytes
from kvatlas.rendering import LocalRenderer, parse_request, write_tiny_model

PATH = "/v1/chat/completions"


def body_of(request: bytes) -> bytes:
    """The body, after a look at its announced length."""
    head, _, body = request.partition(b"\r\n\r\n")
    assert head.endswith(b"Content-Length: %d" % len(body))
    return body


def test_the_engine_reports_what_the_prompt_is(tmp_path: Path) -> None:
    """Tokens of the repeated request, and those of its whole blocks but the last token's."""
    renderer = LocalRenderer.load(write_tiny_model(tmp_path))
    (prompt,) = renderer.render_now(parse_request(PATH, body_of(request_bytes(stream=False))))
    assert len(prompt.token_ids) == PROMPT_TOKENS
    assert (PROMPT_TOKENS - 1) // 16 * 16 == CACHED_TOKENS


def test_conversations_grow_and_never_repeat() -> None:
    """Every turn is the one before and two new texts; the next conversation shares only the first message."""
    requests = conversations(3, random.Random(1))
    bodies = [json.loads(body_of(next(requests))) for _ in range(6)]
    talks = [body["messages"] for body in bodies]
    assert [len(talk) for talk in talks] == [3, 5, 7, 3, 5, 7]
    assert talks[1][:3] == talks[0]
    assert talks[2][:5] == talks[1]
    assert talks[3][0] == talks[0][0]
    texts = [message["content"] for talk in (talks[2], talks[5]) for message in talk[1:]]
    assert len(set(texts)) == 12
    assert all(len(text) <= TURN_BYTES for text in texts)
