"""Which entry of a bounded store goes next: the one used longest ago that nobody reads right now."""

from collections import OrderedDict
from collections.abc import Iterator

__all__ = ["RecencyList"]


class RecencyList:
    """Keys with sizes in the order of their last use, some of them pinned.

    A pin protects from eviction and changes no order. All operations are O(1), except that looking for the next victim
    passes over pinned entries.
    """

    __slots__ = ("_pins", "_sizes", "total")

    def __init__(self) -> None:
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._pins: dict[bytes, int] = {}
        self.total = 0
        """Sum of the sizes."""

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def __iter__(self) -> Iterator[bytes]:
        """Keys, used longest ago first."""
        return iter(self._sizes)

    def add(self, key: bytes, size: int) -> None:
        """Put a key in as the one used last; a key that is there already gets the new size."""
        self.total += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self._sizes.move_to_end(key)

    def touch(self, key: bytes) -> bool:
        """Make a key the one used last; False when it is not there."""
        if key not in self._sizes:
            return False
        self._sizes.move_to_end(key)
        return True

    def remove(self, key: bytes) -> bool:
        """Take a key out, pinned or not; False when it is not there. Its pins stay until they are given back."""
        size = self._sizes.pop(key, None)
        if size is None:
            return False
        self.total -= size
        return True

    def pin(self, key: bytes) -> None:
        """Protect a key once more."""
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: bytes) -> None:
        """Give one pin back."""
        count = self._pins[key] - 1
        if count:
            self._pins[key] = count
        else:
            del self._pins[key]

    @property
    def num_pinned(self) -> int:
        """Distinct pinned keys."""
        return len(self._pins)

    def next_victim(self) -> bytes | None:
        """The key to evict, None when all that is left is pinned."""
        return next((key for key in self._sizes if key not in self._pins), None)

    def clear(self) -> None:
        """Forget the keys; pins stay until they are given back."""
        self._sizes.clear()
        self.total = 0
