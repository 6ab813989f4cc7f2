"""What engines truly hold, by the block keys that the index uses.

An engine's own events, taken before anything can lose them, say what it holds after each step; `TrueCache.verify` holds
that against the engine's pool itself.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

from kvatlas.errors import IndexStateError
from kvatlas.events import AllBlocksCleared, BlockHandle, BlockRemoved, BlockStored, Event, plain_token_ids
from kvatlas.hashing import NO_BLOCK_EXTRAS, BlockKeyHasher

__all__ = ["KeyBook", "TrueCache"]


class KeyBook:
    """Engine hash -> block key, for everything any engine ever stored.

    Engines of one fleet give the same content the same hash, so one book serves all.
    """

    __slots__ = ("_hasher", "_keys", "_root")

    def __init__(self, hasher: BlockKeyHasher) -> None:
        self._hasher = hasher
        self._root = hasher.root_key("")
        self._keys: dict[BlockHandle, int] = {}

    def learn(self, event: BlockStored) -> list[int]:
        """Return the keys of a store's blocks; its parent must have been stored somewhere before."""
        known = [self._keys.get(handle) for handle in event.block_hashes]
        keys = [key for key in known if key is not None]
        if len(keys) == len(known):
            return keys
        parent = event.parent_block_hash
        parent_key = self._root if parent is None else self._keys[parent]
        extras = (NO_BLOCK_EXTRAS,) * len(known)
        token_ids = plain_token_ids(event.token_ids) or ()
        keys = list(self._hasher.block_keys(parent_key, token_ids, event.block_size, extras))
        self._keys.update(zip(event.block_hashes, keys, strict=True))
        return keys

    def key(self, handle: BlockHandle) -> int:
        """The key of a hash that some engine stored."""
        return self._keys[handle]


class TrueCache:
    """The contents of one engine's first KV cache group on its device, and how they compare with claims.

    Attributes:
        keys: every block key that the engine held, or may be claimed to hold; positions are stable between `prune`s.
        resident: one byte for each key: 1 = the engine holds it now.
        stored_blocks: blocks stored so far, in all lives.
    """

    __slots__ = ("_book", "_copies", "_positions", "keys", "resident", "stored_blocks")

    def __init__(self, book: KeyBook) -> None:
        self._book = book
        self._positions: dict[int, int] = {}
        self._copies: Counter[int] = Counter()
        self.keys: array[int] = array("Q")
        self.resident = bytearray()
        self.stored_blocks = 0

    def __len__(self) -> int:
        """Distinct blocks held."""
        return sum(self.resident)

    def holds(self, key: int) -> bool:
        """Whether the engine holds the block now."""
        return self._copies[key] > 0

    def apply(self, events: Iterable[Event]) -> None:
        """Take the engine's events of one step. O(blocks)."""
        for event in events:
            match event:
                case BlockStored():
                    for key in self._book.learn(event):
                        self._add(key)
                case BlockRemoved():
                    for handle in event.block_hashes:
                        self._take(self._book.key(handle))
                case AllBlocksCleared():
                    self.clear()

    def clear(self) -> None:
        """The engine holds nothing."""
        self._copies.clear()
        self.resident = bytearray(len(self.keys))

    def leading(self, keys: Sequence[int]) -> int:
        """How many blocks of a chain the engine holds from its start without a hole."""
        return next((depth for depth, key in enumerate(keys) if not self._copies[key]), len(keys))

    def prune(self, claims: bytes) -> None:
        """Forget keys that are neither held nor claimed. `claims`: one byte for each key, 0 = not claimed."""
        kept = [(key, held) for key, held, claim in zip(self.keys, self.resident, claims, strict=True) if held or claim]
        self.keys = array("Q", [key for key, _ in kept])
        self.resident = bytearray(held for _, held in kept)
        self._positions = {key: position for position, key in enumerate(self.keys)}
        self._copies = Counter({key: count for key, count in self._copies.items() if count})

    def verify(self, num_cached_blocks: int) -> None:
        """Hold the books against the engine's own count of blocks that can be hit.

        Raises:
            IndexStateError: they differ: the engine's events do not say what it holds.
        """
        if len(self) != num_cached_blocks:
            raise IndexStateError(
                f"by its events an engine holds {len(self)} blocks, by its pool {num_cached_blocks}: expected the same"
            )

    def _add(self, key: int) -> None:
        self.stored_blocks += 1
        self._copies[key] += 1
        position = self._positions.get(key)
        if position is None:
            self._positions[key] = len(self.keys)
            self.keys.append(key)
            self.resident.append(1)
        else:
            self.resident[position] = 1

    def _take(self, key: int) -> None:
        self._copies[key] -= 1
        if self._copies[key] <= 0:
            del self._copies[key]
            self.resident[self._positions[key]] = 0
