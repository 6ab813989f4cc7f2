"""The default: the worker with the least expected time to the first token."""

from collections.abc import Sequence

from kvatlas.routing.candidate import Candidate, RoutingRequest
from kvatlas.routing.cost import CostTerms, all_cost_terms, uncached_tokens
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

        Cost: about 3 us plus 1 us per candidate.
        """
        terms = self.terms(request, candidates)
        scores = tuple([term.total_s for term in terms])
        names = [candidate.worker_id for candidate in candidates]
        ranked = [index for _, _, index in sorted(zip(scores, names, range(len(scores)), strict=True))]
        best = scores[ranked[0]]
        limit = best + max(self._settings.tie_floor_s, self._settings.tie_share * best)
        equals = [index for index in ranked if scores[index] <= limit]
        if len(equals) > 1:
            held = [candidates[index].requests_held for index in equals]
            turns = self._turns.keys([names[index] for index in equals])
            equals = [index for *_, index in sorted(zip(held, turns, range(len(equals)), equals, strict=True))]
        order = (*equals, *ranked[len(equals) :])
        chosen = candidates[order[0]]
        self._turns.chosen(chosen.worker_id)
        self._recent.add(chosen.worker_id, uncached_tokens(request.prompt_tokens, chosen), len(candidates))
        return Ranking(order, scores, "s", terms)

    def terms(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> tuple[CostTerms, ...]:
        """The cost of each candidate now, without choosing."""
        settings = self._settings
        weight = settings.balance_weight
        surpluses = [weight * surplus for surplus in self._recent.surpluses(candidates)]
        return all_cost_terms(
            request.prompt_tokens,
            candidates,
            surpluses,
            decode_share=settings.decode_share,
            crowding=settings.crowding,
        )
