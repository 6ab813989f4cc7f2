"""What a `SequenceTracker` is told, and tells its owner to do, one value class for each."""

import math
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from kvatlas._native import xxh3_64
from kvatlas.events.codec import peek_ts

__all__ = [
    "Apply",
    "AskReplay",
    "Lost",
    "NewLife",
    "Step",
    "StreamPosition",
    "TrackerLimits",
    "batch_time",
    "payload_digest",
]


@dataclass(frozen=True, slots=True)
class TrackerLimits:
    """Bounds of a tracker: what it may hold while it waits, and how often it asks.

    `remembered` is how many applied batches it can recognise again, 8 bytes each as they come; more than a publisher's
    ring (10,000).
    """

    max_held_batches: int = 20_000
    max_held_bytes: int = 128 * 1024 * 1024
    max_attempts: int = 3
    remembered: int = 16_384


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Where a stream was left, and what tells later whether it is still the same life.

    Attributes:
        seq: number of the last batch applied.
        digest: `payload_digest` of its bytes.
        ts: its time stamp; None when it has none.
    """

    seq: int
    digest: int
    ts: float | None = None

    @classmethod
    def at(cls, seq: int, payload: bytes) -> "StreamPosition":
        """The position after a batch. O(bytes)."""
        return cls(seq, payload_digest(payload), peek_ts(payload))


def batch_time(payload: bytes) -> float:
    """A batch's time stamp; -inf for bytes that do not start as a batch does. O(1)."""
    ts = peek_ts(payload)
    return -math.inf if ts is None else ts


def payload_digest(payload: bytes) -> int:
    """What two batches are compared by: 64 bits, never 0, the same in every process."""
    return xxh3_64(payload, 0) or 1


class Apply(msgspec.Struct, frozen=True, gc=False):
    """Apply this batch now: it follows the one before, or a loss that was reported. A Struct: there is one a batch."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """Batches `first_seq..last_seq` cannot be had. `last_seq` None: nobody knows how many, perhaps none."""

    first_seq: int
    last_seq: int | None


@dataclass(frozen=True, slots=True)
class NewLife:
    """Another publisher life: forget all that was learnt from this stream. Numbers start again at 0."""

    reason: str


@dataclass(frozen=True, slots=True)
class AskReplay:
    """Ask the publisher for every batch from `from_seq` on, and abandon an earlier question.

    `token` goes back with each answer. `attempt` counts the questions in a row that brought nothing, for a growing
    delay.
    """

    token: int
    from_seq: int
    attempt: int


Step: TypeAlias = Apply | Lost | NewLife | AskReplay
