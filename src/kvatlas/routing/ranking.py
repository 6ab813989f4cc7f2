"""What a policy answers, and the seam every policy stands behind."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvatlas.routing.candidate import Candidate, RoutingRequest
from kvatlas.routing.cost import CostInputs, CostTerms

__all__ = ["Policy", "PolicySettings", "Ranking"]


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Knobs of the policies.

    Attributes:
        decode_share: how much one running request adds to a step's time, as a share of an ordinary decode step.
        balance_weight: how strongly a worker that got more than its share of recent work is avoided; 0 turns it off.
        balance_window_tokens: recent means this many prompt tokens computed per worker, about one cache turnover.
        crowding: how many requests are reckoned to wait behind one request's computing: recomputing what another worker
            has cached delays others, too, so a conversation does not leave its cache for a small gain of its own.
        tie_share: candidates whose scores are within this share of the best one are equally good.
        tie_floor_s: ... or within this many seconds.
    """

    decode_share: float = 0.1
    balance_weight: float = 0.5
    balance_window_tokens: int = 500_000
    crowding: float = 0.5
    tie_share: float = 0.02
    tie_floor_s: float = 0.001


class Ranking(msgspec.Struct, frozen=True, gc=False):
    """Candidates in order of preference.

    `order` is a permutation of candidate indexes, best first; the rest is for failover. `scores` are aligned with the
    candidates, in `score_unit`. `costs` says what the scores of these `candidates` are made of; None for policies
    without a cost.
    """

    order: tuple[int, ...]
    scores: tuple[float, ...]
    score_unit: str
    costs: CostInputs | None = None
    candidates: Sequence[Candidate] = ()

    @property
    def terms(self) -> tuple[CostTerms, ...]:
        """What each score is made of, aligned with the candidates; empty for policies without a cost. Made anew."""
        return () if self.costs is None else self.costs.terms(self.candidates)


class Policy(Protocol):
    """Ranks candidates. May keep a memory of its own picks: the first of the order counts as chosen."""

    name: str

    def pick(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Ranking:
        """Rank at least one candidate."""
        ...
