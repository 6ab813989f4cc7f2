"""Checks of what both backends are given, so that they refuse the same things in the same words."""

import operator
from array import array
from collections.abc import Iterable, Sequence

from kvatlas.errors import HashingError, IndexStateError

__all__ = [
    "AGE_BINS",
    "DUMP_COUNTING",
    "DUMP_ENTRY",
    "DUMP_LENGTH",
    "DUMP_NOT_EMPTY",
    "DUMP_PLANE",
    "DUMP_ROOT_KEY",
    "DUMP_TWICE",
    "MAX_PLANES",
    "MAX_TOKEN_ID",
    "MAX_U32",
    "MAX_WORKERS",
    "TICKS_PER_STAMP",
    "USE_BINS",
    "age_code",
    "age_of_code",
    "bad_token_ids",
    "count_blocks",
    "dump_refused",
    "foreign_batch",
    "hash_words",
    "index_full",
    "no_such_plane",
    "no_such_worker",
    "require_distinct_planes",
    "require_extras",
    "require_overlap",
    "require_pairs",
    "require_u64",
]

MAX_TOKEN_ID = 2**63 - 1
MAX_WORKERS = 4096
MAX_PLANES = 256
MAX_U32 = 2**32 - 1
# As kva_dump_fault in c/index.h numbers them.
DUMP_NOT_EMPTY, DUMP_LENGTH, DUMP_ROOT_KEY, DUMP_COUNTING, DUMP_PLANE, DUMP_ENTRY, DUMP_TWICE = range(2, 9)
_DUMP_FAULTS = {
    DUMP_NOT_EMPTY: "the worker already holds blocks: only an empty column can take a dump",
    DUMP_LENGTH: "the dump of a column is truncated, or is none: its length is not what its head says",
    DUMP_ROOT_KEY: "the dump's block keys are of another seed or model namespace: load it into an index with its seed",
    DUMP_COUNTING: "the dump was made under another copy_mode: what it says of copies means something else here",
    DUMP_PLANE: "the dump names a plane that nobody described: expected one number here for each of its planes",
    DUMP_ENTRY: "the dump of a column is damaged: one of its blocks contradicts itself",
    DUMP_TWICE: "the dump of a column is damaged: a block comes twice",
}
TICKS_PER_STAMP = 64
"""Blocks stored or asked for that make blocks one stamp older."""
AGE_BINS = 32
"""Bins of a histogram of ages: 0, then one for each power of two."""
USE_BINS = 240
"""Codes of ages: see `age_code`."""
_SHOWN_BITS = 128
_U32_LIMIT = 1 << 32
_U64_LIMIT = 1 << 64


def age_code(age: int) -> int:
    """An age in 0..2^32-1 as a code below `USE_BINS`: exact below 8, then eight steps to each power of two."""
    if age < 8:
        return age
    top = age.bit_length() - 1
    return 8 * (top - 2) + (age >> (top - 3) & 7)


