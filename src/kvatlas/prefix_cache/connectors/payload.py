"""Made-up KV: bytes that follow from a block's key, so that whoever reads them back can tell that they are right."""

import hashlib

__all__ = ["synthetic_payload"]


def synthetic_payload(key: bytes, num_bytes: int) -> bytes:
    """The bytes of a block: SHAKE-128 of its key. Some 2 us for a kilobyte."""
    return hashlib.shake_128(key).digest(num_bytes)
