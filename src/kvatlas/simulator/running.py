"""The first half of a step's plan: running requests get their tokens, and blocks are found for them by preemption."""

from kvatlas.simulator.limits import SchedulingPolicy
from kvatlas.simulator.request import EngineRequest
from kvatlas.simulator.scheduler_state import SchedulerState, preempt
from kvatlas.simulator.step import StepDraft

__all__ = ["RunningPass"]


class RunningPass:
    """Goes once over the running requests, in the order they were admitted. No lookups are made for them.

    When a request's next block cannot be had, another one is preempted, until the block is there or the request
    preempted itself: then the pass is over.

    Args:
        state: the scheduler's.
        draft: the step that is planned.
        long_prefill_tokens: most tokens of a prompt in this step, 0 = as many as fit.

    Source: vLLM 0.32.0 Scheduler.schedule.
    """

    __slots__ = ("_draft", "_long_prefill_tokens", "_position", "_state")

    def __init__(self, state: SchedulerState, draft: StepDraft, long_prefill_tokens: int) -> None:
        self._state = state
        self._draft = draft
        self._long_prefill_tokens = long_prefill_tokens
        self._position = 0

    def run(self) -> None:
        """Plan the running requests' shares."""
        running = self._state.running
        while self._position < len(running) and self._draft.budget > 0:
            request = running[self._position]
            num_tokens = self._num_tokens(request)
            if num_tokens > 0:
                if not self._make_room(request, num_tokens):
                    return
                self._schedule(request, num_tokens)
            self._position += 1

    def _num_tokens(self, request: EngineRequest) -> int:
        """What the request computes in this step; 0 or less = nothing, for now or because the running steps end it."""
        if request.ends_with_running_steps:
            return 0
        num_tokens = request.num_lacking
        if 0 < self._long_prefill_tokens < num_tokens:
            num_tokens = self._long_prefill_tokens
        computed = request.request.num_computed_tokens
        num_tokens = min(num_tokens, self._draft.budget, self._state.limits.max_model_len - computed - 1)
        rule = self._state.chunk_rule
        return num_tokens if rule is None else rule.next_tokens(request, computed, num_tokens)

    def _schedule(self, request: EngineRequest, num_tokens: int) -> None:
        inner = request.request
        behind_known = num_tokens + inner.num_computed_tokens - inner.num_tokens - request.num_placeholders
        num_drafts = min(request.num_drafts, max(0, behind_known))
        request.num_drafts = 0
        self._draft.add(request, num_tokens, num_drafts)

    def _make_room(self, request: EngineRequest, num_tokens: int) -> bool:
        """Allocate the request's slots, preempting as often as it takes. False = it cannot be scheduled."""
        state = self._state
        lookahead = state.limits.lookahead_tokens
        while state.cache.allocate_slots(request.request, num_tokens, lookahead_tokens=lookahead) is None:
            victim = self._victim()
            if not state.blocks_can_be_freed(victim):
                return False  # its blocks would come free too late to help
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _victim(self) -> EngineRequest:
        """The last admitted, or the one with the largest priority value that came last."""
        running = self._state.running
        if self._state.limits.policy is SchedulingPolicy.PRIORITY:
            return max(running, key=lambda request: (request.request.priority, request.request.arrival_s))
        return running[-1]

    def _preempt(self, victim: EngineRequest) -> None:
        running = self._state.running
        index = running.index(victim)
        del running[index]
        if index < self._position:  # it had its turn in this step already
            self._position -= 1
            self._draft.take_back(victim)
        preempt(self._state, victim)
        self._draft.preempted.append(victim)
