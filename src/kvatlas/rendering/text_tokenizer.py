"""Text to token ids and back, exactly as an engine's tokenizer does it.

`tokenizer.json` alone is not enough: the settings beside it may add tokens. Where it exists, it alone says which
tokens begin and end a prompt: `add_bos_token` and `add_eos_token` of the settings are not read.

Source: transformers 5.19, tokenization_utils_base.py `_from_pretrained`, tokenization_utils_tokenizers.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from kvatlas.errors import ConfigError, RenderError
from kvatlas.rendering.model_files import ModelFiles
from kvatlas.rendering.segments import Segmenter

__all__ = ["TextTokenizer"]

_MANY_CHARACTERS = 16_384


class TextTokenizer:
    """A loaded tokenizer. Thread-safe.

    Args:
        files: the model's files.

    Raises:
        ConfigError: tokenizer.json cannot be loaded.
    """

    __slots__ = ("_segmenter", "_tokenizer")

    def __init__(self, files: ModelFiles) -> None:
        path = files.directory / "tokenizer.json"
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise ConfigError(
                f"cannot load {path}: {error}; check the file or install a newer tokenizers library"
            ) from None
        # The file may carry settings of a training run; an engine never cuts or pads a prompt this way.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _add_missing_tokens(tokenizer, files)
        self._tokenizer = tokenizer
        self._segmenter = Segmenter(tokenizer)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Raises:
            RenderError: the text is not valid Unicode (a lone surrogate).

        Cost: about 0.5 us per byte of text.
        """
        return self.encode_many([text], add_special_tokens=add_special_tokens)[0]

    def encode_many(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text. Other Python threads run meanwhile; many or long texts use all cores.

        Raises:
            RenderError: a text is not valid Unicode (a lone surrogate).
        """
        encode = self._tokenizer.encode_batch_fast  # no offsets are made, and Python's lock is not held
        try:
            if sum(map(len, texts)) < _MANY_CHARACTERS:
                # On several cores a few short texts would be done no sooner, and cost up to twice the processor time.
                return [encode([text], add_special_tokens=add_special_tokens)[0].ids for text in texts]
            return [encoding.ids for encoding in encode(list(texts), add_special_tokens=add_special_tokens)]
        except (TypeError, UnicodeError):
            raise RenderError("the prompt is not valid Unicode text (a lone surrogate), so it has no tokens") from None

    @property
    def added_around(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Ids that `add_special_tokens` puts before and after every text; None where that is not known."""
        return self._segmenter.added_around

    def cut(self, text: str) -> list[str]:
        """Pieces of a text that may be tokenised one by one, without special tokens added, with the same result.

        Cost: 0.5 us per piece and 2 ns per byte.
        """
        return self._segmenter.cut(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids; ids outside the vocabulary give nothing."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it, or None."""
        text = self._tokenizer.id_to_token(token_id)
        return None if text is None else str(text)

    def token_id(self, token_text: str) -> int | None:
        """The id of a vocabulary entry, or None."""
        token_id = self._tokenizer.token_to_id(token_text)
        return None if token_id is None else int(token_id)


def _add_missing_tokens(tokenizer: tokenizers.Tokenizer, files: ModelFiles) -> None:
    decoder = files.tokenizer_config.get("added_tokens_decoder")
    declared = sorted(decoder.items(), key=lambda item: int(item[0])) if isinstance(decoder, dict) else []
    wanted = [_added_token(entry) for _, entry in declared if isinstance(entry, dict)]
    wanted += [tokenizers.AddedToken(text, special=True) for text in files.special_tokens.values()]
    tokenizer.add_tokens([token for token in wanted if tokenizer.token_to_id(token.content) is None])


def _added_token(entry: Mapping[str, Any]) -> tokenizers.AddedToken:
    flags = {name: bool(entry[name]) for name in ("lstrip", "rstrip", "single_word", "normalized") if name in entry}
    return tokenizers.AddedToken(str(entry.get("content", "")), special=bool(entry.get("special")), **flags)
