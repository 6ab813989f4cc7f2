"""Which blocks hold a given content. Several may: an engine never merges equal blocks."""

from collections.abc import Callable

from kvatlas.prefix_cache.block import Block

__all__ = ["BlockHashMap"]


class BlockHashMap:
    """Digest -> blocks of one KV cache group; a lookup gives the block that has held the content longest.

    The usual case, one block for a digest, is a plain dictionary; further copies queue in a second one.
    """

    __slots__ = ("_copies", "_first", "lookup")

    def __init__(self) -> None:
        self._first: dict[bytes, Block] = {}
        self._copies: dict[bytes, dict[int, Block]] = {}
        self.lookup: Callable[[bytes], Block | None] = self._first.get
        """The block cached first under a digest and still there, or None. A bare dict lookup: this is the hot path."""

    def __len__(self) -> int:
        """Number of distinct digests."""
        return len(self._first)

    def clear(self) -> None:
        """Forget everything."""
        self._first.clear()
        self._copies.clear()

    def insert(self, digest: bytes, block: Block) -> None:
        """Add a block under a digest; earlier ones stay before it."""
        first = self._first.setdefault(digest, block)
        if first is not block:
            self._copies.setdefault(digest, {})[block.block_id] = block

    def remove(self, digest: bytes, block: Block) -> bool:
        """Remove this block from under the digest; False when it was not there."""
        copies = self._copies.get(digest)
        if self._first.get(digest) is block:
            if copies is None:
                del self._first[digest]
                return True
            self._first[digest] = copies.pop(next(iter(copies)))
        elif copies is None or copies.pop(block.block_id, None) is None:
            return False
        if not copies:
            del self._copies[digest]
        return True
