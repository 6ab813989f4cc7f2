"""Token ids of pieces of text seen lately: the turns a conversation brings again with every request."""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["TokenCache"]

_BYTES_PER_TOKEN = 4
_BYTES_PER_CHARACTER = 2
_BYTES_PER_ENTRY = 300


class TokenCache:
    """Least recently used, bounded by an estimate of its bytes. Thread-safe.

    Args:
        max_bytes: the bound; 0 keeps nothing.
    """

    __slots__ = ("_entries", "_lock", "_max_bytes", "_used_bytes")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used_bytes = 0
        self._entries: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """The estimate of what is held now."""
        return self._used_bytes

    def get(self, text: str) -> "array[int] | None":
        """The ids of a piece of text, or None. The array is shared: do not change it."""
        with self._lock:
            token_ids = self._entries.get(text)
            if token_ids is not None:
                self._entries.move_to_end(text)
            return token_ids

    def put(self, text: str, token_ids: Sequence[int]) -> "array[int]":
        """Keep the ids of a piece, the oldest entries going when the bound is passed; returns them as `get` would."""
        packed = array("I", token_ids)
        size = _entry_bytes(text, packed)
        if size <= self._max_bytes:
            with self._lock:
                if text not in self._entries:
                    self._entries[text] = packed
                    self._used_bytes += size
                while self._used_bytes > self._max_bytes:
                    self._used_bytes -= _entry_bytes(*self._entries.popitem(last=False))
        return packed


def _entry_bytes(text: str, token_ids: "array[int]") -> int:
    return _BYTES_PER_ENTRY + _BYTES_PER_CHARACTER * len(text) + _BYTES_PER_TOKEN * len(token_ids)
