"""Predictions held against what engines report: the proof of everything else."""

import enum
from collections import deque
from dataclasses import dataclass, field

__all__ = ["Cause", "PredictionAudit", "cause_of"]

_WINDOW = 16
_ALARM_AT = 3


class Cause(enum.StrEnum):
    """Why a prediction was not what the engine reported, as far as can be told from here."""

    PARITY = "parity"
    """The engine counted other prompt tokens than we: another template or tokenizer."""
    BELOW_BLOCK = "below_block"
    """Less than one block apart: the engine counts by another unit."""
    STALE = "stale"
    """The worker lost events, cleared its cache or began another life in between."""
    EVICTED = "evicted"
    """Over-claimed, and blocks left the worker while the request was under way."""
    IN_FLIGHT = "in_flight"
    """Under-claimed, and blocks entered the worker while the request was under way."""
    UNEXPLAINED = "unexplained"
    """Nothing that was seen explains it."""


def cause_of(
    error_tokens: int, *, parity: bool, same_epoch: bool, removed: bool, stored: bool, block_size: int
) -> Cause | None:
    """Why predicted and reported tokens differ; None when they do not.

    Args:
        error_tokens: predicted less reported.
        parity: whether the engine counted as many prompt tokens as we.
        same_epoch: whether no loss, clear or life came between sending the request and its end.
        removed: whether blocks were removed in that time.
        stored: whether blocks were stored in that time.
        block_size: tokens per block.
    """
    if error_tokens == 0:
        return None
    if not parity:
        return Cause.PARITY
    if abs(error_tokens) < block_size:
        return Cause.BELOW_BLOCK
    if not same_epoch:
        return Cause.STALE
    if error_tokens > 0:
        return Cause.EVICTED if removed else Cause.UNEXPLAINED
    return Cause.IN_FLIGHT if stored else Cause.UNEXPLAINED


@dataclass(slots=True)
class PredictionAudit:
    """Predicted against reported `cached_tokens` of one worker. Counters only grow."""

    compared: int = 0
    equal: int = 0
    over: int = 0
    """The index claimed more than the engine had."""
    under: int = 0
    unreported: int = 0
    """Promises that could not be checked: the answer carried no count (e.g. a stream without `include_usage`)."""
    parity_mismatches: int = 0
    """Answers whose `usage.prompt_tokens` is not our own count: another template or tokenizer than the engine's."""
    predicted_tokens: int = 0
    reported_tokens: int = 0
    over_by_cause: dict[Cause, int] = field(default_factory=dict)
    under_by_cause: dict[Cause, int] = field(default_factory=dict)
    alarms: int = 0
    """Times that unexplained over-claims came so often that events must be missing."""
    confirmed_blocks: int = 0
    """Doubted claims that the engine's reports confirmed."""
    adopted_blocks: int = 0
    """Blocks that the engine's reports made known and no event had named."""
    refuted_blocks: int = 0
    """Doubted claims that the engine's reports disproved."""
    _recent: deque[bool] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def record(self, predicted_tokens: int, reported_tokens: int, cause: Cause | None = None) -> bool:
        """Compare one prediction, made when the request was sent, with the engine's own count.

        Returns:
            Whether over-claims nobody can explain have become too many: 3 of the last 16 comparisons. The count then
            starts anew.
        """
        self.compared += 1
        self.predicted_tokens += predicted_tokens
        self.reported_tokens += reported_tokens
        over = predicted_tokens > reported_tokens
        if predicted_tokens == reported_tokens:
            self.equal += 1
        elif over:
            self.over += 1
        else:
            self.under += 1
        if cause is not None:
            causes = self.over_by_cause if over else self.under_by_cause
            causes[cause] = causes.get(cause, 0) + 1
        self._recent.append(over and cause is Cause.UNEXPLAINED)
        if sum(self._recent) < _ALARM_AT:
            return False
        self._recent.clear()
        self.alarms += 1
        return True
