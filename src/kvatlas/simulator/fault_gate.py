"""When one fault strikes: its windows of time, its bound, its chance."""

import math
import random
from typing import Literal, TypeAlias

from kvatlas.simulator.fault_kinds import Fault

__all__ = ["FaultState", "Gate"]

FaultState: TypeAlias = Literal["waiting", "active", "over"]


class Gate:
    """When one fault is in force. Begins at `started_s` + `at`, lasts `for`, and comes again every `every`."""

    __slots__ = ("_every_s", "_first_s", "_for_s", "_next_turn", "hits", "rng")

    def __init__(self, fault: Fault, started_s: float, seed: str) -> None:
        self._first_s = started_s + getattr(fault, "at_s", 0.0)
        self._every_s: float | None = getattr(fault, "every_s", None)
        self._for_s: float | None = getattr(fault, "for_s", None)
        self._next_turn = 0
        self.rng = random.Random(seed)
        """The fault's own generator."""
        self.hits = 0
        """How often the fault struck."""

    def is_open(self, now_s: float) -> bool:
        """Whether `now_s` lies in a window: begin <= now < end."""
        turn = self._turn(now_s)
        return turn is not None and now_s < self._end_s(turn)

    def next_edge_s(self, now_s: float) -> float | None:
        """The next time after `now_s` at which a window begins or ends; None when there is none."""
        turn = self._turn(now_s)
        if turn is None:
            return self._first_s
        end_s = self._end_s(turn)
        if now_s < end_s:
            return None if end_s == math.inf else end_s
        return None if self._every_s is None else self._begin_s(turn + 1)

    def state(self, now_s: float) -> FaultState:
        """In words."""
        if self.is_open(now_s):
            return "active"
        return "over" if self.next_edge_s(now_s) is None else "waiting"

    def strikes(self, now_s: float, p: float, bound: int | None) -> bool:
        """Whether the fault strikes something that happens now, and count it: open, below its bound, and by chance."""
        if not self.is_open(now_s) or (bound is not None and self.hits >= bound):
            return False
        if p < 1.0 and self.rng.random() >= p:
            return False
        self.hits += 1
        return True

    def is_due(self, now_s: float) -> bool:
        """Whether a window has begun that `take_turn` has not taken."""
        turn = self._turn(now_s)
        return turn is not None and turn >= self._next_turn

    def take_turn(self, now_s: float, p: float) -> bool:
        """Take the window that has begun; whether chance lets the fault strike. Windows missed are taken with it."""
        self._next_turn = (self._turn(now_s) or 0) + 1
        strikes = p >= 1.0 or self.rng.random() < p
        self.hits += strikes
        return strikes

    def next_turn_s(self) -> float | None:
        """When the next window begins that is not taken."""
        if self._every_s is None and self._next_turn > 0:
            return None
        return self._begin_s(self._next_turn)

    def _begin_s(self, turn: int) -> float:
        return self._first_s if self._every_s is None else self._first_s + turn * self._every_s

    def _end_s(self, turn: int) -> float:
        return math.inf if self._for_s is None else self._begin_s(turn) + self._for_s

    def _turn(self, now_s: float) -> int | None:
        """Which window began last; None before the first."""
        if now_s < self._first_s:
            return None
        if self._every_s is None:
            return 0
        turn = int((now_s - self._first_s) / self._every_s)
        # The quotient's rounding must not make a window begin before the time `next_edge_s` told.
        if now_s < self._begin_s(turn):
            return turn - 1
        return turn + 1 if now_s >= self._begin_s(turn + 1) else turn
