"""Block key -> the workers that hold it, one flat map per plane.

A plane is one KV cache group in one medium ("GPU", "CPU", ...): residency in one plane says nothing about another.
Workers are bits of a Python int, so that one dictionary entry serves any number of holders and a walk over a chain is
a run of `&`.
"""

from collections.abc import Iterable

__all__ = ["FlatIndex", "Plane"]

Plane = tuple[str, int]
"""(medium in upper case, KV cache group id)."""


class FlatIndex:
    """Holders of every block key, plane by plane."""

    __slots__ = ("_planes",)

    def __init__(self) -> None:
        self._planes: dict[Plane, dict[int, int]] = {}

    def add(self, plane: Plane, block_key: int, worker_bit: int) -> None:
        """Record that a worker holds a block. Repeating it changes nothing. Cost: O(1)."""
        holders = self._planes.setdefault(plane, {})
        holders[block_key] = holders.get(block_key, 0) | worker_bit

    def discard(self, plane: Plane, block_key: int, worker_bit: int) -> None:
        """Record that a worker no longer holds a block; other holders stay. Cost: O(1)."""
        holders = self._planes.get(plane)
        if holders is None or block_key not in holders:
            return
        left = holders[block_key] & ~worker_bit
        if left:
            holders[block_key] = left
        else:
            del holders[block_key]

    def holders(self, plane: Plane, block_key: int) -> int:
        """The bits of the workers that hold a block in a plane; 0 when nobody does. Cost: O(1)."""
        holders = self._planes.get(plane)
        return holders.get(block_key, 0) if holders else 0

    def prefix_blocks(self, plane: Plane, block_keys: Iterable[int], workers: int) -> dict[int, int]:
        """How many leading blocks of a chain each of `workers` (bits) holds without a hole.

        Stops at the first block that none of them holds, so a lazy `block_keys` is hashed no further than needed.

        Returns:
            worker bit -> number of blocks, for every worker that holds at least the first block.

        Cost: O(blocks held by the best worker).
        """
        holders = self._planes.get(plane)
        found: dict[int, int] = {}
        if not holders:
            return found
        alive = workers
        depth = 0
        for block_key in block_keys:
            still = alive & holders.get(block_key, 0)
            if still != alive:
                if depth:
                    _record(found, alive & ~still, depth)
                alive = still
                if not alive:
                    return found
            depth += 1
        if depth:
            _record(found, alive, depth)
        return found

    def __len__(self) -> int:
        """Number of (plane, block key) entries."""
        return sum(len(holders) for holders in self._planes.values())


def _record(found: dict[int, int], workers: int, depth: int) -> None:
    while workers:
        lowest = workers & -workers
        found[lowest] = depth
        workers ^= lowest
