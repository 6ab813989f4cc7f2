"""A tier's memory of what entered and left it, until somebody asks."""

from kvatlas.prefix_cache.connectors.tier import TierChange

__all__ = ["ChangeLog"]


class ChangeLog:
    """Changes in order; neighbours of one kind become one change, as one burst of evictions is one event."""

    __slots__ = ("_changes", "_medium")

    def __init__(self, medium: str) -> None:
        self._medium = medium
        self._changes: list[tuple[bool, list[bytes]]] = []

    def stored(self, key: bytes) -> None:
        """A block entered."""
        self._add(key, stored=True)

    def removed(self, key: bytes) -> None:
        """A block left."""
        self._add(key, stored=False)

    def _add(self, key: bytes, *, stored: bool) -> None:
        if self._changes and self._changes[-1][0] is stored:
            self._changes[-1][1].append(key)
        else:
            self._changes.append((stored, [key]))

    def take(self) -> list[TierChange]:
        """The changes since the last call."""
        changes, self._changes = self._changes, []
        return [TierChange(tuple(keys), self._medium, stored) for stored, keys in changes]
