"""Which tokens replies are made of: words that are the same token again after decoding and encoding.

A real model's own output mostly has this property; random token ids do not, and without it a chat client's next
turn would never find the reply in the cache. The texts are computed once, so streaming needs no tokenizer per
token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["ReplyVocabulary"]

_MOST_WORDS = 2048


@dataclass(frozen=True, slots=True)
class ReplyVocabulary:
    """The words of replies: token id -> text. Every text is a space and letters."""

    texts: dict[int, str]

    @classmethod
    def find(
        cls,
        token_ids: Sequence[int],
        detokenize: Callable[[Sequence[int]], str],
        tokenize: Callable[[str], Sequence[int]],
    ) -> "ReplyVocabulary":
        """Pick up to 2048 words out of `token_ids`.

        A word begins with a space: two of them side by side are cut where the first ends by every tokenizer that
        splits text at spaces, whatever their merges are. So checking each word alone is enough.
        """
        texts = {}
        for token_id in token_ids:
            twice = detokenize((token_id, token_id))
            text = twice[len(detokenize((token_id,))) :]  # some decoders drop the space of a first word
            is_word = text[:1] == " " and text[1:].isalpha() and text.isascii()
            if is_word and list(tokenize(twice)) == [token_id, token_id]:
                texts[token_id] = text
                if len(texts) == _MOST_WORDS:
                    break
        return cls(texts)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of some output tokens; the end-of-text token has none."""
        get = self.texts.get
        return "".join([get(token_id, "") for token_id in token_ids])
