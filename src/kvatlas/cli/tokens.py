"""Token ids as people type them."""

from pathlib import Path

from kvatlas.errors import ConfigError
from kvatlas.hashing.token_ids import normalise_token_ids

__all__ = ["read_token_ids"]


def read_token_ids(tokens: str | None, tokens_file: Path | None) -> list[int]:
    """Read ids from an option's text or a file: a JSON array, or ids separated by commas or white space.

    Raises:
        ConfigError: both or neither are given, the file cannot be read, or something in it is not a whole number.
        HashingError: a number is no token id.
    """
    if (tokens is None) == (tokens_file is None):
        raise ConfigError("give token ids either with --tokens 1,2,3 or with --tokens-file FILE")
    text = tokens or ""
    if tokens_file is not None:
        try:
            text = tokens_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --tokens-file {tokens_file}: {error}") from error
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    try:
        return list(normalise_token_ids([int(word) for word in words]))
    except ValueError as error:
        raise ConfigError(f"token ids must be whole numbers separated by commas: {error}") from error
