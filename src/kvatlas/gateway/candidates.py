"""A worker as routing sees it for one prompt: what it holds, what of that counts, what it promises."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvatlas.fleet import Trust, Worker
from kvatlas.index import IdlePart, PrefixIndex, WorkerMatch
from kvatlas.rendering import RenderedPrompt
from kvatlas.routing import Candidate

__all__ = ["HitUse", "Promises", "UncachedTokens", "candidates_of"]

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
        promised: worker id -> cached tokens it will report; None: each match of a worker whose stream and blocks are
            wholly known is a promise.
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
        candidate = _standing_of(self._candidates, worker_id)
        return default if candidate is None else max(1, self._prompt_tokens - round(candidate.believed_tokens))


class Promises:
    """Cached tokens that each candidate will report, where that can be said; read off the candidates."""

    __slots__ = ("_candidates",)

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = candidates

    def get(self, worker_id: str, /) -> int | None:
        """Those of one worker; None where it promises nothing. Cost: O(candidates)."""
        candidate = _standing_of(self._candidates, worker_id)
        return None if candidate is None else candidate.promised_tokens


def _standing_of(candidates: Sequence[Candidate], worker_id: str) -> Candidate | None:
    for candidate in candidates:
        if candidate.worker_id == worker_id:
            return candidate
    return None
