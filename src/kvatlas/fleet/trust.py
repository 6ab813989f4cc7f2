"""How far a worker's column can be believed, and why. docs/trust.md has the whole argument."""

import enum
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Trust", "TrustState"]


class Trust(enum.StrEnum):
    """Standing of one worker's event stream."""

    NONE = "none"
    """No event stream is configured, or none was ever reached: nothing is known."""
    SYNCING = "syncing"
    """A life has begun and its past is still being replayed: what is known may miss removals."""
    SYNCED = "synced"
    """Every batch of this life was applied, or the engine said its cache was empty since."""
    PARTIAL = "partial"
    """Batches are lost for good: what was learnt before the loss is in doubt, until confirmed or one turnover old."""
    STALE = "stale"
    """The stream is gone: nothing learnt from it is renewed."""

    @property
    def is_credited(self) -> bool:
        """Whether claims count at all in routing: not while the stream is gone or its past is being replayed."""
        return self in {Trust.SYNCED, Trust.PARTIAL}

    def credit(self, hit_tokens: int, doubted_tokens: int) -> float:
        """The tokens that routing may count on, of those claimed beyond doubt and those claimed in doubt."""
        return hit_tokens + DOUBTED_CREDIT * doubted_tokens if self.is_credited else 0.0


DOUBTED_CREDIT = 0.5
"""The share of a doubted claim that routing counts on."""


@dataclass(slots=True)
class TrustState:
    """A worker's trust with the reason for it and since when.

    Attributes:
        since_s: monotonic time of the last change.
        on_become: told after each `become`, also when nothing changed.
    """

    level: Trust = Trust.NONE
    reason: str = "no event stream is configured"
    since_s: float = 0.0
    on_become: Callable[["TrustState"], None] | None = None

    def become(self, level: Trust, reason: str, now_s: float) -> None:
        """Move to a level. The time is kept when only the reason changes."""
        if level is not self.level:
            self.since_s = now_s
        self.level = level
        self.reason = reason
        if self.on_become is not None:
            self.on_become(self)
