"""Two tiers as one: the fast one in front, the large one behind it."""

from collections.abc import Sequence

from kvatlas.prefix_cache.connectors.tier import Tier, TierChange, TierStats

__all__ = ["TieredStore"]


class TieredStore:
    """Blocks are written to both tiers; a block read from the back one is kept in the front one again.

    Changes are those of both, each under its own medium, front first.
    """

    def __init__(self, front: Tier, back: Tier) -> None:
        self.front = front
        self.back = back
        self.medium = front.medium
        self._pins: dict[bytes, list[Tier]] = {}

    @property
    def stats(self) -> TierStats:
        """The front tier's; `back.stats` has the other's."""
        return self.front.stats

    def contains(self, key: bytes) -> bool:
        """Whether either tier has the block."""
        return self.front.contains(key) or self.back.contains(key)

    def source_of(self, key: bytes) -> str:
        """The source of the tier a read would use."""
        return (self.front if self.front.contains(key) else self.back).source_of(key)

    def read(self, key: bytes) -> bytes | None:
        """The block's bytes from the first tier that has them whole. Counts as a use in both."""
        payload = self.front.read(key) if self.front.contains(key) else None
        if payload is not None:
            self.back.touch((key,))
            return payload
        payload = self.back.read(key)
        if payload is not None:
            self.front.write(key, payload)
        return payload

    def write(self, key: bytes, payload: bytes) -> bool:
        """Keep a block in both tiers; False when neither could."""
        kept_in_front = self.front.write(key, payload)
        kept_behind = self.back.write(key, payload)
        return kept_in_front or kept_behind

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of each known key in both tiers."""
        self.front.touch(keys)
        self.back.touch(keys)

    def pin(self, key: bytes) -> None:
        """Protect a key in the tier a read would use."""
        tier = self.front if self.front.contains(key) else self.back
        tier.pin(key)
        self._pins.setdefault(key, []).append(tier)

    def unpin(self, key: bytes) -> None:
        """Give one pin back to the tier that holds it."""
        tiers = self._pins[key]
        tiers.pop(0).unpin(key)
        if not tiers:
            del self._pins[key]

    def clear(self) -> None:
        """Drop everything in both tiers."""
        self.front.clear()
        self.back.clear()

    def take_changes(self) -> list[TierChange]:
        """What entered and left both tiers since the last call."""
        return self.front.take_changes() + self.back.take_changes()
