"""What a publisher sends and answers, without its sockets: numbers, the ring of the last batches, and what is lost.

An engine's publisher numbers its batches, sends each once and keeps the last ones (`PlainOutlet`). A simulated one can
be made to lose, delay or repeat them: it brings an `Outlet` of its own.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

__all__ = ["LinkDown", "LinkUp", "LiveStep", "Outlet", "PlainOutlet", "ReplayAnswer", "Sent"]


@dataclass(frozen=True, slots=True)
class Sent:
    """A message: `payload` under the number `seq`."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class LinkDown:
    """All connections break, live and replay, and none can be made until `LinkUp`. `reason`: for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class LinkUp:
    """Connections can be made again."""


LiveStep: TypeAlias = Sent | LinkDown | LinkUp
"""What happens on the live channel, in order."""


@dataclass(frozen=True, slots=True)
class ReplayAnswer:
    """The answer to one question.

    Args:
        batches: in the order they are sent.
        interval_s: time before each of them; 0 = all at once.
        has_marker: the end marker follows.
    """

    batches: Sequence[Sent]
    interval_s: float = 0.0
    has_marker: bool = True


class Outlet(Protocol):
    """Between an engine and its publisher's sockets. Used by one thread at a time; nothing in it waits."""

    def publish(self, payload: bytes) -> Sequence[LiveStep]:
        """The engine's next batch. Returns what goes live now, perhaps of older ones too."""
        ...

    def due(self) -> Sequence[LiveStep]:
        """What time alone brings."""
        ...

    def next_due_s(self) -> float | None:
        """Seconds until `due` has something; None when it will not before the next call of another method."""
        ...

    def replay(self, from_seq: int) -> ReplayAnswer | None:
        """The answer to who asks for all batches from `from_seq` on; None = no answer."""
        ...


class PlainOutlet:
    """Numbers from 0, each batch live at once, the last `buffer_steps` for replay."""

    __slots__ = ("_next_seq", "_ring")

    def __init__(self, buffer_steps: int) -> None:
        self._next_seq = 0
        self._ring: deque[Sent] = deque(maxlen=buffer_steps)

    def publish(self, payload: bytes) -> Sequence[LiveStep]:
        """The batch itself. O(1)."""
        sent = Sent(self._next_seq, payload)
        self._next_seq += 1
        self._ring.append(sent)
        return (sent,)

    def due(self) -> Sequence[LiveStep]:
        """Nothing: time changes nothing."""
        return ()

    def next_due_s(self) -> float | None:
        """Never."""
        return None

    def replay(self, from_seq: int) -> ReplayAnswer:
        """What the ring holds of them. O(ring)."""
        return ReplayAnswer([sent for sent in self._ring if sent.seq >= from_seq])
