"""One coarse timer wheel for the whole gateway instead of a loop timer per request.

A deadline moves on every read, so moving it later must cost next to nothing: it is one attribute. The wheel looks at a
timer only when the slot it was put in comes round, and puts it back when the deadline has moved meanwhile. Moving a
deadline *earlier* re-places the timer. No I/O here: somebody calls `advance`.
"""

from collections.abc import Callable
from math import inf

from kvatlas.clock import Clock

__all__ = ["TICK_S", "Timer", "TimerWheel"]

TICK_S = 0.1
_SLOTS = 1024  # looks at every timer at least once in 102 s


class Timer:
    """One owner's single deadline, on the wheel's clock; `math.inf` = none. The wheel alone writes the fields."""

    __slots__ = ("bucket", "deadline_s", "expire", "look_s")

    def __init__(self, expire: Callable[[], None]) -> None:
        self.expire = expire
        self.deadline_s = inf
        self.look_s = inf
        self.bucket: set[Timer] | None = None


class TimerWheel:
    """Holds timers in 1024 slots of 100 ms.

    Guarantee: a timer never fires before its deadline, and at most two ticks after it if `advance` is called each tick.
    """

    __slots__ = ("_buckets", "_clock", "_start_s", "_tick", "now_s")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start_s = self.now_s = clock.monotonic_s()
        self._tick = 0
        self._buckets: list[set[Timer]] = [set() for _ in range(_SLOTS)]

    def arm(self, timer: Timer, deadline_s: float) -> None:
        """Set or move a deadline. Cost: O(1); one comparison when it moves later (the usual case)."""
        timer.deadline_s = deadline_s
        if deadline_s < timer.look_s or timer.bucket is None:
            self._place(timer)

    def cancel(self, timer: Timer) -> None:
        """Forget a timer; it may be armed again."""
        if timer.bucket is not None:
            timer.bucket.discard(timer)
            timer.bucket = None
        timer.deadline_s = timer.look_s = inf

    def advance(self) -> None:
        """Fire what is due. What one `expire` raises is raised again after the others have fired."""
        self.now_s = now_s = self._clock.monotonic_s()
        due_tick = int((now_s - self._start_s) / TICK_S)
        first_error: Exception | None = None
        self._tick = max(
            self._tick, due_tick - _SLOTS
        )  # after a long stall every slot is looked at once, not once per lap
        while self._tick < due_tick:
            self._tick += 1
            bucket = self._buckets[self._tick % _SLOTS]
            if not bucket:
                continue
            looked_at, self._buckets[self._tick % _SLOTS] = bucket, set()
            for timer in looked_at:
                timer.bucket = None
            for timer in looked_at:
                if timer.bucket is not None or timer.deadline_s == timer.look_s == inf:
                    continue  # armed again or cancelled by a timer that fired before it
                if timer.deadline_s > now_s:
                    self._place(timer)
                    continue
                timer.deadline_s = timer.look_s = inf
                try:
                    timer.expire()
                except Exception as error:  # noqa: BLE001 - raised below, after the others had their turn
                    first_error = first_error or error
        if first_error is not None:
            raise first_error

    def _place(self, timer: Timer) -> None:
        if timer.bucket is not None:
            timer.bucket.discard(timer)
        due = (timer.deadline_s - self._start_s) / TICK_S
        tick = self._tick + _SLOTS - 1 if due >= self._tick + _SLOTS - 1 else max(int(due) + 1, self._tick + 1)
        timer.look_s = self._start_s + (tick - 1) * TICK_S  # an earlier deadline needs an earlier slot
        timer.bucket = self._buckets[tick % _SLOTS]
        timer.bucket.add(timer)
