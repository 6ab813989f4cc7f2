"""Which requests compute which tokens in the next step: vLLM's scheduler, first come first served, without I/O.

A step is `schedule()`, the model's work, `update()`. All a scheduler decides follows from the calls made to it: no
clock, no randomness. The rules, in the order they are applied:

1. Running requests go first, in the order they were admitted, each with what it lacks, as far as the token budget goes.
2. When a running request's next block cannot be had, the last admitted request is preempted: its blocks are freed
   (their hashes stay cached), and it waits at the *front* of the queue. Repeated until the block is there or the
   request preempted itself.
3. Waiting requests are admitted from the front, only in a step that preempted nobody. The first that does not fit
   ends the admissions, whoever waits behind it. Its lookup is repeated in every step it waits, and counted once,
   when it is admitted.
4. A prompt longer than what is left of the budget is computed in chunks; but it is only started when all of it
   would fit.

Source: spec/vllm.md 7.4 (vLLM 0.32 `v1/core/sched/scheduler.py`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.events import Event
from kvatlas.prefix_cache import AllocationRules, ComputedBlocks, KVCacheManager, PrefixCacheStats, RequestStatus
from kvatlas.simulator.request import EngineRequest
from kvatlas.simulator.sampling import FinishReason
from kvatlas.simulator.step import RequestOutput, ScheduledRequest, StepPlan, StepResult

__all__ = ["Scheduler", "SchedulerLimits"]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What bounds a step (tokens, running requests) and a request (its tokens, the token that ends it)."""

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    max_model_len: int = 16_384
    eos_token_id: int | None = None


