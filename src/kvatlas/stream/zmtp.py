"""ZMTP 3, as far as a SUB socket without security speaks it: the handshake, the subscription, and heartbeats. Sans-IO.

The frames of the traffic itself are `scan_zmtp`'s business. Source: RFC 23/ZMTP (3.0) and 37/ZMTP (3.1) of the ZeroMQ
project; libzmq 4.3.5 where they leave a choice.
"""

import struct
from typing import Final

from kvatlas.errors import StreamPeerError

__all__ = ["GREETING", "SubscriberHandshake", "answer_to", "command", "error_in", "ping", "ready"]

_MECHANISM = b"NULL"
GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + _MECHANISM.ljust(20, b"\0") + bytes(32)
"""What each side says first: ZMTP 3.1, no security, no server."""
_GREETING_BYTES = len(GREETING)
_LONG, _COMMAND = 2, 4
_MOST_HANDSHAKE_BYTES = 4096  # of commands; a READY with its properties takes tens of bytes
_PUBLISHERS = (b"PUB", b"XPUB")
_MOST_CONTEXT_BYTES = 16
_MOST_WORDS_BYTES = 100


def command(name: bytes, body: bytes = b"") -> bytes:
    """The frame of a command."""
    return _frame(_COMMAND, bytes([len(name)]) + name + body)


def ready(socket_type: bytes) -> bytes:
    """The command that ends one side's part of the handshake."""
    return command(b"READY", _property(b"Socket-Type", socket_type))


def ping(patience_s: float) -> bytes:
    """The command to which every peer answers; it may drop a connection on which nothing came for `patience_s`."""
    return command(b"PING", struct.pack(">H", min(int(patience_s * 10), 0xFFFF)))


def answer_to(body: bytes) -> bytes:
    """What a command of the traffic is to be answered with, often nothing. A PING's context comes back to it."""
    name, rest = _split(body)
    return command(b"PONG", rest[2 : 2 + _MOST_CONTEXT_BYTES]) if name == b"PING" else b""


def error_in(body: bytes) -> str | None:
    """Why the peer gives up, if that command says so."""
    name, rest = _split(body)
    return _error_text(rest) if name == b"ERROR" else None


class SubscriberHandshake:
    """From a fresh connection to the first message: feed it what comes, send what it returns.

    Args:
        topic: the prefix of the topics that are wanted.
    """

    def __init__(self, topic: bytes) -> None:
        self._topic = topic
        self._received = bytearray()
        self._minor: int | None = None  # the peer's, once it has greeted
        self._bytes_left = _MOST_HANDSHAKE_BYTES
        self.rest: bytes | None = None
        """What came after the handshake, and belongs to the traffic; None until the handshake is done."""

    def feed(self, data: bytes) -> bytes:
        """Take in what came and say what to send. Start with no bytes.

        Raises:
            StreamPeerError: the peer is no publisher of this protocol; the message says what it is.
        """
        self._received += data
        answer = b"" if data else GREETING
        if self._minor is None and self._greeted():
            answer += ready(b"SUB")
        if self._minor is not None and self.rest is None:
            answer += self._read_commands()
        return answer

    def _greeted(self) -> bool:
        received = self._received
        if received and (received[0] != 0xFF or (len(received) > 9 and received[9] != 0x7F)):
            raise StreamPeerError(f"it does not speak ZMTP 3: it began with {bytes(received[:12])!r}")
        if len(received) > 10 and received[10] < 3:
            revision = "2" if received[10] else "1"  # they count from 0
            raise StreamPeerError(f"it speaks ZMTP {revision}, older than libzmq 4; 3 is needed")
        if len(received) < _GREETING_BYTES:
            return False
        mechanism = bytes(received[12:32]).rstrip(b"\0")
        if mechanism != _MECHANISM:
            raise StreamPeerError(f"it asks for the security mechanism {_printable(mechanism)}")
        self._minor = received[11]
        del received[:_GREETING_BYTES]
        return True

    def _read_commands(self) -> bytes:
        while (body := self._next_command()) is not None:
            name, rest = _split(body)
            if name == b"ERROR":
                raise StreamPeerError(f"it refuses: {_error_text(rest)}")
            if name == b"READY":
                self._require_publisher(rest)
                self.rest = bytes(self._received)
                return self._subscription()
        return b""

    def _next_command(self) -> bytes | None:
        """The body of the next command, once it is whole."""
        received = self._received
        flags = received[0] if received else _COMMAND
        if flags < _COMMAND:
            raise StreamPeerError("it sent a message before it was ready")
        if flags & ~_LONG != _COMMAND:
            raise StreamPeerError(f"its handshake is malformed: a frame with the flags {flags:#x}")
        head = 2 if flags == _COMMAND else 9
        if len(received) < head:
            return None
        end = head + int.from_bytes(received[1:head], "big")
        if end > self._bytes_left:
            raise StreamPeerError(f"its handshake does not end within {_MOST_HANDSHAKE_BYTES} bytes")
        if len(received) < end:
            return None
        body = bytes(received[head:end])
        del received[:end]
        self._bytes_left -= end
        return body

    def _require_publisher(self, properties: bytes) -> None:
        kind = _properties(properties).get(b"socket-type", b"")
        if kind not in _PUBLISHERS:
            raise StreamPeerError(f"it is a {_printable(kind) or 'nameless'} socket, not a PUB socket")

    def _subscription(self) -> bytes:
        if self._minor:
            return command(b"SUBSCRIBE", self._topic)
        return _frame(0, b"\x01" + self._topic)


def _frame(flags: int, data: bytes) -> bytes:
    if len(data) < 256:
        return bytes([flags, len(data)]) + data
    return bytes([flags | _LONG]) + struct.pack(">Q", len(data)) + data


def _split(body: bytes) -> tuple[bytes, bytes]:
    """Name and rest of a command; nothing at all for one that is malformed."""
    size = body[0] if body else 0
    return (body[1 : 1 + size], body[1 + size :]) if size < len(body) else (b"", b"")


def _error_text(rest: bytes) -> str:
    return _printable(rest[1 : 1 + rest[0]]) if rest else ""


def _printable(text: bytes) -> str:
    """Words of a peer as they may stand in a log, whatever it sent."""
    return "".join(char if char.isprintable() else "?" for char in text[:_MOST_WORDS_BYTES].decode("utf-8", "replace"))


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


def _properties(rest: bytes) -> dict[bytes, bytes]:
    """The properties of a READY by their names in lower case, up to the first that is not whole."""
    found: dict[bytes, bytes] = {}
    while rest and len(rest) >= rest[0] + 5:
        name, size = rest[1 : 1 + rest[0]], int.from_bytes(rest[1 + rest[0] : 5 + rest[0]], "big")
        value, rest = rest[5 + len(name) : 5 + len(name) + size], rest[5 + len(name) + size :]
        if len(value) == size:
            found[name.lower()] = value
    return found
