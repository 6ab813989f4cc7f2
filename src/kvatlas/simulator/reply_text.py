"""The text of one reply as it grows: tokens to words, stop strings cut off."""

from collections.abc import Sequence

from kvatlas.simulator.vocabulary import ReplyVocabulary

__all__ = ["ReplyText"]


class ReplyText:
    """Turns output tokens into text and watches for stop strings.

    A stop string may be spread over several tokens, so as many characters as could begin one are held back until
    the next tokens show whether they do.

    Args:
        vocabulary: texts of the output tokens.
        stop_strings: texts that end the reply.
        keep_stop: leave the stop string in the text.
    """

    __slots__ = ("_held", "_held_back_chars", "_keep_stop", "_stop_strings", "_vocabulary", "stop_reason")

    def __init__(
        self, vocabulary: ReplyVocabulary, stop_strings: Sequence[str] = (), *, keep_stop: bool = False
    ) -> None:
        self._vocabulary = vocabulary
        self._stop_strings = tuple(stop_strings)
        self._keep_stop = keep_stop
        self._held_back_chars = max((len(text) - 1 for text in stop_strings), default=0)
        self._held = ""
        self.stop_reason: str | None = None

    def fresh(self) -> "ReplyText":
        """Another reply under the same rules, still empty."""
        return ReplyText(self._vocabulary, self._stop_strings, keep_stop=self._keep_stop)

    @property
    def has_stop_strings(self) -> bool:
        """Whether the text itself can end the reply."""
        return bool(self._stop_strings)

    def push(self, token_ids: Sequence[int], *, is_last: bool) -> str:
        """Take output tokens and return the text that is certain now. Sets `stop_reason` when a stop string came up."""
        text = self._vocabulary.text_of(token_ids)
        if not self._stop_strings:
            return text
        text = self._held + text
        for stop in self._stop_strings:
            at = text.find(stop)
            if at >= 0:
                self.stop_reason = stop
                self._held = ""
                return text[: at + len(stop)] if self._keep_stop else text[:at]
        certain = len(text) if is_last else max(0, len(text) - self._held_back_chars)
        self._held = text[certain:]
        return text[:certain]
