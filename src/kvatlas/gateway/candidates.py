"""A worker as routing sees it for one prompt: what it holds, what of that counts, what it promises."""

from collections.abc import Iterable, Mapping, Sequence

from kvatlas.fleet import Trust, Worker
from kvatlas.index import IdlePart, PrefixIndex, WorkerMatch
from kvatlas.rendering import RenderedPrompt
from kvatlas.routing import Candidate

__all__ = ["candidate_of", "idle_parts_of", "promises_of", "uncached_tokens_of"]


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
    """
    load = worker.load
    claimed = hit_tokens + doubted_tokens
    queued_tokens = load.queued_prefill_tokens
    credit = worker.trust.level.credit(hit_tokens, doubted_tokens)
    if credit and worker.recency is not None:  # what the queue ahead stores may push part of the hit out
        credit *= worker.recency.surviving_share(queued_tokens, parts)
    return Candidate(
        worker_id=worker.worker_id,
        hit_tokens=claimed,
        confidence=credit / claimed if claimed else float(worker.trust.level.is_credited),
        queued_prefill_tokens=queued_tokens,
        running_requests=load.in_flight + worker.foreign_running,
        waiting_requests=worker.foreign_waiting,
        kv_usage=worker.gauges.kv_usage,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        decode_step_s=load.decode_step_s,
        trust=worker.trust.level.value,
        promised_tokens=promised_tokens,
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
    return {
        worker.worker_id: found[worker.worker_id].hit_tokens
        for worker in workers
        if worker.trust.level is Trust.SYNCED and worker.worker_id in found and found[worker.worker_id].exact
    }


def uncached_tokens_of(prompt_tokens: int, candidates: Iterable[Candidate]) -> dict[str, int]:
    """Prompt tokens that each candidate would have to compute."""
    return {c.worker_id: max(1, prompt_tokens - round(c.believed_tokens)) for c in candidates}