def age_of_code(code: int) -> int:
    """The least age of a code; of `USE_BINS`, the first age beyond all."""
    return code if code < 16 else (8 + code % 8) << (code // 8 - 1)


def bad_token_ids(token_ids: object, reason: object, most: int = MAX_TOKEN_ID) -> HashingError:
    """The error of refused token ids: it names the first bad one by its value, else the sequence by its type.

    Args:
        token_ids: what was given.
        reason: why, when it is not a value.
        most: largest id that is taken, `MAX_TOKEN_ID` or `MAX_U32`.
    """
    for token_id in token_ids if isinstance(token_ids, Iterable) else ():
        try:
            value = operator.index(token_id)
        except TypeError:
            return HashingError(f"token ids must be integers: got {token_id!r} ({type(token_id).__name__})")
        if not 0 <= value <= MAX_TOKEN_ID:
            shown = value if value.bit_length() <= _SHOWN_BITS else f"of {value.bit_length()} bits"
            return HashingError(f"token id {shown} is {'negative' if value < 0 else 'too large'}: expected 0..2^63-1")
        if value > most:
            return HashingError(f"this dialect hashes 32-bit token ids: expected 0..2^32-1, got {value}")
    return HashingError(
        f"token ids must be a sequence of integers in 0..2^63-1, got {type(token_ids).__name__}: {reason}"
    )


def count_blocks(num_tokens: int, block_size: int) -> int:
    """Return how many complete blocks there are.

    Raises:
        HashingError: a block of no token, or of 2**32 and more.
    """
    if not 1 <= block_size < _U32_LIMIT:
        raise HashingError(f"block size must be in 1..2**32-1 tokens, got {block_size}")
    return num_tokens // block_size


def require_u64(name: str, value: int) -> None:
    """Refuse what does not fit an unsigned 64-bit word.

    Raises:
        HashingError: out of range.
    """
    if not 0 <= value < _U64_LIMIT:
        raise HashingError(f"{name} must be in 0..2**64-1, got {value}")


def require_overlap(overlap: int) -> None:
    """Refuse a number of tokens a block reads of the next one that is none.

    Raises:
        HashingError: not in 0..2**32-1.
    """
    if not 0 <= overlap < _U32_LIMIT:
        raise HashingError(f"the overlap must be in 0..2**32-1 tokens, got {overlap}")


def hash_words(hashes: Sequence[int]) -> "array[int]":
    """Return 64-bit hashes as machine words; an `array("Q")` as it came.

    Raises:
        HashingError: a value is not an integer in 0..2**64-1.
    """
    if isinstance(hashes, array) and hashes.typecode == "Q":
        return hashes
    try:
        return array("Q", list(hashes))
    except (TypeError, ValueError, OverflowError) as error:
        raise HashingError(f"hashes must be integers in 0..2**64-1: {error}") from error


def require_extras(extras: Sequence[bytes | None] | None, num_blocks: int) -> None:
    """Refuse a list of encoded extra keys that leaves blocks out.

    Raises:
        HashingError: fewer entries than blocks.
    """
    if extras is not None and len(extras) < num_blocks:
        raise HashingError(f"extras must have one entry for each of {num_blocks} blocks, got {len(extras)}")


def index_full(what: str, limit: int) -> IndexStateError:
    """The error of one worker or plane too many."""
    return IndexStateError(f"the index holds {limit} {what}, its most: split the fleet over several processes")


def no_such_worker(number: int) -> IndexStateError:
    """The error of a worker number that names nobody."""
    return IndexStateError(f"no worker has number {number}: expected what add_worker returned")


def no_such_plane(number: int, count: int) -> IndexStateError:
    """The error of a plane number that names nothing."""
    return IndexStateError(f"no plane has number {number}: expected 0..{count - 1}")


def foreign_batch() -> IndexStateError:
    """The error of applying a batch that this backend did not open."""
    return IndexStateError("this batch was not opened by this index: open_batch first, and only where it gives a batch")


def require_pairs(numbers: int, block_keys: int) -> None:
    """Refuse lists of unequal length.

    Raises:
        IndexStateError: they differ.
    """
    if numbers != block_keys:
        raise IndexStateError(f"{numbers} handles came with {block_keys} block keys: expected one key each")


def dump_refused(fault: int) -> IndexStateError:
    """The error of a column's dump that was not loaded; nothing of it was."""
    return IndexStateError(_DUMP_FAULTS[fault])


def require_distinct_planes(planes: Sequence[int]) -> None:
    """Refuse a list of planes that gives two of them one number, or moves the first.

    Raises:
        IndexStateError: it does, or is empty or too long.
    """
    if not 1 <= len(planes) <= MAX_PLANES or planes[0] != 0 or len(set(planes)) != len(planes):
        raise IndexStateError(f"a dump's planes need distinct numbers, 0 for the first; got {list(planes)[:8]}")
