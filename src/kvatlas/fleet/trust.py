"""How far a worker's column can be believed, and why. docs/trust.md has the whole argument."""

import enum
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
    """Batches are lost for good: what was learnt before the loss is unconfirmed."""
    STALE = "stale"
    """The stream is gone: nothing learnt from it is renewed."""

    @property
    def confidence(self) -> float:
        """The share of a hit that routing may count on: 1 only where nothing is missing."""
        return _CONFIDENCE[self]


_CONFIDENCE = {Trust.NONE: 0.0, Trust.SYNCING: 0.0, Trust.SYNCED: 1.0, Trust.PARTIAL: 0.5, Trust.STALE: 0.0}


@dataclass(slots=True)
class TrustState:
    """A worker's trust with the reason for it and since when.

    Attributes:
        since_s: monotonic time of the last change.
    """

    level: Trust = Trust.NONE
    reason: str = "no event stream is configured"
    since_s: float = 0.0

    def become(self, level: Trust, reason: str, now_s: float) -> None:
        """Move to a level. The time is kept when only the reason changes."""
        if level is not self.level:
            self.since_s = now_s
        self.level = level
        self.reason = reason
