"""What a client may ask of the output of one request, and how a request can end."""

import enum
from dataclasses import dataclass

__all__ = ["FinishReason", "SamplingParams"]


class FinishReason(enum.Enum):
    """Why a request ended; the values are the words vLLM uses on the wire and in its metrics."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Limits on one request's output.

    Args:
        max_tokens: most output tokens (>= 1).
        min_tokens: no end of text before as many output tokens.
        ignore_eos: run to `max_tokens`.
        seed: another seed, another reply to the same prompt; None = the engine's.
        choice: which of the `n` replies to one prompt this is.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    choice: int = 0
