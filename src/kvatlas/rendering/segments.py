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

import tokenizers

__all__ = ["Segmenter"]


class Segmenter:
    """Cuts texts of one tokenizer.

    Args:
        tokenizer: with all its added tokens.
    """

    __slots__ = ("_marks",)

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        marks = _safe_marks(tokenizer)
        # Longest first: the tokenizer, too, takes the longest token that begins at a place.
        ordered = sorted(marks, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def cut(self, text: str) -> list[str]:
        """Pieces that make up the text, each but the last ending in a special token. One when nothing may be cut."""
        if self._marks is None:
            return [text]
        ends = [match.end() for match in self._marks.finditer(text)]
        starts = [0, *ends]
        return [text[start:end] for start, end in zip(starts, [*ends, len(text)], strict=True) if start < end]


def _safe_marks(tokenizer: tokenizers.Tokenizer) -> list[str]:
    pipeline = json.loads(tokenizer.to_str())
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
