"""What a run of requests amounted to."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.replay.drive import TurnResult

__all__ = ["RunSummary", "percentile", "summarise"]

_MOST_ERRORS = 3


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One policy's run.

    Attributes:
        hit_rate: cached prompt tokens over prompt tokens, both as engines report them, 0..1.
        max_over_mean_work: the busiest worker's computed prompt tokens over the mean of all workers.
        requests: answered requests.
        failed: requests without a complete answer.
        predicted: requests that came with a prediction and with the engine's own count.
        predicted_equal: of those, predicted exactly.
        predicted_over: predicted more than the engine had.
        predicted_under: predicted less.
        errors: what the first few failed requests said, without repetition.
    """

    hit_rate: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    max_over_mean_work: float
    requests: int
    failed: int
    predicted: int
    predicted_equal: int
    predicted_over: int = 0
    predicted_under: int = 0
    errors: tuple[str, ...] = ()


def summarise(results: Sequence[TurnResult], worker_count: int) -> RunSummary:
    """Sum up a run over `worker_count` workers; idle ones count in the mean."""
    answered = [result for result in results if result.error is None]
    prompt_tokens = sum(result.prompt_tokens for result in answered)
    cached_tokens = sum(result.cached_tokens or 0 for result in answered)
    work: dict[str, int] = {}
    for result in answered:
        work[result.worker] = work.get(result.worker, 0) + result.prompt_tokens - (result.cached_tokens or 0)
    mean_work = sum(work.values()) / worker_count
    surplus = [
        r.predicted_tokens - r.cached_tokens
        for r in answered
        if r.predicted_tokens is not None and r.cached_tokens is not None
    ]
    errors = dict.fromkeys(result.error for result in results if result.error is not None)
    ttft_ms = [1000 * result.ttft_s for result in answered]
    return RunSummary(
        hit_rate=cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        ttft_p50_ms=percentile(ttft_ms, 50),
        ttft_p90_ms=percentile(ttft_ms, 90),
        max_over_mean_work=max(work.values()) / mean_work if mean_work else 0.0,
        requests=len(answered),
        failed=len(results) - len(answered),
        predicted=len(surplus),
        predicted_equal=sum(tokens == 0 for tokens in surplus),
        predicted_over=sum(tokens > 0 for tokens in surplus),
        predicted_under=sum(tokens < 0 for tokens in surplus),
        errors=tuple(errors)[:_MOST_ERRORS],
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = max(1, math.ceil(percent / 100 * len(ordered)))
    return ordered[rank - 1]
