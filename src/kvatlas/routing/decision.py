"""What was decided and why, kept for a while so that `explain` can tell. Never prompt text, never token ids."""

from collections import OrderedDict

import msgspec

from kvatlas.routing.cost import CostTerms

__all__ = ["CandidateScore", "DecisionLog", "DecisionRecord"]


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


class DecisionLog:
    """The last decisions by request id; the oldest go when it is full.

    Args:
        capacity: decisions kept; 0 keeps none.
    """

    __slots__ = ("_capacity", "_records")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._records: OrderedDict[str, DecisionRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: DecisionRecord) -> None:
        """Keep a decision. A request id that comes again replaces what was kept under it."""
        self._records.pop(record.request_id, None)
        self._records[record.request_id] = record
        while len(self._records) > self._capacity:
            self._records.popitem(last=False)

    def get(self, request_id: str) -> DecisionRecord | None:
        """The decision of a request, or None when it is unknown or gone."""
        return self._records.get(request_id)

    def recent(self, limit: int) -> list[DecisionRecord]:
        """Up to `limit` decisions, newest first."""
        newest_first = reversed(self._records.values())
        return [record for record, _ in zip(newest_first, range(limit), strict=False)]

    def set_outcome(
        self, request_id: str, *, actual_tokens: int | None, served_by: str | None = None
    ) -> DecisionRecord | None:
        """Add what became of a request; returns the completed record, or None when the decision is gone."""
        record = self._records.get(request_id)
        if record is None:
            return None
        served_by = served_by or record.served_by
        completed = msgspec.structs.replace(record, actual_tokens=actual_tokens, served_by=served_by)
        self._records[request_id] = completed
        return completed
