"""Digests of the newest batches of a stream, by their number."""

from array import array

__all__ = ["DigestRing"]

_FEW = 64


class DigestRing:
    """Remembers the last batches; it grows with the stream, so that a thousand quiet ones cost little.

    Args:
        most: how many are remembered in the end, 8 bytes each.
    """

    __slots__ = ("_first", "_most", "words")

    def __init__(self, most: int) -> None:
        self._most = most
        self._first = -1  # the first batch ever noted; -1 before
        self.words = array("Q", bytes(8 * min(most, _FEW)))
        """u64[n]: that of batch i at place i % n, 0 where there is none. Replaced when it grows."""

    def make_room(self, last: int, seq: int) -> None:
        """Make sure that what is noted up to batch `seq` drives out nothing that shall be remembered.

        Args:
            last: the newest batch that was noted or passed by.
            seq: above `last`.
        """
        if self._first < 0:
            self._first = last + 1
        size = len(self.words)
        wanted = min(self._most, seq - self._first + 1)
        if wanted <= size:
            return
        grown = array("Q", bytes(8 * min(self._most, max(4 * size, wanted))))
        for old in range(max(self._first, last - size + 1), last + 1):
            grown[old % len(grown)] = self.words[old % size]
        self.words = grown

    def note(self, last: int, seq: int, digest: int) -> None:
        """Remember the digest of batch `seq`, above `last`. Cost: O(1) in the mean."""
        self.make_room(last, seq)
        self.words[seq % len(self.words)] = digest

    def find(self, last: int, seq: int) -> int | None:
        """The digest of a batch up to `last`; None for one that is forgotten, was passed by, or never noted."""
        if not max(last - len(self.words), self._first - 1) < seq <= last or self._first < 0:
            return None
        return self.words[seq % len(self.words)] or None

    def newest(self, last: int) -> int | None:
        """The newest batch up to `last` whose digest is known; None when there is none. O(1) unless `last` is lost."""
        if self._first < 0:
            return None
        words = self.words
        for seq in range(last, max(last - len(words), self._first - 1), -1):
            if words[seq % len(words)]:
                return seq
        return None

    def pass_by(self, last: int, seq: int) -> None:
        """Batches from the one after `last` up to `seq` are lost: there are no digests of them. O(batches kept)."""
        if self._first < 0:
            return
        self.make_room(last, seq)
        for lost in range(max(last + 1, seq - len(self.words) + 1), seq + 1):
            self.words[lost % len(self.words)] = 0
