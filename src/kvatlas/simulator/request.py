"""One request inside the engine: what the prefix cache knows of it, and what the scheduler adds."""

import enum
from dataclasses import dataclass
from typing import Protocol

from kvatlas.prefix_cache import Request
from kvatlas.simulator.sampling import FinishReason, SamplingParams

__all__ = ["Blocked", "EngineRequest", "TokenSource"]


class TokenSource(Protocol):
    """Where a request's output tokens come from: a simulated reply, or a recording."""

    def token_id(self, index: int) -> int:
        """The output token at `index`; asked again after a preemption it must be the same."""
        ...


class Blocked(enum.Enum):
    """What a waiting request waits for, other than its turn."""

    REMOTE_KV = "remote_kv"
    """An asynchronous load of KV from outside the device; ends by itself."""
    GRAMMAR = "grammar"
    """Something made outside the scheduler (a compiled grammar); `Scheduler.unblock` ends it."""


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request on its way through the scheduler. Times are on the engine's monotonic clock, None = not yet.

    Args:
        request: tokens, hashes and progress.
        params: when its output ends.
        source: its output tokens.
        arrival_s: when the engine took it.
        blocked: what it waits for beside its turn.
        cached_tokens: prefix hit of the *first* admission, local and external, what `usage` reports.
        external_tokens: the external part of it.
        created_tokens: prompt tokens it put into the cache, known with its first output.
        admitted_s, first_token_s, previous_token_s, last_token_s: milestones.
        finish_reason: set once, at the end.
        num_drafts: draft tokens its next step checks.
        num_placeholders: output tokens (drafts included) of running steps, counted as computed but not known yet.
        num_stale_tokens: tokens of running steps that were planned before it was preempted.
        drop_stale: their output is thrown away: those positions are computed again.
        is_prefilling: its last scheduled step does not reach the end of what is known.
        last_step: number of the last step it was scheduled in.
    """

    request: Request
    params: SamplingParams
    source: TokenSource
    arrival_s: float = 0.0
    blocked: Blocked | None = None
    cached_tokens: int | None = None
    external_tokens: int = 0
    created_tokens: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    previous_token_s: float | None = None
    last_token_s: float | None = None
    finish_reason: FinishReason | None = None
    num_drafts: int = 0
    num_placeholders: int = 0
    num_stale_tokens: int = 0
    drop_stale: bool = False
    is_prefilling: bool = True
    last_step: int = 0

    @property
    def request_id(self) -> str:
        """The id the engine knows it by."""
        return self.request.request_id

    @property
    def holds_blocks(self) -> bool:
        """Whether it holds blocks while it waits: a load fills them, or has filled them."""
        return self.request.num_computed_tokens > 0 or self.blocked is Blocked.REMOTE_KV

    @property
    def num_lacking(self) -> int:
        """Tokens to compute: known ones, drafts to check, and outputs of running steps. A decoding request lacks 1."""
        request = self.request
        return request.num_tokens + self.num_drafts + self.num_placeholders - request.num_computed_tokens

    @property
    def ends_with_running_steps(self) -> bool:
        """Whether the steps that run already bring its last token, even if all their drafts are rejected."""
        if self.num_placeholders == 0:
            return False
        request = self.request
        most = request.num_prompt_tokens + self.params.max_tokens
        return request.num_computed_tokens + 2 - self.num_placeholders >= most

    def discard_running_output(self) -> None:
        """Whatever running steps bring for this request is thrown away."""
        self.num_stale_tokens = self.request.num_in_flight_tokens
        self.num_placeholders = 0
        self.num_drafts = 0
        self.drop_stale = True

    def mark_token(self, now_s: float) -> None:
        """Note that an output token came at `now_s`."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.previous_token_s = self.last_token_s
        self.last_token_s = now_s
