"""A worker as routing sees it for one prompt: what it holds, what of that counts, what it promises."""

from collections.abc import Iterable, Mapping, Sequence

from kvatlas.fleet import Trust, Worker
from kvatlas.index import WorkerMatch
from kvatlas.routing import Candidate

__all__ = ["UncachedTokens", "candidate_of", "promises_of", "uncached_tokens_of"]


_SYNCED = Trust.SYNCED
_TRUST_NAMES = {level: level.value for level in Trust}
_CREDITED = frozenset(level for level in Trust if level.is_credited)


def candidate_of(worker: Worker, hit_tokens: int, doubted_tokens: int, promised_tokens: int | None) -> Candidate:
    """A worker's standing now, with so many tokens of the prompt held beyond doubt and in doubt. Cost: about 1.5 us."""
    load = worker.load
    level = worker.trust.level
    queued_tokens = load.queued_prefill_tokens
    claimed = hit_tokens + doubted_tokens
    if claimed:
        credit: float = claimed
        if doubted_tokens or level is not _SYNCED:  # of a synced worker, what is beyond doubt counts in full
            credit = level.credit(hit_tokens, doubted_tokens)
        if credit and queued_tokens and worker.recency is not None:
            credit *= worker.recency.surviving_share(queued_tokens)  # what is ahead may push part of the hit out
        confidence = credit / claimed
    else:
        confidence = 1.0 if level in _CREDITED else 0.0
    return Candidate(
        worker.worker_id,
        claimed,
        confidence,
        queued_tokens,
        load.in_flight + worker.foreign_running,
        worker.foreign_waiting,
        worker.gauges.kv_usage,
        load.prefill_tokens_per_s,
        load.decode_step_s,
        _TRUST_NAMES[level],
        promised_tokens,
    )


def promises_of(workers: Iterable[Worker], found: Mapping[str, WorkerMatch]) -> dict[str, int]:
    """Cached tokens each worker will report, of those whose stream and blocks are wholly known."""
    promised = {}
    for worker in workers:
        match = found.get(worker.worker_id)
        if match is not None and match.exact and worker.trust.level is _SYNCED:
            promised[worker.worker_id] = match.hit_tokens
    return promised


class UncachedTokens:
    """Prompt tokens that each candidate would have to compute, reckoned when asked for: of many, one is sent to."""

    __slots__ = ("_candidates", "_prompt_tokens")

    def __init__(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> None:
        self._prompt_tokens = prompt_tokens
        self._candidates = candidates

    def get(self, worker_id: str, default: int) -> int:
        """Those of one worker, at least 1; the default for one that was no candidate. Cost: O(candidates)."""
        for candidate in self._candidates:
            if candidate.worker_id == worker_id:
                return max(1, self._prompt_tokens - round(candidate.believed_tokens))
        return default


def uncached_tokens_of(prompt_tokens: int, candidates: Sequence[Candidate]) -> UncachedTokens:
    """Prompt tokens that each candidate would have to compute."""
    return UncachedTokens(prompt_tokens, candidates)
