"""Rendering in this process: the model's own template and tokenizer, no network, no engine."""

import asyncio
import os
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from kvatlas.clock import Clock, SystemClock
from kvatlas.errors import RenderError
from kvatlas.rendering.chat_template import ChatTemplate
from kvatlas.rendering.model_files import find_model_files
from kvatlas.rendering.prompt import RenderedPrompt, extras_of
from kvatlas.rendering.request import ChatRequest, ParsedRequest
from kvatlas.rendering.text_tokenizer import TextTokenizer
from kvatlas.rendering.token_cache import TokenCache

__all__ = ["LocalRenderer"]

# Models whose engine builds chat prompts in code, not from a Jinja template.
# Source: vLLM 0.32, renderers/registry.py and config/model.py (tokenizer modes), renderers/online_renderer.py
# (harmony).
_CODED_CHAT_MODELS = frozenset({"gpt_oss", "deepseek_v32", "deepseek_v4", "deepseek_v41", "kimi_k3", "inkling"})
_NOTHING_AROUND: tuple[Sequence[int], Sequence[int]] = ((), ())
_DEFAULT_CACHE_BYTES = 64 * 2**20
_MAX_THREADS = 4


class LocalRenderer:
    """Renders with a model's own files.

    Args:
        tokenizer: text to ids.
        templates: chat templates by name; may be empty for a model without chat.
        processor_template: the template an engine prefers for requests without tools, if the model has one.
        model_type: the `model_type` of the model's config.json, if known.
        thread_above_bytes: requests with a body larger than this are rendered in a thread, so that they do not hold
            up the event loop (a body of 8 kB takes up to 4 ms).
        cache_bytes: bound of the memory kept for token ids of turns seen lately.
    """

    __slots__ = (
        "_cache",
        "_model_type",
        "_pool",
        "_processor_template",
        "_templates",
        "_thread_above_bytes",
        "_tokenizer",
    )

    def __init__(
        self,
        tokenizer: TextTokenizer,
        templates: Mapping[str, ChatTemplate],
        *,
        processor_template: ChatTemplate | None = None,
        model_type: str | None = None,
        thread_above_bytes: int = 8192,
        cache_bytes: int = _DEFAULT_CACHE_BYTES,
    ) -> None:
        self._tokenizer = tokenizer
        self._templates = dict(templates)
        self._processor_template = processor_template
        self._model_type = model_type
        self._thread_above_bytes = thread_above_bytes
        self._cache = TokenCache(cache_bytes)
        self._pool: ThreadPoolExecutor | None = None

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        clock: Clock | None = None,
        allow_download: bool = True,
        thread_above_bytes: int = 8192,
        cache_bytes: int = _DEFAULT_CACHE_BYTES,
    ) -> Self:
        """Load from a folder or, by the model's name, from the Hugging Face cache (then, if allowed, from the hub).

        Blocks for as long as disks and network take: call it when starting.

        Raises:
            ConfigError: the files are missing or broken; the message says what was looked for and what to do.
        """
        files = find_model_files(model, allow_download=allow_download)
        clock = clock or SystemClock()
        processor = files.processor_template
        return cls(
            TextTokenizer(files),
            {name: ChatTemplate(text, files.special_tokens, clock) for name, text in files.templates.items()},
            processor_template=None if processor is None else ChatTemplate(processor, files.special_tokens, clock),
            model_type=files.model_type,
            thread_above_bytes=thread_above_bytes,
            cache_bytes=cache_bytes,
        )

    @property
    def tokenizer(self) -> TextTokenizer:
        """The loaded tokenizer."""
        return self._tokenizer

    @property
    def cache(self) -> TokenCache:
        """The memory of turns, for its counters."""
        return self._cache

    async def render(self, request: ParsedRequest) -> tuple[RenderedPrompt, ...]:
        """The request's prompts; a large request is rendered off the event loop.

        Raises:
            RenderError: the token ids cannot be known here.
        """
        if request.body_bytes <= self._thread_above_bytes:
            return self.render_now(request)
        if self._pool is None:
            workers = min(_MAX_THREADS, os.cpu_count() or 1)
            self._pool = ThreadPoolExecutor(workers, thread_name_prefix="kvatlas-render")
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.render_now, request)

    def render_now(self, request: ParsedRequest) -> tuple[RenderedPrompt, ...]:
        """The request's prompts, in this thread.

        Raises:
            RenderError: the token ids cannot be known here.

        Returns:
            Prompts whose ids, where made here, are an array of 32-bit words: shared with the memory, not to be changed.

        Cost: about 0.5 us per byte of text in turns not seen before, 1 us per turn and 2 ns per byte of the others.
        """
        if request.unsupported is not None:
            raise RenderError(request.unsupported)
        extras = extras_of(request)
        if request.chat is not None:
            text = self.apply_chat_template(request.chat)
            return (RenderedPrompt(self._encode(text, add_special_tokens=request.add_special_tokens), extras),)
        return tuple(
            RenderedPrompt(
                self._encode(prompt, add_special_tokens=request.add_special_tokens)
                if isinstance(prompt, str)
                else prompt,
                extras,
            )
            for prompt in request.prompts
        )

    def apply_chat_template(self, chat: ChatRequest) -> str:
        """The conversation as the text that is tokenised.

        Raises:
            RenderError: the model has no template, builds chat prompts in code, or its template refuses the
                conversation.
        """
        if self._model_type in _CODED_CHAT_MODELS:
            raise RenderError(
                f"engines build chat prompts of model type {self._model_type!r} in code: let the engine render"
            )
        if chat.tools is None and self._processor_template is not None:
            return self._processor_template.render(chat)
        template = self._templates.get("tool_use") if chat.tools is not None else None
        template = template or self._templates.get("default")
        if template is None:
            raise RenderError(
                "the model has no chat template: add chat_template.jinja to its folder, or let the engine render"
            )
        return template.render(chat)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            RenderError: the text is not valid Unicode.
        """
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def close(self) -> None:
        """Let the threads go. Rendering may go on after it; threads start again on demand."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """Token ids, from memory for every turn of a conversation that was seen before."""
        around = self._tokenizer.added_around if add_special_tokens else _NOTHING_AROUND
        if around is None:
            # What is added depends on the whole text: nothing to cut, nothing to remember.
            return array("I", self._tokenizer.encode(text, add_special_tokens=True))
        pieces = self._tokenizer.cut(text)
        found = self._cache.get_many(pieces)
        if None in found:
            self._learn(pieces, found)
        if len(found) == 1 and around is _NOTHING_AROUND and found[0] is not None:
            return found[0]
        before, after = around
        token_ids = array("I", before)
        for ids in found:
            token_ids.extend(ids or ())
        token_ids.extend(after)
        return token_ids

    def _learn(self, pieces: Sequence[str], found: "list[array[int] | None]") -> None:
        """Tokenise the pieces that were not found, each once, and fill them in."""
        unknown = list(dict.fromkeys(piece for piece, ids in zip(pieces, found, strict=True) if ids is None))
        made = self._tokenizer.encode_many(unknown, add_special_tokens=False)
        learnt = {piece: self._cache.put(piece, ids) for piece, ids in zip(unknown, made, strict=True)}
        for place, piece in enumerate(pieces):
            if found[place] is None:
                found[place] = learnt[piece]
