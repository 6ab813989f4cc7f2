"""Token ids of recently rendered texts: a retried or repeated prompt is not tokenised twice."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["TokenCache"]

# A list slot and its int object (small ids are shared, large ones are not); the text is counted by its characters.
_BYTES_PER_TOKEN = 40
_BYTES_PER_ENTRY = 400


class TokenCache:
    """Least recently used, bounded by an estimate of its bytes. Thread-safe.

    Args:
        max_bytes: the bound; 0 keeps nothing.
    """

    __slots__ = ("_entries", "_lock", "_max_bytes", "_used_bytes")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used_bytes = 0
        self._entries: OrderedDict[tuple[str, bool], Sequence[int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """The estimate of what is held now."""
        return self._used_bytes

    def get(self, key: tuple[str, bool]) -> Sequence[int] | None:
        """The ids of (text, add_special_tokens), or None. They are shared: do not change them."""
        with self._lock:
            token_ids = self._entries.get(key)
            if token_ids is not None:
                self._entries.move_to_end(key)
            return token_ids

    def put(self, key: tuple[str, bool], token_ids: Sequence[int]) -> None:
        """Keep ids; the oldest entries go when the bound is passed."""
        size = _entry_bytes(key, token_ids)
        if size > self._max_bytes:
            return
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = token_ids
            self._used_bytes += size
            while self._used_bytes > self._max_bytes:
                old_key, old_ids = self._entries.popitem(last=False)
                self._used_bytes -= _entry_bytes(old_key, old_ids)


def _entry_bytes(key: tuple[str, bool], token_ids: Sequence[int]) -> int:
    return _BYTES_PER_ENTRY + 4 * len(key[0]) + _BYTES_PER_TOKEN * len(token_ids)
