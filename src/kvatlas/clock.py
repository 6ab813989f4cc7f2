"""Time as a value that is passed in, so that tests and simulations never wait for it."""

import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """What every room that needs time asks for."""

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back; only differences mean anything."""
        ...

    def wall_s(self) -> float:
        """Seconds since the Unix epoch; may jump."""
        ...


class SystemClock:
    """The machine's own clocks."""

    __slots__ = ()

    def monotonic_s(self) -> float:
        """Seconds on the machine's monotonic clock."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()


class ManualClock:
    """A clock that stands still until it is told to move. For tests and virtual time."""

    __slots__ = ("_monotonic_s", "_wall_s")

    def __init__(self, monotonic_s: float = 0.0, wall_s: float = 1_700_000_000.0) -> None:
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s

    def monotonic_s(self) -> float:
        """Seconds advanced so far, from the start value."""
        return self._monotonic_s

    def wall_s(self) -> float:
        """Seconds since the Unix epoch, moved by `advance` and `jump_wall`."""
        return self._wall_s

    def advance(self, seconds: float) -> None:
        """Move both clocks forward by `seconds` (>= 0)."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {seconds}: only jump_wall moves backwards")
        self._monotonic_s += seconds
        self._wall_s += seconds

    def jump_wall(self, seconds: float) -> None:
        """Move only the wall clock, either way, as NTP or an operator would."""
        self._wall_s += seconds
