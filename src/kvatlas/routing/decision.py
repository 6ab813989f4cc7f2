"""What was decided and why, kept for a while so that `explain` can tell. Never prompt text, never token ids.

Few decisions are ever looked at, so what is kept is what the policy saw and answered; the record with its sentence is
made from it on demand.
"""

from collections import OrderedDict

import msgspec

from kvatlas.routing.candidate import Candidate
from kvatlas.routing.cost import CostInputs, CostTerms
from kvatlas.routing.reason import reason_of, reason_without_index

__all__ = ["CandidateScore", "Decision", "DecisionLog", "DecisionRecord"]


class CandidateScore(msgspec.Struct, frozen=True):
    """One candidate as it was seen, and the score it got. The fields are those of `Candidate`."""

    worker_id: str
    hit_tokens: int
    confidence: float
    trust: str
    queued_prefill_tokens: int
    running_requests: int
    waiting_requests: int
    kv_usage: float
    score: float
    terms: CostTerms | None = None


class DecisionRecord(msgspec.Struct, frozen=True):
    """One decision, in a form that msgspec turns into JSON.

    Attributes:
        wall_s: when, seconds since the Unix epoch.
        candidates: those that explain the pick: in a large fleet the best ones and the longest match.
        order: worker ids, best first; `chosen` is the first.
        predicted_tokens: hit tokens expected on the chosen worker; None where its stream is not wholly known, or
            the request's tokens are not.
        reason: one sentence for a person.
        served_by: the worker that answered, once known; differs from `chosen` after a failover.
        actual_tokens: cached tokens the engine reported, once known.
    """

    request_id: str
    wall_s: float
    policy: str
    prompt_tokens: int
    num_candidates: int
    candidates: tuple[CandidateScore, ...]
    score_unit: str
    chosen: str
    order: tuple[str, ...]
    predicted_tokens: int | None
    reason: str
    served_by: str | None = None
    actual_tokens: int | None = None


class Decision(msgspec.Struct, gc=False):
    """One decision as it is kept. `record` makes of it what is shown; fields of the same name mean the same.

    Attributes:
        candidates: those that explain the pick, in the order they were given.
        scores: theirs.
        costs: what those are made of; None for policies without a cost.
        best: which of `candidates` was chosen.
        without_index: why hits were not known; None when they were.
    """

    request_id: str
    wall_s: float
    policy: str
    prompt_tokens: int
    num_candidates: int
    candidates: tuple[Candidate, ...]
    scores: tuple[float, ...]
    score_unit: str
    costs: CostInputs | None
    best: int
    order: tuple[str, ...]
    without_index: str | None = None
    served_by: str | None = None
    actual_tokens: int | None = None

    @property
    def chosen(self) -> str:
        """The first of `order`."""
        return self.order[0]

    @property
    def predicted_tokens(self) -> int | None:
        """What the chosen worker promises."""
        return self.candidates[self.best].promised_tokens

    def record(self) -> DecisionRecord:
        """The decision as it is shown. Cost: about 20 us and 1 us per candidate."""
        chosen = self.candidates[self.best]
        terms = (None,) * len(self.candidates) if self.costs is None else self.costs.terms(self.candidates)
        return DecisionRecord(
            request_id=self.request_id,
            wall_s=self.wall_s,
            policy=self.policy,
            prompt_tokens=self.prompt_tokens,
            num_candidates=self.num_candidates,
            candidates=tuple(map(_scored, self.candidates, self.scores, terms)),
            score_unit=self.score_unit,
            chosen=chosen.worker_id,
            order=self.order,
            predicted_tokens=chosen.promised_tokens,
            reason=self._reason() if self.without_index is None else reason_without_index(self.without_index, chosen),
            served_by=self.served_by,
            actual_tokens=self.actual_tokens,
        )

    def _reason(self) -> str:
        return reason_of(
            self.prompt_tokens,
            self.candidates,
            self.scores,
            self.score_unit,
            self.best,
            alone=self.num_candidates == 1,
        )


def _scored(candidate: Candidate, score: float, terms: CostTerms | None) -> CandidateScore:
    return CandidateScore(
        worker_id=candidate.worker_id,
        hit_tokens=candidate.hit_tokens,
        confidence=candidate.confidence,
        trust=candidate.trust,
        queued_prefill_tokens=candidate.queued_prefill_tokens,
        running_requests=candidate.running_requests,
        waiting_requests=candidate.waiting_requests,
        kv_usage=candidate.kv_usage,
        score=score,
        terms=terms,
    )


class DecisionLog:
    """The last decisions by request id; the oldest go when it is full.

    Args:
        capacity: decisions kept; 0 keeps none.
    """

    __slots__ = ("_capacity", "_decisions")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._decisions: OrderedDict[str, Decision] = OrderedDict()

    def __len__(self) -> int:
        return len(self._decisions)

    def add(self, decision: Decision) -> None:
        """Keep a decision. A request id that comes again replaces what was kept under it."""
        decisions = self._decisions
        if decision.request_id in decisions:
            del decisions[decision.request_id]
        decisions[decision.request_id] = decision
        if len(decisions) > self._capacity:
            decisions.popitem(last=False)

    def get(self, request_id: str) -> DecisionRecord | None:
        """The decision of a request, or None when it is unknown or gone."""
        decision = self._decisions.get(request_id)
        return None if decision is None else decision.record()

    def recent(self, limit: int) -> list[DecisionRecord]:
        """Up to `limit` decisions, newest first."""
        newest_first = reversed(self._decisions.values())
        return [decision.record() for decision, _ in zip(newest_first, range(limit), strict=False)]

    def note_outcome(self, request_id: str, *, actual_tokens: int | None, served_by: str | None = None) -> bool:
        """Add what became of a request; returns whether its decision was still there. Cost: O(1)."""
        decision = self._decisions.get(request_id)
        if decision is None:
            return False
        decision.actual_tokens = actual_tokens
        decision.served_by = served_by or decision.served_by
        return True

    def set_outcome(
        self, request_id: str, *, actual_tokens: int | None, served_by: str | None = None
    ) -> DecisionRecord | None:
        """`note_outcome`, returning the completed record, or None when the decision is gone."""
        noted = self.note_outcome(request_id, actual_tokens=actual_tokens, served_by=served_by)
        return self.get(request_id) if noted else None
