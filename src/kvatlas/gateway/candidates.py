"""A worker as routing sees it for one prompt: what it holds, what of that counts, what it promises."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvatlas.fleet import Trust, Worker
from kvatlas.index import IdlePart, PrefixIndex, WorkerMatch
from kvatlas.rendering import RenderedPrompt
from kvatlas.routing import Candidate

__all__ = ["HitUse", "Promises", "UncachedTokens", "candidate_of", "candidates_of", "promises_of", "uncached_tokens_of"]

_SYNCED = Trust.SYNCED
_TRUST_NAMES = {level: level.value for level in Trust}
_CREDITED = frozenset(level for level in Trust if level.is_credited)


@dataclass(frozen=True, slots=True)
class HitUse:
    """Where to ask how long the blocks of one prompt went without use."""

    index: PrefixIndex
    prompt: RenderedPrompt

    def idle_parts(
        self, workers: Sequence[Worker], found: Mapping[str, WorkerMatch], queued: Sequence[int]
    ) -> dict[str, tuple[IdlePart, ...]]:
        """Parts of the hits that have to wait behind a queue, by worker id. Cost: 0.3 us per worker without any."""
        waiting = {}
        for worker, queued_tokens in zip(workers, queued, strict=True):
            match = found.get(worker.worker_id)
            recency = worker.recency
            if recency is not None and match is not None and match.hit_blocks and recency.wants_parts(queued_tokens):
                waiting[worker.worker_id] = match.hit_blocks
        prompt = self.prompt
        return self.index.uses.idle_parts(prompt.token_ids, waiting, extras=prompt.extras) if waiting else {}


def candidates_of(
    workers: Sequence[Worker],
    found: Mapping[str, WorkerMatch],
    *,
    promised: Mapping[str, int] | None = None,
    use: HitUse | None = None,
) -> list[Candidate]:
    """The workers' standings now, for a prompt of which so much was found on each; in their order.

    Args:
        found: worker id -> match; a worker without one holds nothing.
        promised: worker id -> cached tokens it will report; None: as `promises_of` says.
        use: tells how long hits went without use; None where nobody can.

    Cost: about 1.3 us per worker.
    """
    candidates = []
    queued = [worker.load.queued_prefill_tokens for worker in workers]
    parts = use.idle_parts(workers, found, queued) if use is not None and any(queued) else {}
    for worker, queued_tokens in zip(workers, queued, strict=True):
        worker_id = worker.worker_id
        load = worker.load
        level = worker.trust.level
        match = found.get(worker_id)
        promise = None
        claimed = 0
        if match is not None:
            claimed = match.hit_tokens + match.doubted_tokens
            if level is _SYNCED and match.exact:
                promise = match.hit_tokens
        if claimed and match is not None:
            credit: float = claimed
            if level is not _SYNCED or match.doubted_tokens:  # of a synced worker, what is beyond doubt counts in full
                credit = level.credit(match.hit_tokens, match.doubted_tokens)
            if queued_tokens and credit and worker.recency is not None:
                # What is ahead may push part of the hit out.
                credit *= worker.recency.surviving_share(queued_tokens, parts.get(worker_id, ()))
            confidence = credit / claimed
        else:
            confidence = 1.0 if level in _CREDITED else 0.0
        candidates.append(
            Candidate(
                worker_id,
                claimed,
                confidence,
                queued_tokens,
                load.in_flight + worker.foreign_running,
                worker.foreign_waiting,
                worker.gauges.kv_usage,
                load.prefill_tokens_per_s,
                load.decode_step_s,
                _TRUST_NAMES[level],
                promise if promised is None else promised.get(worker_id),
            )
        )
    return candidates


def candidate_of(worker: Worker, hit_tokens: int, doubted_tokens: int, promised_tokens: int | None) -> Candidate:
    """The same for one worker, with so many tokens of the prompt held beyond doubt and in doubt."""
    worker_id = worker.worker_id
    match = WorkerMatch(hit_tokens, 0, 1, doubted_tokens=doubted_tokens)
    promised = {} if promised_tokens is None else {worker_id: promised_tokens}
    return candidates_of((worker,), {worker_id: match}, promised=promised)[0]


def promises_of(workers: Iterable[Worker], found: Mapping[str, WorkerMatch]) -> dict[str, int]:
    """Cached tokens each worker will report, of those whose stream and blocks are wholly known."""
    promised = {}
    for worker in workers:
        match = found.get(worker.worker_id)
        if match is not None and match.exact and worker.trust.level is _SYNCED:
            promised[worker.worker_id] = match.hit_tokens
    return promised


class UncachedTokens:
    """Prompt tokens that each candidate would have to compute, reckoned when asked for: of many, one is sent to.

    Give that one first.
    """

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


class Promises:
    """Cached tokens that each candidate will report, where that can be said; read off the candidates."""

    __slots__ = ("_candidates",)

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = candidates

    def get(self, worker_id: str, /) -> int | None:
        """Those of one worker; None where it promises nothing. Cost: O(candidates)."""
        for candidate in self._candidates:
            if candidate.worker_id == worker_id:
                return candidate.promised_tokens
        return None
