"""What happens when a step's tokens are known: requests grow or end, drafts are settled, late blocks become findable.

With asynchronous scheduling the next step was planned before these tokens came. For each of them it counted a
placeholder as computed, so `num_computed_tokens - num_placeholders` is what is truly known and computed, and blocks
are made findable up to there and no further. A request preempted meanwhile still gets the output of the steps that
were running ("stale" output), unless it was marked to be dropped.

Source: vLLM 0.32.0 Scheduler.update_from_output and AsyncScheduler.
"""

from collections.abc import Collection, Sequence

from kvatlas.prefix_cache import RequestStatus
from kvatlas.simulator.request import EngineRequest
from kvatlas.simulator.sampling import FinishReason
from kvatlas.simulator.scheduler_state import SchedulerState, end_request
from kvatlas.simulator.step import RequestOutput, ScheduledRequest, StepPlan

__all__ = ["advance", "take_outputs"]


def advance(state: SchedulerState, shares: Collection[ScheduledRequest]) -> None:
    """A step is planned: count its tokens as computed, and with asynchronous scheduling its outputs as expected."""
    limits = state.limits
    for share in shares:
        request = share.request
        inner = request.request
        inner.num_computed_tokens += share.num_tokens
        inner.num_in_flight_tokens += share.num_tokens
        request.last_step = state.step
        request.is_prefilling = not share.samples
        if share.samples:
            state.prefilling.discard(request)
            if limits.async_scheduling:
                request.num_placeholders += 1 + share.num_drafts
                request.num_drafts = limits.num_speculative_tokens


def take_outputs(
    state: SchedulerState,
    plan: StepPlan,
    sampled: Sequence[Sequence[int]],
    void: Collection[EngineRequest] = (),
) -> list[RequestOutput]:
    """Take the model's tokens for a plan: for each share its new tokens, accepted drafts first.

    Args:
        state: the scheduler's.
        plan: the oldest plan whose output was not taken.
        sampled: aligned with the plan's shares; empty where the share does not sample.
        void: requests whose output of this step is worth nothing.

    Returns:
        Outputs in the order of the plan. Requests that ended have left their queues.
    """
    outputs = []
    ended = False
    for share, token_ids in zip(plan.scheduled, sampled, strict=True):
        request = share.request
        inner = request.request
        inner.num_in_flight_tokens -= share.num_tokens
        is_stale = request.num_stale_tokens > 0
        if is_stale:
            request.num_stale_tokens -= share.num_tokens
        if request.finish_reason is not None or request in void or (is_stale and request.drop_stale):
            continue
        if token_ids and share.samples:
            output = _take_output(state, share, token_ids, is_stale=is_stale)
            outputs.append(output)
            ended = ended or output.finish_reason is not None
    if ended:
        state.running = [request for request in state.running if request.finish_reason is None]
    return outputs


def _take_output(
    state: SchedulerState, share: ScheduledRequest, token_ids: Sequence[int], *, is_stale: bool
) -> RequestOutput:
    request = share.request
    inner = request.request
    limits = state.limits
    if share.num_drafts and not is_stale:
        _give_back_rejected(request, share.num_drafts - (len(token_ids) - 1))
    taken, reason = _append(state, request, token_ids)
    if limits.async_scheduling:
        if not is_stale:
            request.num_placeholders -= len(taken)
        if inner.status is RequestStatus.RUNNING:
            state.cache.cache_blocks(inner, inner.num_computed_tokens - request.num_placeholders)
    if inner.num_output_tokens == len(taken):
        in_cache = min(state.cache.estimate_cached_tokens(inner), inner.num_prompt_tokens)
        request.created_tokens = max(0, in_cache - (request.cached_tokens or 0))
    if reason is not None:
        if inner.status is not RequestStatus.RUNNING:
            state.room.remove(request)
        end_request(state, request, reason)
    elif not limits.async_scheduling and not request.is_prefilling:
        request.num_drafts = limits.num_speculative_tokens  # the draft model has seen the tokens and proposes more
    return RequestOutput(request, taken, reason)


def _give_back_rejected(request: EngineRequest, num_rejected: int) -> None:
    """Rejected drafts were not computed after all: their slots are used again."""
    inner = request.request
    if inner.num_computed_tokens > 0:
        inner.num_computed_tokens -= num_rejected
    if request.num_placeholders > 0:
        request.num_placeholders -= num_rejected


def _append(
    state: SchedulerState, request: EngineRequest, token_ids: Sequence[int]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Append tokens up to the one that ends the request; later ones are thrown away."""
    for count, token_id in enumerate(token_ids, 1):
        request.request.append_output(token_id)
        reason = _finish_reason(state, request, token_id)
        if reason is not None:
            return tuple(token_ids[:count]), reason
    return tuple(token_ids), None


def _finish_reason(state: SchedulerState, request: EngineRequest, token_id: int) -> FinishReason | None:
    params = request.params
    num_output = request.request.num_output_tokens
    if num_output >= params.min_tokens and token_id == state.limits.eos_token_id and not params.ignore_eos:
        return FinishReason.STOP
    if num_output >= params.max_tokens or request.request.num_tokens >= state.limits.max_model_len:
        return FinishReason.LENGTH
    return None
