"""A policy's pick, kept with what it rests on."""

from collections.abc import Sequence

import msgspec

from kvatlas.clock import Clock
from kvatlas.errors import NoWorkerAvailable
from kvatlas.routing.candidate import Candidate, RoutingRequest
from kvatlas.routing.decision import Decision, DecisionLog, DecisionRecord
from kvatlas.routing.ranking import Policy, Ranking

__all__ = ["Picker"]

_MOST_CANDIDATES = 16
"""Candidates kept of a decision."""


class Picker:
    """Asks a policy and keeps the decision.

    Args:
        policy: who ranks.
        clock: for the time in the decision.
        log: where the decision goes.
    """

    __slots__ = ("_clock", "_log", "_policy")

    def __init__(self, policy: Policy, clock: Clock, log: DecisionLog) -> None:
        self._policy = policy
        self._clock = clock
        self._log = log

    @property
    def policy_name(self) -> str:
        """The policy's name."""
        return self._policy.name

    def decide(
        self, request: RoutingRequest, candidates: Sequence[Candidate], *, without_index: str | None = None
    ) -> Decision:
        """Choose among eligible workers and log what the choice rests on.

        Args:
            without_index: why the candidates' hits are not known for this request; None when they are.

        Raises:
            NoWorkerAvailable: there are no candidates.

        Cost: with the cost policy, about 6 us plus 1 us per candidate.
        """
        if not candidates:
            raise NoWorkerAvailable(
                "no worker may take this request now: all are unhealthy, draining or of other models"
            )
        ranking = self._policy.pick(request, candidates)
        order, scores, costs, best = ranking.order, ranking.scores, ranking.costs, ranking.order[0]
        kept: Sequence[Candidate] = candidates
        if len(candidates) > _MOST_CANDIDATES:
            places = _telling(candidates, ranking)
            kept = [candidates[index] for index in places]
            scores = tuple([scores[index] for index in places])
            if costs is not None:
                surpluses = tuple([costs.surpluses[index] for index in places])
                costs = msgspec.structs.replace(costs, surpluses=surpluses)
            best = places.index(best)
        decision = Decision(
            request.request_id,
            self._clock.wall_s(),
            self._policy.name,
            request.prompt_tokens,
            len(candidates),
            tuple(kept),
            scores,
            ranking.score_unit,
            costs,
            best,
            tuple([candidates[index].worker_id for index in order]),
            without_index,
        )
        self._log.add(decision)
        return decision

    def pick(
        self, request: RoutingRequest, candidates: Sequence[Candidate], *, without_index: str | None = None
    ) -> DecisionRecord:
        """`decide`, and the record of it at once.

        Raises:
            NoWorkerAvailable: there are no candidates.
        """
        return self.decide(request, candidates, without_index=without_index).record()


def _telling(candidates: Sequence[Candidate], ranking: Ranking) -> list[int]:
    """The best ones and the longest match: the rest of a large fleet explains nothing and fills the log."""
    kept = set(ranking.order[: _MOST_CANDIDATES - 1])
    kept.add(max(range(len(candidates)), key=lambda index: candidates[index].believed_tokens))
    return sorted(kept)
