"""What a client may ask of one request, and how a request can end."""

import enum
from dataclasses import dataclass

from kvatlas.prefix_cache import ReportMode

__all__ = ["FinishReason", "SamplingParams"]


class FinishReason(enum.Enum):
    """Why a request ended; the values are the words vLLM uses on the wire and in its metrics."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Limits on one request's output, and how the engine treats it.

    Args:
        max_tokens: most output tokens (>= 1).
        min_tokens: no end of text before as many output tokens.
        ignore_eos: run to `max_tokens`.
        seed: another seed, another reply to the same prompt; None = the engine's.
        choice: which of the `n` replies to one prompt this is.
        priority: lower is admitted earlier and preempted later, under the priority policy.
        skip_reading_prefix_cache: compute the whole prompt (prompt logprobs need that); it is cached for others.
        kv_cache_report_mode: what a lookup that hits publishes.
        session_id: passed on in events.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    choice: int = 0
    priority: int = 0
    skip_reading_prefix_cache: bool = False
    kv_cache_report_mode: ReportMode = ReportMode.INCREMENTAL
    session_id: str | None = None
