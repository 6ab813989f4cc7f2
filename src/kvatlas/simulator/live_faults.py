"""One fault each between the engine and the live channel: what goes in comes out, late, twice, or not at all.

Each is pure: what it does follows from its gate and the order and times of the calls. The stream calls `due` before
`push`, and never goes back in time.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvatlas.simulator.fault_gate import Gate
from kvatlas.simulator.fault_kinds import Delay, Drop, Duplicate, Fault, HwmLoss, LostTail, Reorder, Silence
from kvatlas.stream import Sent

__all__ = ["LIVE_FAULTS", "LiveFault", "Numbered"]


@dataclass(frozen=True, slots=True)
class Numbered:
    """A batch on its way, with its number over all lives."""

    number: int
    sent: Sent


class LiveFault(Protocol):
    """One stage on the way."""

    def push(self, item: Numbered, now_s: float) -> list[Numbered]:
        """A batch comes in. Returns what goes on."""
        ...

    def due(self, now_s: float) -> list[Numbered]:
        """What time lets go."""
        ...

    def next_due_s(self, now_s: float) -> float | None:
        """When `due` has something."""
        ...

    def release(self) -> list[Numbered]:
        """The fault is taken back: what was held goes on."""
        ...

    def clear(self) -> None:
        """The engine's life ended: what was held is lost."""
        ...


class _Instant:
    """A stage that holds nothing."""

    def due(self, now_s: float) -> list[Numbered]:
        """Nothing."""
        return []

    def next_due_s(self, now_s: float) -> float | None:
        """Never."""
        return None

    def release(self) -> list[Numbered]:
        """Nothing."""
        return []

    def clear(self) -> None:
        """Nothing is lost."""


class _Dropping(_Instant):
    def __init__(self, fault: Drop | Silence, gate: Gate, first_batch: int) -> None:
        self._fault, self._gate, self._first = fault, gate, first_batch

    def push(self, item: Numbered, now_s: float) -> list[Numbered]:
        """The batch, or nothing."""
        p = self._fault.p if isinstance(self._fault, Drop) else 1.0
        return [] if item.number >= self._first and self._gate.strikes(now_s, p, self._fault.count) else [item]


class _Duplicating(_Instant):
    def __init__(self, fault: Duplicate, gate: Gate, first_batch: int) -> None:
        self._fault, self._gate, self._first = fault, gate, first_batch

    def push(self, item: Numbered, now_s: float) -> list[Numbered]:
        """The batch, once or more."""
        strikes = item.number >= self._first and self._gate.strikes(now_s, self._fault.p, self._fault.count)
        return [item] * (1 + self._fault.copies * strikes)


class _Queue:
    """A stage that holds batches in order."""

    def __init__(self) -> None:
        self._held: deque[Numbered] = deque()

    def release(self) -> list[Numbered]:
        """All of them."""
        held = list(self._held)
        self.clear()
        return held

    def clear(self) -> None:
        """Forget them."""
        self._held.clear()


class _Delaying(_Queue):
    def __init__(self, fault: Delay, gate: Gate, first_batch: int) -> None:
        super().__init__()
        self._fault, self._gate, self._first = fault, gate, first_batch
        self._due_s: deque[float] = deque()

    def push(self, item: Numbered, now_s: float) -> list[Numbered]:
        """Held when it is delayed, or when it comes behind one that is."""
        strikes = item.number >= self._first and self._gate.strikes(now_s, self._fault.p, self._fault.count)
        due_s = now_s + self._fault.by_s * strikes
        if not self._held and due_s <= now_s:
            return [item]
        self._held.append(item)
        self._due_s.append(max(due_s, self._due_s[-1] if self._due_s else due_s))
        return []

    def due(self, now_s: float) -> list[Numbered]:
        """Those whose time has come."""
        out = []
        while self._due_s and self._due_s[0] <= now_s:
            self._due_s.popleft()
            out.append(self._held.popleft())
        return out

    def next_due_s(self, now_s: float) -> float | None:
        """That of the first."""
        return self._due_s[0] if self._due_s else None

    def clear(self) -> None:
        """Forget them."""
        super().clear()
        self._due_s.clear()


