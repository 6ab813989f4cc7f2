"""The two values a step is made of: what was scheduled, and what came of it."""

from dataclasses import dataclass

from kvatlas.events import Event
from kvatlas.simulator.request import EngineRequest
from kvatlas.simulator.sampling import FinishReason

__all__ = ["RequestOutput", "ScheduledRequest", "StepPlan", "StepResult"]


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: `num_tokens` tokens computed from position `start_tokens` on.

    `samples` is True when the step reaches the end of what is known, so that the model says the next token; a chunk
    of a longer prefill says nothing. `is_decode` is True when the one token computed is the last output token.
    """

    request: EngineRequest
    start_tokens: int
    num_tokens: int
    samples: bool
    is_decode: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes, running requests first, then the admitted ones."""

    scheduled: tuple[ScheduledRequest, ...]
    admitted: tuple[EngineRequest, ...]
    preempted: tuple[EngineRequest, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed, never more than the step's budget."""
        return sum(share.num_tokens for share in self.scheduled)

    @property
    def prefill_tokens(self) -> int:
        """Tokens computed by requests that are not decoding, resumed ones included."""
        return sum(share.num_tokens for share in self.scheduled if not share.is_decode)

    @property
    def decode_requests(self) -> int:
        """Requests that are decoding."""
        return sum(share.is_decode for share in self.scheduled)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step gave one request; `finish_reason` is set on its last output."""

    request: EngineRequest
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None

    @property
    def request_id(self) -> str:
        """Whose output it is."""
        return self.request.request_id


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step: outputs in the order of the plan, the requests that ended, and the step's KV events."""

    outputs: tuple[RequestOutput, ...]
    finished: tuple[EngineRequest, ...]
    events: tuple[Event, ...]
