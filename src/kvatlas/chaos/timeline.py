"""Virtual time: what is to happen, in order of its time, on a clock that moves only from one such thing to the next."""

import heapq
from collections.abc import Callable

from kvatlas.clock import ManualClock

__all__ = ["Timeline", "Timer"]

_FEW_TIMERS = 256


class Timer:
    """Something that will happen. `cancel` undoes that."""

    __slots__ = ("_call", "due_s")

    def __init__(self, due_s: float, call: Callable[[], None]) -> None:
        self.due_s = due_s
        self._call: Callable[[], None] | None = call

    @property
    def is_set(self) -> bool:
        """Whether it is still to happen."""
        return self._call is not None

    def cancel(self) -> None:
        """It will not happen. Repeating this changes nothing."""
        self._call = None

    def fire(self) -> None:
        """It happens, once."""
        call, self._call = self._call, None
        if call is not None:
            call()


class Timeline:
    """Runs timers in order of their time; those of one time in the order they were set.

    Attributes:
        clock: tells the virtual time to whoever needs a `Clock`.
    """

    def __init__(self, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = 0
        self._sweep_at = _FEW_TIMERS

    def __len__(self) -> int:
        """Timers kept; of cancelled ones never more than of others, and a few."""
        return len(self._heap)

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self.clock.monotonic_s()

    def after(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Have `call` happen in `delay_s` seconds; a negative delay is none. O(log timers)."""
        return self.at(self.now_s + delay_s, call)

    def at(self, due_s: float, call: Callable[[], None]) -> Timer:
        """Have `call` happen at a time; the past is now. O(log timers)."""
        timer = Timer(max(due_s, self.now_s), call)
        self._count += 1
        heapq.heappush(self._heap, (timer.due_s, self._count, timer))
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if entry[2].is_set]
            heapq.heapify(self._heap)
            self._sweep_at = max(_FEW_TIMERS, 2 * len(self._heap))
        return timer

    def run_until(self, end_s: float, *, stop: Callable[[], bool] = lambda: False) -> None:
        """Let all happen up to and at `end_s`, or until `stop` says so after one of them; the clock ends there."""
        while self._heap and self._heap[0][0] <= end_s:
            due_s, _, timer = heapq.heappop(self._heap)
            # A sum of differences may fall short of the time by a rounding error; timers that compare times need it.
            while self.now_s < due_s:
                self.clock.advance(max(due_s - self.now_s, 1e-12 * due_s))
            timer.fire()
            if stop():
                return
        if self.now_s < end_s:
            self.clock.advance(end_s - self.now_s)
