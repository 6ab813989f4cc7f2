"""What a `SequenceTracker` tells its owner to do, one value class for each."""

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Apply", "AskReplay", "Lost", "NewLife", "Step"]


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply this batch now: it follows the one before, or a loss that was reported."""

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
