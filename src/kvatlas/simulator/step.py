"""The values a step is made of: what was scheduled, and what came of it."""

from dataclasses import dataclass

from kvatlas.events import Event
from kvatlas.prefix_cache import PrefixCacheStats
from kvatlas.prefix_cache.connector import NO_TRANSFERS, ConnectorStats, StepTransfers
from kvatlas.simulator.request import EngineRequest
from kvatlas.simulator.sampling import FinishReason

__all__ = ["CacheStats", "RequestOutput", "ScheduledRequest", "StepDraft", "StepPlan", "StepResult"]


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step.

    Args:
        request: whose.
        start_tokens: position of the first token computed.
        num_tokens: tokens computed, drafts included.
        samples: the step reaches the end of what is known, so that the model says the next token; a chunk of a longer
            prefill says nothing.
        num_drafts: of the tokens computed, the last so many are drafts: as many more tokens at most come out.
        drafts_are_padding: the drafts only make the step's shape uniform; none will be accepted.
    """

    request: EngineRequest
    start_tokens: int
    num_tokens: int
    samples: bool
    num_drafts: int = 0
    drafts_are_padding: bool = False

    @property
    def is_decode(self) -> bool:
        """Whether only the last output token (and drafts after it) is computed."""
        starts_in_output = self.start_tokens >= self.request.request.num_prompt_tokens
        return starts_in_output and self.num_tokens == 1 + self.num_drafts


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes.

    Args:
        scheduled: shares, running requests first, then those that joined.
        admitted: requests that joined for the first time.
        resumed: requests that joined again after a preemption.
        preempted: requests that gave up their blocks.
        number: counts steps, 1 the first.
        transfers: what the connector moves with the step.
    """

    scheduled: tuple[ScheduledRequest, ...]
    admitted: tuple[EngineRequest, ...]
    preempted: tuple[EngineRequest, ...]
    resumed: tuple[EngineRequest, ...] = ()
    number: int = 0
    transfers: StepTransfers = NO_TRANSFERS

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


class StepDraft:
    """A step while it is planned: shares in order, and what is left of the token budget."""

    __slots__ = ("admitted", "budget", "preempted", "resumed", "shares")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.shares: dict[EngineRequest, ScheduledRequest] = {}
        self.admitted: list[EngineRequest] = []
        self.resumed: list[EngineRequest] = []
        self.preempted: list[EngineRequest] = []

    def add(
        self, request: EngineRequest, num_tokens: int, num_drafts: int = 0, *, drafts_are_padding: bool = False
    ) -> None:
        """Give a request `num_tokens` of the budget."""
        inner = request.request
        start = inner.num_computed_tokens
        self.shares[request] = ScheduledRequest(
            request=request,
            start_tokens=start,
            num_tokens=num_tokens,
            samples=start + num_tokens >= inner.num_tokens + request.num_placeholders,
            num_drafts=num_drafts,
            drafts_are_padding=drafts_are_padding,
        )
        self.budget -= num_tokens

    def take_back(self, request: EngineRequest) -> None:
        """Undo `add`: the request was preempted after it had got its share."""
        share = self.shares.pop(request, None)
        if share is not None:
            self.budget += share.num_tokens


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


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What was counted in one step: local lookups, those outside the device, and preemptions."""

    local: PrefixCacheStats
    external: ConnectorStats
    preemptions: int
