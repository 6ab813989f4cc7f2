"""Token ids as the little-endian words most engines hash, and the two readings of a 64-bit hash.

A buffer of 32- or 64-bit integers (array.array, numpy, memoryview) is read in place, through the buffer protocol, so
numpy need not be there; lists and tuples are packed once.
"""

import sys
from array import array
from collections.abc import Sequence

from kvatlas.errors import HashingError
from kvatlas.hashing.token_ids import packed_token_ids

__all__ = [
    "MAX_U32",
    "machine_integers",
    "narrowed_words",
    "plain_integers",
    "signed64",
    "text_bytes",
    "token_words",
    "u32_words",
    "unsigned64",
    "word_values",
]

MAX_U32 = 2**32 - 1
_U64 = 1 << 64
_SIGNED_FORMATS = "ilq"
_UNSIGNED_FORMATS = "ILQ"


def machine_integers(token_ids: Sequence[int]) -> memoryview | None:
    """The buffer behind `token_ids` when it is one row of native 32- or 64-bit integers; None otherwise."""
    try:
        view = memoryview(token_ids)  # type: ignore[arg-type]
    except TypeError:
        return None
    native = view.ndim == 1 and view.c_contiguous and view.format in tuple(_SIGNED_FORMATS + _UNSIGNED_FORMATS)
    return view if native else None


def plain_integers(token_ids: Sequence[int]) -> Sequence[int]:
    """The token ids with a buffer turned into a list of `int`, which is faster to walk; anything else as it came."""
    view = machine_integers(token_ids)
    return token_ids if view is None else view.tolist()


def token_words(token_ids: Sequence[int]) -> tuple[memoryview, int]:
    """Return the token ids as unsigned little-endian words, and the bytes of one word: 4 if all ids fit, else 8.

    Raises:
        HashingError: a value is not an integer, or is outside 0..2**63-1.

    Cost: no copy for a buffer of 32-bit integers; one pass for anything else.
    """
    view = machine_integers(token_ids)
    if view is None:
        return _packed_words(token_ids)
    width = view.itemsize
    signed = view.format in tuple(_SIGNED_FORMATS)
    data = _little_endian(view)
    # The sign is the top bit of a word's last byte: no ASCII byte has it. Ids of 2**63 and above have it too.
    if (signed or width == 8) and not data[width - 1 :: width].tobytes().isascii():
        raise HashingError(f"token ids must be in 0..{2**63 - 1}, got {_first_bad(view)}")
    return (data, width) if width == 4 else narrowed_words(data)


def narrowed_words(words: memoryview) -> tuple[memoryview, int]:
    """Return 8-byte little-endian words as 4-byte ones when every high half is zero, and the bytes of one word."""
    if not len(words):
        return words, 4
    halves = words.cast("I")
    low, high = halves[::2].tobytes(), halves[1::2].tobytes()
    return (words, 8) if any(high) else (memoryview(low), 4)


def u32_words(token_ids: Sequence[int], dialect: str) -> memoryview:
    """Return the token ids as 4-byte little-endian words, for dialects that know no larger ids.

    Raises:
        HashingError: a value is not an integer, or is outside 0..2**32-1.
    """
    data, width = token_words(token_ids)
    if width != 4:
        raise HashingError(f"{dialect} hashes 32-bit token ids: expected 0..{MAX_U32}, got {max(token_ids)}")
    return data


def word_values(words: memoryview) -> list[int]:
    """Return the integers in 4-byte little-endian words."""
    values = array("I", words.tobytes())
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def text_bytes(what: str, text: str) -> bytes:
    """Return the UTF-8 of a text that goes into a hash.

    Raises:
        HashingError: not a string, or not valid Unicode; `what` names it.
    """
    if not isinstance(text, str):
        raise HashingError(f"{what} must be text, got {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise HashingError(f"{what} must be valid Unicode: {error}") from error


def signed64(value: int) -> int:
    """Return the signed reading of an unsigned 64-bit hash, as SGLang's events and JSON interfaces carry it.

    Raises:
        HashingError: not in 0..2**64-1.
    """
    if not 0 <= value < _U64:
        raise HashingError(f"an unsigned 64-bit hash must be in 0..2**64-1, got {value}")
    return value - _U64 if value >= _U64 // 2 else value


def unsigned64(value: int) -> int:
    """Return the unsigned reading of a signed 64-bit hash.

    Raises:
        HashingError: not in -2**63..2**63-1.
    """
    if not -_U64 // 2 <= value < _U64 // 2:
        raise HashingError(f"a signed 64-bit hash must be in -2**63..2**63-1, got {value}")
    return value % _U64


def _packed_words(token_ids: Sequence[int]) -> tuple[memoryview, int]:
    if not isinstance(token_ids, bytes | bytearray):  # array() would read these as machine words
        try:
            return _little_endian(memoryview(array("I", token_ids))), 4
        except (TypeError, ValueError, OverflowError):
            pass  # wide or bad ids: the careful path tells which
    return narrowed_words(memoryview(packed_token_ids(token_ids)))


def _little_endian(view: memoryview) -> memoryview:
    if sys.byteorder == "little":
        return view.cast("B") if len(view) else memoryview(b"")
    swapped = array(view.format, view.tobytes())
    swapped.byteswap()
    return memoryview(swapped.tobytes())


def _first_bad(view: memoryview) -> int:
    return next(value for value in view.tolist() if not 0 <= value < 2**63)
