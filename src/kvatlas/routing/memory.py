"""What policies remember of their own picks, by worker: who was chosen last, and how much work went where.

No clock is read: time passes by picks and by tokens, so a replayed trace decides as a live one.
"""

import math
import zlib
from collections.abc import Sequence

from kvatlas.routing.candidate import Candidate

__all__ = ["RecentWork", "TurnOrder"]

_FORGET_ABOVE = 4096
_RESCALE_ABOVE = 1e30
_MAX_FADE = 50.0


class TurnOrder:
    """Who has waited longest to be chosen: the last word among equals, so that equal workers share evenly.

    Workers never chosen come first, in an order that depends on the seed, so that several gateways do not all begin
    with the same worker.
    """

    __slots__ = ("_first_places", "_last_turn", "_seed", "_turn")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._turn = 0
        self._last_turn: dict[str, int] = {}
        self._first_places: dict[str, int] = {}

    def key(self, worker_id: str) -> tuple[int, int]:
        """Sorts before another worker's key when this worker's turn is due earlier."""
        place = self._first_places.get(worker_id)
        if place is None:
            if len(self._first_places) > _FORGET_ABOVE:
                self._first_places.clear()
            place = self._first_places[worker_id] = zlib.crc32(f"{self._seed}:{worker_id}".encode())
        return self._last_turn.get(worker_id, 0), place

    def chosen(self, worker_id: str) -> None:
        """Note that a worker had its turn."""
        self._turn += 1
        if len(self._last_turn) > _FORGET_ABOVE:
            # Workers come and go under new names: keep the half that was chosen most recently.
            recent = sorted(self._last_turn.items(), key=lambda item: item[1])[_FORGET_ABOVE // 2 :]
            self._last_turn = dict(recent)
        self._last_turn[worker_id] = self._turn


class RecentWork:
    """Prompt tokens sent to each worker to compute, fading as further work is sent out.

    Why: an idle fleet gives the queue nothing to say, and then the worker that holds what all prompts begin with
    would take every new conversation and evict the old ones, while the caches of all others lie bare.

    Args:
        window_tokens: work per worker after which an entry has faded to 1/e.
    """

    __slots__ = ("_scale", "_scaled_tokens", "_window_tokens")

    def __init__(self, window_tokens: int) -> None:
        self._window_tokens = window_tokens
        # Instead of shrinking every entry at each step, new entries are written ever larger; only ratios are read.
        self._scale = 1.0
        self._scaled_tokens: dict[str, float] = {}

    def surpluses(self, candidates: Sequence[Candidate], weight: float = 1.0) -> tuple[float, ...]:
        """How far each candidate's recent work is above the mean of all, weighted, in multiples of the mean.

        0 at or below it.
        """
        work_of = self._scaled_tokens.get
        recent = [work_of(candidate.worker_id, 0.0) for candidate in candidates]
        mean = sum(recent) / len(recent)
        if mean <= 0.0:
            return (0.0,) * len(recent)
        return tuple([weight * (tokens / mean - 1.0) if tokens > mean else 0.0 for tokens in recent])

    def add(self, worker_id: str, tokens: float, num_workers: int) -> None:
        """Note that a worker, one of `num_workers`, was sent `tokens` to compute."""
        self._scale *= math.exp(min(tokens / num_workers / self._window_tokens, _MAX_FADE))
        if self._scale > _RESCALE_ABOVE or len(self._scaled_tokens) > _FORGET_ABOVE:
            self._rescale()
        self._scaled_tokens[worker_id] = self._scaled_tokens.get(worker_id, 0.0) + tokens * self._scale

    def _rescale(self) -> None:
        """Bring the scale back to 1 and forget workers whose work has faded, or the least of too many."""
        current = {name: tokens / self._scale for name, tokens in self._scaled_tokens.items()}
        kept = sorted(current.items(), key=lambda item: -item[1])[: _FORGET_ABOVE // 2]
        self._scaled_tokens = {name: tokens for name, tokens in kept if tokens >= 1.0}
        self._scale = 1.0
