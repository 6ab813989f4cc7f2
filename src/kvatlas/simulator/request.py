"""One request inside the engine: what the prefix cache knows of it, and what the scheduler adds."""

from dataclasses import dataclass
from typing import Protocol

from kvatlas.prefix_cache import Request
from kvatlas.simulator.sampling import FinishReason, SamplingParams

__all__ = ["EngineRequest", "TokenSource"]


class TokenSource(Protocol):
    """Where a request's output tokens come from: a simulated reply, or a recording."""

    def token_id(self, index: int) -> int:
        """The output token at `index`; asked again after a preemption it must be the same."""
        ...


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request on its way through the scheduler. Times are on the engine's monotonic clock, None = not yet.

    Args:
        request: tokens, hashes and progress.
        params: when its output ends.
        source: its output tokens.
        arrival_s: when the engine took it.
        cached_tokens: prefix hit of the *first* admission, what `usage` reports.
        admitted_s, first_token_s, previous_token_s, last_token_s: milestones.
        finish_reason: set once, at the end.
    """

    request: Request
    params: SamplingParams
    source: TokenSource
    arrival_s: float = 0.0
    cached_tokens: int | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    previous_token_s: float | None = None
    last_token_s: float | None = None
    finish_reason: FinishReason | None = None

    @property
    def request_id(self) -> str:
        """The id the engine knows it by."""
        return self.request.request_id

    def mark_token(self, now_s: float) -> None:
        """Note that an output token came at `now_s`."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.previous_token_s = self.last_token_s
        self.last_token_s = now_s
