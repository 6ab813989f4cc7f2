"""A worker as routing sees it for one prompt: what it holds, what of that counts, what it promises."""

from collections.abc import Iterable, Mapping, Sequence

from kvatlas.fleet import Trust, Worker
from kvatlas.index import IdlePart, PrefixIndex, WorkerMatch
from kvatlas.rendering import RenderedPrompt
from kvatlas.routing import Candidate

__all__ = ["UncachedTokens", "candidate_of", "idle_parts_of", "promises_of", "uncached_tokens_of"]


_SYNCED = Trust.SYNCED
_TRUST_NAMES = {level: level.value for level in Trust}
_CREDITED = frozenset(level for level in Trust if level.is_credited)


def candidate_of(
    worker: Worker,
    hit_tokens: int,
    doubted_tokens: int,
    promised_tokens: int | None,
    parts: Sequence[IdlePart] = (),
) -> Candidate:
    """A worker's standing now.

    Args:
        worker: which.
        hit_tokens, doubted_tokens: tokens of the prompt that it holds beyond doubt, and in doubt.
        promised_tokens: cached tokens it will report; None where that cannot be said.
        parts: how long the hit went without use, from `idle_parts_of`.

    Cost: about 1.5 us.
    """
    load = worker.load
    level = worker.trust.level
    queued_tokens = load.queued_prefill_tokens
    claimed = hit_tokens + doubted_tokens
    if claimed:
        credit: float = claimed
        if doubted_tokens or level is not _SYNCED:  # of a synced worker, what is beyond doubt counts in full
            credit = level.credit(hit_tokens, doubted_tokens)
        if credit and queued_tokens and worker.recency is not None:
            credit *= worker.recency.surviving_share(queued_tokens, parts)  # what is ahead may push part of the hit out
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


def idle_parts_of(
    index: PrefixIndex, prompt: RenderedPrompt, workers: Iterable[Worker], found: Mapping[str, WorkerMatch]
) -> dict[str, tuple[IdlePart, ...]]:
    """How long hits that have to wait behind a queue went without use: worker id -> parts. Cost: 1 us without any."""
    waiting = {
        worker.worker_id: found[worker.worker_id].hit_blocks
        for worker in workers
        if worker.recency is not None
        and worker.worker_id in found
        and found[worker.worker_id].hit_blocks
        and worker.recency.wants_parts(worker.load.queued_prefill_tokens)
    }
    return index.uses.idle_parts(prompt.token_ids, waiting, extras=prompt.extras) if waiting else {}


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
