"""A worker as routing sees it for one prompt: what it holds, what of that counts, what it promises."""

from collections.abc import Iterable, Mapping

from kvatlas.fleet import Trust, Worker
from kvatlas.index import WorkerMatch
from kvatlas.routing import Candidate

__all__ = ["candidate_of", "promises_of", "uncached_tokens_of"]


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


def uncached_tokens_of(prompt_tokens: int, candidates: Iterable[Candidate]) -> dict[str, int]:
    """Prompt tokens that each candidate would have to compute."""
    return {c.worker_id: max(1, prompt_tokens - round(c.believed_tokens)) for c in candidates}
