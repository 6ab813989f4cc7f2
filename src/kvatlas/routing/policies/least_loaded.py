"""The worker with the fewest requests, whatever it has cached."""

from collections.abc import Sequence

from kvatlas.routing.candidate import Candidate, RoutingRequest
from kvatlas.routing.memory import TurnOrder
from kvatlas.routing.ranking import PolicySettings, Ranking

__all__ = ["LeastLoadedPolicy"]


class LeastLoadedPolicy:
    """Fewest requests running and waiting, then fewest queued prompt tokens, then by turn."""

    name = "least_loaded"

    __slots__ = ("_turns",)

    def __init__(self, *, seed: int = 0, settings: PolicySettings | None = None) -> None:
        self._turns = TurnOrder(seed)

    def pick(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Ranking:
        """Rank by load; scores are requests held."""

        def preference(index: int) -> tuple[int, int, tuple[int, int]]:
            candidate = candidates[index]
            return candidate.requests_held, candidate.queued_prefill_tokens, self._turns.key(candidate.worker_id)

        order = tuple(sorted(range(len(candidates)), key=preference))
        self._turns.chosen(candidates[order[0]].worker_id)
        return Ranking(order, tuple(float(candidate.requests_held) for candidate in candidates), "requests")
