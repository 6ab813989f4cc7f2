"""Prompts put together from turns seen before have the ids that the tokenizer gives to the whole text."""

import json
from functools import cache
from tempfile import TemporaryDirectory

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers, processors

from kvatlas.rendering import LocalRenderer, parse_request, write_tiny_model

MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
ODD = (
    "[INST]",
    "<s>",
    " <tool> ",
    "Word",
    "im_end|>",
    "<|im_end|>x",
    "<|im_",
    "end|>",
    "<|",
    "|>",
    " ",
    "  ",
    "\n",
    "\u0130",
)
FRAGMENTS = st.one_of(st.sampled_from([*MARKS, *ODD, "the water of the token"]), st.text(max_size=12))
TEXTS = st.lists(FRAGMENTS, max_size=14).map("".join)
BOS = processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
BOTH_ENDS = processors.TemplateProcessing(
    "<|endoftext|> <|im_start|> $A <|im_end|>",
    None,
    [("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2)],
)


def added(text: str, *, special: bool = False, **flags: bool):
    """Adds one more token."""

    def change(tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.add_tokens([tokenizers.AddedToken(text, special=special, **flags)])

    return change


def with_part(name: str, part: object):
    """Replaces a part of the pipeline."""
    return lambda tokenizer: setattr(tokenizer, name, part)


KINDS = {
    "as it is": lambda _: None,
    "begins with a token": with_part("post_processor", BOS),
    "token at both ends": with_part("post_processor", BOTH_ENDS),
    "two last steps": with_part("post_processor", processors.Sequence([processors.ByteLevel(), BOS])),
    "another last step": with_part("post_processor", processors.BertProcessing(("<|im_end|>", 2), ("<|im_start|>", 1))),
    "no last step": with_part("post_processor", None),
    "no common beginning": added("[INST]", special=True),
    "short common beginning": added("<s>", special=True, normalized=False),
    "strips left": added("[INST]", special=True, lstrip=True),
    "strips right": added("<s>", special=True, rstrip=True),
    "whole words": added("Word", special=True, single_word=True),
    "a normalised token": added("Word", normalized=True),
    "an overlapping token": added("<|im_end|>x"),
    "an overlapping end": added("im_end|>"),
    "spaces inside": added(" <tool> ", special=True),
    "lower case": with_part("normalizer", normalizers.Lowercase()),
    "a prefix": with_part("normalizer", normalizers.Prepend("x")),
    "space in front": with_part("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "metaspace": with_part("pre_tokenizer", pre_tokenizers.Metaspace()),
}


@cache
def renderer_of(kind: str) -> LocalRenderer:
    """The tiny model with one thing changed; remembers little, so that entries also go."""
    with TemporaryDirectory() as folder:
        path = write_tiny_model(folder) / "tokenizer.json"
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        KINDS[kind](tokenizer)
        tokenizer.save(str(path))
        return LocalRenderer.load(folder, cache_bytes=4000)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), special=st.booleans())
def test_memory_changes_no_token(kind: str, texts: list[str], special: bool) -> None:
    """Growing texts, seen before up to anywhere, with any kind of added token and any last step."""
    renderer = renderer_of(kind)
    grown = ""
    for text in texts:
        grown += text
        if not grown:
            continue
        body = json.dumps({"prompt": grown, "add_special_tokens": special}).encode()
        (prompt,) = renderer.render_now(parse_request("/v1/completions", body))
        assert list(prompt.token_ids) == renderer.tokenize(grown, add_special_tokens=special)
    assert renderer.cache.used_bytes <= 4000


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(TEXTS, min_size=1, max_size=6))
def test_conversations_have_the_tokens_of_their_text(turns: list[str]) -> None:
    """Hostile texts inside messages, turn after turn."""
    renderer = renderer_of("as it is")
    messages = []
    for number, text in enumerate(turns):
        messages.append({"role": ("user", "assistant")[number % 2], "content": text})
        request = parse_request("/v1/chat/completions", json.dumps({"messages": messages}).encode())
        assert request.chat is not None
        (prompt,) = renderer.render_now(request)
        whole = renderer.apply_chat_template(request.chat)
        assert list(prompt.token_ids) == renderer.tokenize(whole, add_special_tokens=False)


def test_only_new_turns_are_tokenised() -> None:
    """The counters tell what memory gave: everything but the two new turns."""
    with TemporaryDirectory() as folder:
        renderer = LocalRenderer.load(write_tiny_model(folder))
    messages = [{"role": "user", "content": "what is a token?"}]
    requests = []
    for _ in range(3):
        requests.append(parse_request("/v1/chat/completions", json.dumps({"messages": messages}).encode()))
        messages += [{"role": "assistant", "content": "a word"}, {"role": "user", "content": f"and {len(messages)}?"}]
    lengths = [len(renderer.render_now(request)[0].token_ids) for request in requests]
    memory = renderer.cache
    assert memory.hit_tokens + memory.missed_tokens >= sum(lengths)
    assert memory.missed_tokens <= lengths[2] + 3
    before = memory.missed_tokens
    renderer.render_now(requests[2])
    assert memory.missed_tokens == before
