"""Heads of canonical CBOR items (RFC 8949 section 4.2): a major type and an argument in the fewest bytes."""

from functools import lru_cache

from kvatlas.errors import HashingError

__all__ = ["ARRAY", "BYTES", "MAP", "NEGATIVE", "NULL", "TEXT", "UINT", "head", "remembered_head", "uint_code"]

UINT = 0 << 5
NEGATIVE = 1 << 5
BYTES = 2 << 5
TEXT = 3 << 5
ARRAY = 4 << 5
MAP = 5 << 5
NULL = b"\xf6"

_REMEMBERED_INTS = 1 << 18
_UINT_LIMIT = 1 << 64


def head(major: int, argument: int) -> bytes:
    """Return the head of one item: major type in the top three bits, then the argument in its shortest form.

    Raises:
        HashingError: the argument needs more than 64 bits.
    """
    if argument < 24:
        return bytes((major | argument,))
    if argument < 1 << 8:
        return bytes((major | 24, argument))
    if argument < 1 << 16:
        return bytes((major | 25,)) + argument.to_bytes(2, "big")
    if argument < 1 << 32:
        return bytes((major | 26,)) + argument.to_bytes(4, "big")
    if argument < _UINT_LIMIT:
        return bytes((major | 27,)) + argument.to_bytes(8, "big")
    raise HashingError(f"an integer in a hashed block must fit 64 bits, got {argument}")


remembered_head = lru_cache(maxsize=256)(head)


class _UintCodes(dict[int, bytes]):
    """Codes of unsigned integers, remembered when small: a vocabulary is used over and over."""

    __slots__ = ()

    def __missing__(self, value: int) -> bytes:
        code = head(UINT, value)
        if value < _REMEMBERED_INTS:
            self[value] = code
        return code


uint_code = _UintCodes().__getitem__
