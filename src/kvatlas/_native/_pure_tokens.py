"""Token ids as machine words, in Python: what every kernel of `_pure` reads."""

import sys
from array import array
from collections.abc import Sequence

from kvatlas._native.arguments import MAX_U32, bad_token_ids

__all__ = ["little_endian", "pack_tokens", "packed_u32", "words_of", "words_u32"]

_TOP_BYTE = 7 if sys.byteorder == "little" else 0
_TOP_BIT_CLEAR = bytes(range(128))


def pack_tokens(token_ids: Sequence[int], /) -> memoryview:
    """Return token ids as a view of machine words that every kernel reads without further conversion.

    Args:
        token_ids: any sequence of integers in 0..2**63-1.

    Raises:
        HashingError: a value is not an integer, or out of range.

    Cost: O(n). Natively 2 ns for each id of a list, and no copy for an array (array, numpy) of 4- or 8-byte integers:
    the view is then of the caller's own memory.
    """
    return memoryview(words_of(token_ids))


def words_of(token_ids: Sequence[int]) -> "array[int]":
    """Ids as unsigned 64-bit words.

    Raises:
        HashingError: a value is not an integer in 0..2**63-1.
    """
    words = array("Q")
    try:
        if isinstance(token_ids, memoryview) and token_ids.format == "Q":
            words.frombytes(token_ids.tobytes())
        elif isinstance(token_ids, bytes | bytearray):  # array() would read these as machine words
            words.extend(list(token_ids))
        else:
            words = array("Q", token_ids)  # refuses what is negative or over 64 bits
    except (TypeError, ValueError, OverflowError) as error:
        raise bad_token_ids(token_ids, error) from error
    if words.tobytes()[_TOP_BYTE::8].translate(None, _TOP_BIT_CLEAR):
        raise bad_token_ids(token_ids, "a value is too large")
    return words


def words_u32(token_ids: Sequence[int]) -> "array[int]":
    """Ids that fit 32 bits, as unsigned 64-bit words.

    Raises:
        HashingError: a value is not an integer in 0..2**32-1.
    """
    words = words_of(token_ids)
    if words and max(words) > MAX_U32:
        raise bad_token_ids(token_ids, "a value is too large", MAX_U32)
    return words


def packed_u32(token_ids: Sequence[int]) -> bytes:
    """Ids as 4 bytes little-endian each.

    Raises:
        HashingError: a value is not an integer in 0..2**32-1.
    """
    words = _array_u32(token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _array_u32(token_ids: Sequence[int]) -> "array[int]":
    if isinstance(token_ids, list | tuple):
        try:
            return array("I", token_ids)
        except (TypeError, ValueError, OverflowError):
            return array("I", words_u32(token_ids))  # tells which one is bad
    try:
        view = memoryview(token_ids)  # type: ignore[arg-type]
    except TypeError:
        return array("I", words_u32(token_ids))
    data = view.tobytes()
    # A negative id has the top bit of its top byte set: no ASCII byte has it.
    good = view.format == "I" or (view.format == "i" and data[_TOP_BYTE // 2 :: 4].isascii())
    if view.ndim != 1 or not good:
        return array("I", words_u32(token_ids))
    words = array("I")
    words.frombytes(data)
    return words


def little_endian(words: "array[int]") -> bytes:
    """Words as 8 bytes little-endian each."""
    if sys.byteorder == "big":
        words = array("Q", words)
        words.byteswap()
    return words.tobytes()
