"""The default: the worker with the least expected time to the first token."""

from collections.abc import Sequence

from kvatlas.routing.candidate import Candidate, RoutingRequest
from kvatlas.routing.cost import CostInputs, CostTerms, uncached_tokens
from kvatlas.routing.memory import RecentWork, TurnOrder
from kvatlas.routing.ranking import PolicySettings, Ranking

__all__ = ["CostPolicy"]


class CostPolicy:
    """Minimises queue + uncached prefill + decode interference, its cost to others and a surcharge for busy workers.

    What keeps conversations together: their long hits save more time than a queue costs. What keeps the fleet level:
    a queue outweighs a short hit, the surcharge does the same while queues are empty, and equals take turns. A hot
    shared prefix so spreads to as many workers as its traffic needs, because each worker that computes it once
    becomes as good as the first.
    """

    name = "cost"

    __slots__ = ("_recent", "_settings", "_turns")

    def __init__(self, *, seed: int = 0, settings: PolicySettings | None = None) -> None:
        self._settings = settings or PolicySettings()
        self._turns = TurnOrder(seed)
        self._recent = RecentWork(self._settings.balance_window_tokens)

    def pick(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Ranking:
        """Rank by expected seconds; among (nearly) equal ones by requests held, then by turn.

        Cost: about 3 us plus 1.5 us per candidate.
        """
        costs = self._costs(request, candidates)
        scores = costs.totals_s(candidates)
        best = min(scores)
        limit = best + max(self._settings.tie_floor_s, self._settings.tie_share * best)
        turn_of = self._turns.key
        equals = []
        others = []
        for index, candidate in enumerate(candidates):
            score = scores[index]
            if score <= limit:
                held = candidate.running_requests + candidate.waiting_requests
                equals.append((held, turn_of(candidate.worker_id), score, candidate.worker_id, index))
            else:
                others.append((score, candidate.worker_id, index))
        equals.sort()
        others.sort()
        order = (*[key[4] for key in equals], *[key[2] for key in others])
        chosen = candidates[order[0]]
        self._turns.chosen(chosen.worker_id)
        self._recent.add(chosen.worker_id, uncached_tokens(request.prompt_tokens, chosen), len(candidates))
        return Ranking(order, scores, "s", costs, candidates)

    def terms(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> tuple[CostTerms, ...]:
        """The cost of each candidate now, without choosing."""
        return self._costs(request, candidates).terms(candidates)

    def _costs(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> CostInputs:
        settings = self._settings
        surpluses = self._recent.surpluses(candidates, settings.balance_weight)
        return CostInputs(request.prompt_tokens, surpluses, settings.decode_share, settings.crowding)
