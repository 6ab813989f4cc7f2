"""A fair die: a baseline without memory."""

import random
from collections.abc import Sequence

from kvatlas.routing.candidate import Candidate, RoutingRequest
from kvatlas.routing.ranking import PolicySettings, Ranking

__all__ = ["RandomPolicy"]


class RandomPolicy:
    """Any order, each as likely as any other; the same seed gives the same sequence."""

    name = "random"

    __slots__ = ("_random",)

    def __init__(self, *, seed: int = 0, settings: PolicySettings | None = None) -> None:
        self._random = random.Random(seed)

    def pick(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Ranking:
        """Rank by a draw per candidate; scores are the draws."""
        scores = tuple(self._random.random() for _ in candidates)
        order = tuple(sorted(range(len(scores)), key=scores.__getitem__))
        return Ranking(order, scores, "draw")
