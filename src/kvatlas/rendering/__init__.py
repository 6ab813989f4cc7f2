"""Requests turned into the token ids an engine would see.

Lives here: reading request bodies, chat templates, tokenizers, rendering through an engine, and a tiny model made on
the spot. Must not live here: which worker gets the request, block keys, HTTP serving.
"""

from kvatlas.rendering.engine import EngineRenderer
from kvatlas.rendering.local import LocalRenderer
from kvatlas.rendering.prompt import RenderedPrompt, Renderer, extras_of
from kvatlas.rendering.request import (
    ChatRequest,
    Message,
    ParsedRequest,
    parse_request,
    with_report_mode,
    without_report_mode,
)
from kvatlas.rendering.text_tokenizer import TextTokenizer
from kvatlas.rendering.tiny_model import TINY_CHAT_TEMPLATE, write_tiny_model
from kvatlas.rendering.token_cache import TokenCache

__all__ = [
    "TINY_CHAT_TEMPLATE",
    "ChatRequest",
    "EngineRenderer",
    "LocalRenderer",
    "Message",
    "ParsedRequest",
    "RenderedPrompt",
    "Renderer",
    "TextTokenizer",
    "TokenCache",
    "extras_of",
    "parse_request",
    "with_report_mode",
    "without_report_mode",
    "write_tiny_model",
]
