"""MessagePack in more forms than encoders write, and damaged bytes, both from a seeded random."""

import struct
from random import Random
from typing import Any

MAX_SHORT_TEXT = 31
MAX_SHORT_CONTAINER = 15


def packed(value: Any, random: Random) -> bytes:
    """The value's bytes; one item in eight in a longer form than it needs."""
    if isinstance(value, dict):
        members = [packed(part, random) for pair in value.items() for part in pair]
        return _head(len(value), [(MAX_SHORT_CONTAINER, 0x80), (2, 0xDE), (4, 0xDF)], random) + b"".join(members)
    if isinstance(value, list | tuple):
        members = [packed(part, random) for part in value]
        return _head(len(value), [(MAX_SHORT_CONTAINER, 0x90), (2, 0xDC), (4, 0xDD)], random) + b"".join(members)
    if isinstance(value, str):
        data = value.encode()
        return _head(len(data), [(MAX_SHORT_TEXT, 0xA0), (1, 0xD9), (2, 0xDA), (4, 0xDB)], random) + data
    if isinstance(value, bytes):
        return _head(len(value), [(1, 0xC4), (2, 0xC5), (4, 0xC6)], random) + value
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    return _packed_int(value, random)


def damaged(payload: bytes, random: Random) -> bytes:
    """The payload with one to three bytes flipped, replaced, put in or taken out, or cut off."""
    data = bytearray(payload)
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(data) or 1)
        how = random.randrange(5)
        if how == 0 and data:
            data[at] ^= 1 << random.randrange(8)
        elif how == 1 and data:
            data[at] = random.choice((0, 0x7F, 0x80, 0x90, 0xA0, 0xC0, 0xC1, 0xC4, 0xCC, 0xCF, 0xD3, 0xDC, 0xFF))
        elif how == 2:
            data.insert(at, random.randrange(256))
        elif how == 3:
            del data[at : at + random.randint(1, 9)]
        elif random.randrange(8) == 0:
            del data[at:]
    return bytes(data)


def _head(size: int, forms: list[tuple[int, int]], random: Random) -> bytes:
    """The head of a text or container: `forms` from the shortest; a form with a head of 0x80..0xbf carries the size in it."""
    fitting = [form for form in forms if size <= (form[0] if 0x80 <= form[1] <= 0xBF else 256 ** form[0] - 1)]
    width, head = _chosen(fitting, random)
    return bytes([head | size]) if 0x80 <= head <= 0xBF else bytes([head]) + size.to_bytes(width, "big")


def _packed_int(value: int, random: Random) -> bytes:
    forms = [bytes([value % 256])] if -32 <= value <= 127 else []
    unsigned = [
        bytes([head]) + value.to_bytes(width, "big")
        for head, width in ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8))
        if 0 <= value < 256**width
    ]
    signed = [
        bytes([head]) + value.to_bytes(width, "big", signed=True)
        for head, width in ((0xD0, 1), (0xD1, 2), (0xD2, 4), (0xD3, 8))
        if -(256**width) // 2 <= value < 256**width // 2
    ]
    return _chosen(forms + unsigned + signed, random)


def _chosen(forms: list[Any], random: Random) -> Any:
    return random.choice(forms) if random.randrange(8) == 0 else forms[0]
