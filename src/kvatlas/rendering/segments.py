"""Where a prompt may be cut so that tokenising the pieces gives the same ids as tokenising the whole.

A conversation comes again with every turn, longer each time. Its special tokens (the ends of turns) are safe places
to cut: the tokenizer splits a text at them before anything else, and no token crosses them. So only the new turn has
to be tokenised.

A special token counts only when it cannot take neighbouring characters with it (no stripping, not normalised, not
bound to words) and no other added token overlaps it. Tokenizers that treat the start of a text specially (Metaspace)
are never cut.
"""

import json
import re
from itertools import pairwise
from typing import Any, TypeAlias

import tokenizers

__all__ = ["Segmenter"]

_Around: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
_USEFUL_PREFIX = 2
"""Characters that all special tokens begin with, from which on looking for them first is worth it: 20 times as fast."""


class Segmenter:
    """Cuts texts of one tokenizer.

    Args:
        tokenizer: with all its added tokens.
    """

    __slots__ = ("_marks", "_prefix", "added_around")

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        pipeline = json.loads(tokenizer.to_str())
        self.added_around = _checked(tokenizer, _added_around(pipeline.get("post_processor")))
        """Ids that the tokenizer puts before and after a text when asked for special tokens; None: not known."""
        marks = _safe_marks(tokenizer, pipeline)
        # Longest first: the tokenizer, too, takes the longest token that begins at a place.
        ordered = sorted(marks, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._prefix = _common_beginning(ordered)

    def cut(self, text: str) -> list[str]:
        """Pieces that make up the text, each but the last ending in a special token. One when nothing may be cut."""
        if self._marks is None:
            return [text]
        prefix = self._prefix
        if len(prefix) < _USEFUL_PREFIX:
            ends = [found.end() for found in self._marks.finditer(text)]
        else:
            ends = []
            match = self._marks.match
            place = text.find(prefix)
            while place >= 0:
                found = match(text, place)
                if found is None:
                    place = text.find(prefix, place + 1)
                else:
                    ends.append(end := found.end())
                    place = text.find(prefix, end)
        if not ends or ends[-1] < len(text):
            ends.append(len(text))
        return [text[start:end] for start, end in pairwise((0, *ends))]


def _common_beginning(texts: list[str]) -> str:
    first, last = min(texts, default=""), max(texts, default="")
    size = next((size for size, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
    return first[:size]


def _safe_marks(tokenizer: tokenizers.Tokenizer, pipeline: dict[str, Any]) -> list[str]:
    if "Metaspace" in json.dumps([pipeline.get("normalizer"), pipeline.get("pre_tokenizer")]):
        return []
    added = list(tokenizer.get_added_tokens_decoder().values())
    texts = [token.content for token in added if token.content]
    return [
        token.content
        for token in added
        if token.content
        and token.special
        and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
        and not any(_overlap(token.content, other) for other in texts if other != token.content)
    ]


def _overlap(mark: str, other: str) -> bool:
    """Whether an occurrence of `other` can share characters with one of `mark`."""
    if mark in other or other in mark:
        return True
    shortest = min(len(mark), len(other))
    return any(mark[:size] == other[-size:] or other[:size] == mark[-size:] for size in range(1, shortest))


def _checked(tokenizer: tokenizers.Tokenizer, around: _Around | None) -> _Around | None:
    """What was read from the file, if the tokenizer does so."""
    if around is None:
        return None
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    return around if tokenizer.encode("a").ids == [*around[0], *plain, *around[1]] else None


def _added_around(post_processor: dict[str, Any] | None) -> _Around | None:
    """What a tokenizer's last step puts around one text, where that is the same for every text."""
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    templates = 0
    steps = [] if post_processor is None else post_processor.get("processors", [post_processor])
    for step in steps:
        if step.get("type") == "TemplateProcessing":
            templates += 1
            ids = {name: tuple(token["ids"]) for name, token in step["special_tokens"].items()}
            texts = [place for place, part in enumerate(step["single"]) if "Sequence" in part]
            if len(texts) != 1 or templates > 1:
                return None
            around = [ids[part["SpecialToken"]["id"]] if "SpecialToken" in part else () for part in step["single"]]
            before = tuple(each for part in around[: texts[0]] for each in part)
            after = tuple(each for part in around[texts[0] :] for each in part)
        elif step.get("type") != "ByteLevel":  # which moves offsets and nothing else
            return None
    return before, after
