"""A stream that says nothing although the engine computes what it must announce: seen by its own counters.

Silence alone proves nothing: an idle engine, decoding, prompts that are cached or shorter than a block store nothing
worth a batch. So the judgement rests on a lower bound of the full blocks that were filled from prompts.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Silence", "SilenceTerm", "SilenceWatch", "TrafficCount"]

Silence: TypeAlias = Literal["fine", "suspect", "silent"]


@dataclass(frozen=True, slots=True)
class TrafficCount:
    """An engine's counters at one scrape.

    Attributes:
        computed_tokens: prompt tokens it computed, those found in a cache left out.
        ended_requests: requests that ended, however.
        running_requests: requests at work now.
    """

    computed_tokens: float
    ended_requests: float
    running_requests: int


class SilenceWatch:
    """Judges one stream, scrape by scrape.

    A request leaves less than one block of its prompt unannounced, and every request that computed since the last
    batch has ended since or is at work. So `R` of them, having computed `T` tokens in blocks of `B`, filled at least
    `(T - R * (B - 1)) / B` blocks. That many, at least `min_blocks`, without a batch for `patience_s` after it was
    first seen, is silence.

    Args:
        patience_s: also the time in which the tail that is asked for meanwhile must bring something.
        min_blocks: room for what is on its way.
    """

    __slots__ = ("_base", "_batches", "_min_blocks", "_patience_s", "_since_s", "blocks")

    def __init__(self, *, patience_s: float, min_blocks: int = 8) -> None:
        self._patience_s = patience_s
        self._min_blocks = min_blocks
        self._base: TrafficCount | None = None
        self._batches = -1
        self._since_s: float | None = None
        self.blocks = 0
        """Blocks that must have been filled since the last batch."""

    def reset(self) -> None:
        """Begin anew with the next scrape: the stream is not live, or its engine tells no counters."""
        self._base = None
        self._since_s = None
        self.blocks = 0

    def look(self, now_s: float, batches: int, traffic: TrafficCount, block_size: int) -> Silence:
        """Judge after a scrape.

        Args:
            now_s: monotonic.
            batches: how many the stream has ever brought, live or by replay.
            block_size: tokens per block, > 0.

        Returns:
            "suspect" once, when doubt begins: ask for the tail then. "silent" from `patience_s` later on.
        """
        base = self._base
        if base is None or batches != self._batches or traffic.computed_tokens < base.computed_tokens:
            self.reset()
            self._base, self._batches = traffic, batches
            return "fine"
        requests = traffic.ended_requests - base.ended_requests + traffic.running_requests
        tokens = traffic.computed_tokens - base.computed_tokens
        self.blocks = max(0, int((tokens - requests * (block_size - 1)) // block_size))
        if self.blocks < self._min_blocks:
            self._since_s = None
            return "fine"
        if self._since_s is None:
            self._since_s = now_s
            return "suspect"
        return "silent" if now_s - self._since_s >= self._patience_s else "fine"


class SilenceTerm:
    """How long a verdict of silence may stand when no batch lifts it.

    An engine without requests has nothing to announce, so nothing can show that its stream is well again. It is given
    some after `first_s`; each further verdict without a batch in between stands twice as long, up to `max_s`.
    """

    __slots__ = ("_batches", "_ends_s", "_first_s", "_max_s", "_term_s")

    def __init__(self, *, first_s: float = 60.0, max_s: float = 600.0) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._term_s = 0.0
        self._batches = -1
        self._ends_s = 0.0

    def begin(self, now_s: float, batches: int) -> float:
        """A verdict is passed (monotonic time; how many batches the stream has ever brought). Returns its term in s."""
        self._term_s = min(2 * self._term_s, self._max_s) if self.is_unanswered(batches) else self._first_s
        self._batches = batches
        self._ends_s = now_s + self._term_s
        return self._term_s

    def is_unanswered(self, batches: int) -> bool:
        """Whether there was a verdict, and no batch since the last one."""
        return self._batches == batches

    def is_over(self, now_s: float) -> bool:
        """Whether the last verdict has stood for its term."""
        return now_s >= self._ends_s
