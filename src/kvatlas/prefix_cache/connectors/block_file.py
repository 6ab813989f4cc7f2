"""The bytes of one stored block: a header that says what it must be, the key, the payload.

Layout, big-endian::

    8  magic "kvatlasB"      2  version      2  key length      8  payload length
    16 namespace digest     16  checksum of everything else     then key, then payload

A file that was cut anywhere, changed anywhere, or written for another model fails to decode; so a reader needs no
locks and no trust in the writer.
"""

import enum
import hashlib
import struct

__all__ = ["HEADER_BYTES", "VERSION", "Damage", "check_size", "decode_block", "encode_block", "namespace_digest"]

VERSION = 1
_MAGIC = b"kvatlasB"
_DIGEST_BYTES = 16
_PREFIX = struct.Struct(f">8sHHQ{_DIGEST_BYTES}s")
HEADER_BYTES = _PREFIX.size + _DIGEST_BYTES
"""Bytes before the key."""


class Damage(enum.Enum):
    """Why a file must not be served."""

    TORN = "torn"
    """Shorter than its header says, or shorter than a header."""
    CORRUPT = "corrupt"
    """Too long, of another key, or changed."""
    FOREIGN = "foreign"
    """Of another program, version or namespace."""


def namespace_digest(namespace: str) -> bytes:
    """Sixteen bytes that stand for everything that gives a block hash its meaning: model, dtype, hash seed."""
    return hashlib.blake2b(namespace.encode(), digest_size=_DIGEST_BYTES, person=b"kvatlas-space").digest()


def encode_block(key: bytes, payload: bytes, namespace: bytes) -> bytes:
    """The file of a block. `namespace` comes from `namespace_digest`."""
    prefix = _PREFIX.pack(_MAGIC, VERSION, len(key), len(payload), namespace)
    return b"".join((prefix, _checksum(prefix, key, payload), key, payload))


def decode_block(data: bytes, key: bytes, namespace: bytes) -> bytes | Damage:
    """The payload in a file that claims to hold `key`.

    A `Damage` for anything else than exactly what `encode_block` wrote for this key and namespace.
    """
    damage = check_size(data, len(data), namespace)
    if damage is not None:
        return damage
    prefix, checksum = data[: _PREFIX.size], data[_PREFIX.size : HEADER_BYTES]
    end_of_key = HEADER_BYTES + _PREFIX.unpack(prefix)[2]
    payload = data[end_of_key:]
    if data[HEADER_BYTES:end_of_key] != key or checksum != _checksum(prefix, key, payload):
        return Damage.CORRUPT
    return payload


def check_size(head: bytes, file_bytes: int, namespace: bytes) -> Damage | None:
    """What the first `HEADER_BYTES` of a file tell without reading the rest; None when nothing speaks against it."""
    if len(head) < HEADER_BYTES:
        return Damage.TORN if head[: len(_MAGIC)] == _MAGIC[: len(head)] else Damage.FOREIGN
    magic, version, key_bytes, payload_bytes, found_namespace = _PREFIX.unpack_from(head)
    if magic != _MAGIC or version != VERSION or found_namespace != namespace:
        return Damage.FOREIGN
    expected = HEADER_BYTES + key_bytes + payload_bytes
    if file_bytes == expected:
        return None
    return Damage.TORN if file_bytes < expected else Damage.CORRUPT


def _checksum(prefix: bytes, key: bytes, payload: bytes) -> bytes:
    digest = hashlib.blake2b(prefix, digest_size=_DIGEST_BYTES)
    digest.update(key)
    digest.update(payload)
    return digest.digest()
