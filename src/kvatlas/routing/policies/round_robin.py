"""Each worker in turn: the baseline every other policy is measured against."""

from collections import OrderedDict
from collections.abc import Sequence

from kvatlas.routing.candidate import Candidate, RoutingRequest
from kvatlas.routing.ranking import PolicySettings, Ranking

__all__ = ["RoundRobinPolicy"]

_MAX_SETS = 1024


class RoundRobinPolicy:
    """Turns are kept per set of candidates, so that two models on one gateway do not skew each other.

    The order in which candidates are listed does not matter. `seed` decides where the first turn begins.
    """

    name = "round_robin"

    __slots__ = ("_seed", "_turns")

    def __init__(self, *, seed: int = 0, settings: PolicySettings | None = None) -> None:
        self._seed = seed
        self._turns: OrderedDict[frozenset[str], int] = OrderedDict()

    def pick(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Ranking:
        """Rank by turn; scores are how many turns away each candidate is."""
        by_name = sorted(range(len(candidates)), key=lambda index: candidates[index].worker_id)
        workers = frozenset(candidate.worker_id for candidate in candidates)
        turn = self._turns.pop(workers, self._seed)
        self._turns[workers] = turn + 1
        if len(self._turns) > _MAX_SETS:
            self._turns.popitem(last=False)
        start = turn % len(by_name)
        order = tuple(by_name[start:] + by_name[:start])
        scores = [0.0] * len(order)
        for place, index in enumerate(order):
            scores[index] = float(place)
        return Ranking(order, tuple(scores), "turns")