class Scheduler:
    """Waiting and running requests over one KV cache.

    Args:
        cache: this scheduler's alone.
        limits: bounds of a step.
    """

    def __init__(self, cache: KVCacheManager, limits: SchedulerLimits) -> None:
        self._cache = cache
        self._limits = limits
        self._waiting: deque[EngineRequest] = deque()
        self._running: list[EngineRequest] = []
        self._requests: dict[str, EngineRequest] = {}

    @property
    def num_running(self) -> int:
        """Admitted requests."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet, or preempted."""
        return len(self._waiting)

    @property
    def has_requests(self) -> bool:
        """Whether a step would have anything to consider."""
        return bool(self._requests)

    @property
    def running_ids(self) -> tuple[str, ...]:
        """Ids of the running requests, first admitted first."""
        return tuple(request.request_id for request in self._running)

    @property
    def waiting_ids(self) -> tuple[str, ...]:
        """Ids of the waiting requests, next first."""
        return tuple(request.request_id for request in self._waiting)

    def add(self, request: EngineRequest) -> None:
        """Put a request at the end of the waiting queue."""
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> EngineRequest | None:
        """Take a request out wherever it is and free its blocks. Returns it, or None when it had ended before."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._finish(request, reason)
        return request

    def schedule(self) -> StepPlan:
        """Plan the next step and allocate its blocks; full blocks are announced here, before they are computed."""
        self._cache.new_step_starts()
        budget = self._limits.max_num_batched_tokens
        scheduled, preempted = self._schedule_running(budget)
        budget -= sum(share.num_tokens for share in scheduled)
        admitted: list[EngineRequest] = []
        if not preempted:
            shares = self._admit_waiting(budget)
            admitted = [share.request for share in shares]
            scheduled.extend(shares)
        for share in scheduled:
            share.request.request.num_computed_tokens = share.start_tokens + share.num_tokens
        return StepPlan(tuple(scheduled), tuple(admitted), tuple(preempted))

    def update(self, plan: StepPlan, sampled: Sequence[int | None]) -> StepResult:
        """Take the model's tokens for a plan.

        Args:
            plan: the last plan of `schedule`.
            sampled: for each scheduled request its next token; ignored where `samples` is False.
        """
        outputs = []
        finished = []
        for share, token_id in zip(plan.scheduled, sampled, strict=True):
            request = share.request
            if token_id is None or not share.samples or request.finish_reason is not None:
                continue  # a chunk of a prefill, or aborted while the step ran
            request.request.append_output(token_id)
            reason = self._finish_reason(request, token_id)
            if reason is not None:
                self._finish(request, reason)
                finished.append(request)
            outputs.append(RequestOutput(request, (token_id,), reason))
        if finished:
            self._running = [request for request in self._running if request.finish_reason is None]
        return StepResult(tuple(outputs), tuple(finished), tuple(self.take_events()))

    def take_events(self) -> list[Event]:
        """Events of the pool since the last call, in the order things happened."""
        return self._cache.take_events()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False, and nothing changes, while any request holds blocks."""
        return self._cache.reset_prefix_cache()

    def take_stats(self) -> PrefixCacheStats:
        """Lookups and hits of admissions since the last call."""
        return self._cache.make_stats()

    @property
    def usage(self) -> float:
        """Share of the pool's blocks held by requests, 0..1; cached blocks nobody holds count as free."""
        return self._cache.usage

    def _schedule_running(self, budget: int) -> tuple[list[ScheduledRequest], list[EngineRequest]]:
        """Rules 1 and 2."""
        scheduled: list[ScheduledRequest] = []
        preempted: list[EngineRequest] = []
        position = 0
        while position < len(self._running) and budget > 0:
            request = self._running[position]
            num_tokens = min(self._lacking(request), budget)
            if not self._make_room(request, num_tokens, preempted):
                break  # it preempted itself: nobody is left behind it
            scheduled.append(_share(request, num_tokens))
            budget -= num_tokens
            position += 1
        return scheduled, preempted

    def _make_room(self, request: EngineRequest, num_tokens: int, preempted: list[EngineRequest]) -> bool:
        while self._cache.allocate_slots(request.request, num_tokens) is None:
            victim = self._running.pop()
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: EngineRequest) -> None:
        self._cache.free(request.request)
        request.request.status = RequestStatus.PREEMPTED
        request.request.num_computed_tokens = 0
        request.request.num_preemptions += 1
        self._waiting.appendleft(request)

    def _admit_waiting(self, budget: int) -> list[ScheduledRequest]:
        """Rules 3 and 4."""
        shares: list[ScheduledRequest] = []
        while self._waiting and budget > 0 and len(self._running) < self._limits.max_num_seqs:
            request = self._waiting[0]
            hit = self._cache.get_computed_blocks(request.request)
            request.request.shared_prefix_boundary = hit.shared_prefix_boundary
            num_tokens = min(request.request.num_tokens - hit.hit_tokens, budget)
            if not self._allocate_first(request, num_tokens, hit):
                break
            self._waiting.popleft()
            self._running.append(request)
            self._admit(request, hit)
            shares.append(_share(request, num_tokens))
            budget -= num_tokens
        return shares

    def _allocate_first(self, request: EngineRequest, num_tokens: int, hit: ComputedBlocks) -> bool:
        blocks = self._cache.allocate_slots(
            request.request,
            num_tokens,
            new_computed_tokens=hit.hit_tokens,
            computed_blocks=hit,
            rules=AllocationRules(full_sequence_must_fit=True, has_scheduled_requests=bool(self._running)),
        )
        return blocks is not None

    def _admit(self, request: EngineRequest, hit: ComputedBlocks) -> None:
        request.request.status = RequestStatus.RUNNING
        request.request.num_computed_tokens = hit.hit_tokens
        if request.cached_tokens is None:
            request.cached_tokens = hit.hit_tokens

    def _lacking(self, request: EngineRequest) -> int:
        """Known tokens that are not computed; a decoding request lacks its last output token."""
        return request.request.num_tokens - request.request.num_computed_tokens

    def _finish_reason(self, request: EngineRequest, token_id: int) -> FinishReason | None:
        params = request.params
        num_output = request.request.num_output_tokens
        at_end = num_output >= params.max_tokens or request.request.num_tokens >= self._limits.max_model_len
        if num_output >= params.min_tokens and token_id == self._limits.eos_token_id and not params.ignore_eos:
            return FinishReason.STOP
        return FinishReason.LENGTH if at_end else None

    def _finish(self, request: EngineRequest, reason: FinishReason) -> None:
        request.finish_reason = reason
        self._cache.free(request.request)
        del self._requests[request.request_id]


def _share(request: EngineRequest, num_tokens: int) -> ScheduledRequest:
    start = request.request.num_computed_tokens
    return ScheduledRequest(
        request=request,
        start_tokens=start,
        num_tokens=num_tokens,
        samples=start + num_tokens == request.request.num_tokens,
        is_decode=num_tokens == 1 and start >= request.request.num_prompt_tokens,
    )
