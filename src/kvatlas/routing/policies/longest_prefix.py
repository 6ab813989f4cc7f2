"""The worker with the longest cached prefix. For comparison: on real traffic it sends everything to one worker."""

from collections.abc import Sequence

from kvatlas.routing.candidate import Candidate, RoutingRequest
from kvatlas.routing.memory import TurnOrder
from kvatlas.routing.ranking import PolicySettings, Ranking

__all__ = ["LongestPrefixPolicy"]


class LongestPrefixPolicy:
    """Most believed hit tokens, then fewest requests, then fewest queued prompt tokens, then by turn."""

    name = "longest_prefix"

    __slots__ = ("_turns",)

    def __init__(self, *, seed: int = 0, settings: PolicySettings | None = None) -> None:
        self._turns = TurnOrder(seed)

    def pick(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Ranking:
        """Rank by hit; scores are believed hit tokens (more is better)."""
        scores = tuple(candidate.believed_tokens for candidate in candidates)

        def preference(index: int) -> tuple[float, int, int, tuple[int, int]]:
            candidate = candidates[index]
            turn = self._turns.key(candidate.worker_id)
            return -scores[index], candidate.requests_held, candidate.queued_prefill_tokens, turn

        order = tuple(sorted(range(len(candidates)), key=preference))
        self._turns.chosen(candidates[order[0]].worker_id)
        return Ranking(order, scores, "tokens")