class _Reordering(_Queue):
    """Holds one batch at a time: while it is overtaken, no other is befallen."""

    def __init__(self, fault: Reorder, gate: Gate, first_batch: int) -> None:
        super().__init__()
        self._fault, self._gate, self._first = fault, gate, first_batch
        self._left = 0
        self._due_s = 0.0

    def push(self, item: Numbered, now_s: float) -> list[Numbered]:
        """Held, or past the one that is held; the last that has to pass takes it along."""
        if self._held:
            self._left -= 1
            return [item, *self.release()] if self._left == 0 else [item]
        if item.number < self._first or not self._gate.strikes(now_s, self._fault.p, self._fault.count):
            return [item]
        self._held.append(item)
        self._left, self._due_s = self._fault.span, now_s + self._fault.by_s
        return []

    def due(self, now_s: float) -> list[Numbered]:
        """The held one, when too few came to overtake it."""
        return self.release() if self._held and self._due_s <= now_s else []

    def next_due_s(self, now_s: float) -> float | None:
        """Its patience."""
        return self._due_s if self._held else None


class _HwmLosing(_Queue):
    def __init__(self, fault: HwmLoss, gate: Gate, first_batch: int) -> None:
        super().__init__()
        self._fault, self._gate, self._first = fault, gate, first_batch
        self._read_s = 0.0  # when the slow reader takes the next

    def push(self, item: Numbered, now_s: float) -> list[Numbered]:
        """Read at once, queued, or dropped because the queue is full."""
        if item.number < self._first or not self._gate.is_open(now_s):
            return [*self.release(), item]
        if not self._held and now_s >= self._read_s:
            self._read_s = now_s + 1.0 / self._fault.rate
            return [item]
        if len(self._held) < self._fault.size:
            self._held.append(item)
        else:
            self._gate.hits += 1
        return []

    def due(self, now_s: float) -> list[Numbered]:
        """What was read by now; all of it when the reader is no longer slow."""
        if not self._gate.is_open(now_s):
            return self.release()
        out = []
        while self._held and self._read_s <= now_s:
            out.append(self._held.popleft())
            self._read_s += 1.0 / self._fault.rate
        return out

    def next_due_s(self, now_s: float) -> float | None:
        """The next read, or the end of the window."""
        if not self._held:
            return None
        if not self._gate.is_open(now_s):
            return now_s
        edge_s = self._gate.next_edge_s(now_s)
        return self._read_s if edge_s is None else min(edge_s, self._read_s)


class _TailLosing(_Queue):
    def __init__(self, fault: LostTail, gate: Gate, first_batch: int) -> None:
        super().__init__()
        self._fault, self._gate, self._first = fault, gate, first_batch
        self._tails = 0
        self._quiet_s = 0.0  # when the stream counts as quiet

    def push(self, item: Numbered, now_s: float) -> list[Numbered]:
        """Held back until as many newer ones came: only then it is not of the tail."""
        if item.number < self._first or not self._gate.is_open(now_s):
            return [*self.release(), item]
        self._quiet_s = now_s + self._fault.quiet_s
        self._held.append(item)
        return [self._held.popleft()] if len(self._held) > self._fault.count else []

    def due(self, now_s: float) -> list[Numbered]:
        """Nothing when the tail is lost; all of it when chance or `times` spares it."""
        if not self._held or now_s < self._quiet_s:
            return []
        spared = self._fault.times is not None and self._tails >= self._fault.times
        if spared or (self._fault.p < 1.0 and self._gate.rng.random() >= self._fault.p):
            return self.release()
        self._tails += 1
        self._gate.hits += len(self._held)
        self.clear()
        return []

    def next_due_s(self, now_s: float) -> float | None:
        """When the stream counts as quiet."""
        return self._quiet_s if self._held else None


LIVE_FAULTS: dict[type[Fault], Callable[[Any, Gate, int], LiveFault]] = {
    Drop: _Dropping,
    LostTail: _TailLosing,
    HwmLoss: _HwmLosing,
    Delay: _Delaying,
    Reorder: _Reordering,
    Duplicate: _Duplicating,
    Silence: _Dropping,
}
"""Kind of fault -> its stage, in the order of the way: the publisher, the network, the subscriber's ear."""
