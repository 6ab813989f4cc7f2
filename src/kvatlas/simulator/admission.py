"""The second half of a step's plan: waiting requests join, each after a lookup of what is cached for it.

The rules: who holds blocks goes first; then the head of the queue; who is blocked, or would be one LoRA adapter too
many, is stepped over and keeps its place; the first that cannot be given its blocks ends the admissions, whoever
waits behind it. A lookup is repeated in every step a request waits, and counted once, when it is admitted.

Source: vLLM 0.32.0 Scheduler.schedule.
"""

import enum
from dataclasses import dataclass

from kvatlas.prefix_cache import AllocationRules, RequestStatus
from kvatlas.simulator.external_kv import Lookup, look_up, record_external, remaining_blocks, take_up_load
from kvatlas.simulator.queues import WaitingQueue
from kvatlas.simulator.request import Blocked, EngineRequest
from kvatlas.simulator.scheduler_state import PauseState, SchedulerState
from kvatlas.simulator.step import StepDraft

__all__ = ["AdmissionPass"]


class _Turn(enum.Enum):
    """How the turn of the request at the head ended."""

    ADMITTED = enum.auto()
    SKIPPED = enum.auto()
    STOP = enum.auto()


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What a request would compute in this step."""

    num_tokens: int
    num_drafts: int = 0


class AdmissionPass:
    """Admits waiting requests into the step that is planned.

    Args:
        state: the scheduler's.
        draft: the step, running requests already in it.
        long_prefill_tokens: most tokens of a prompt in this step, 0 = as many as fit.
    """

    __slots__ = ("_draft", "_joins_others", "_long_prefill_tokens", "_loras", "_runs_prefill", "_skipped", "_state")

    def __init__(self, state: SchedulerState, draft: StepDraft, long_prefill_tokens: int) -> None:
        self._state = state
        self._draft = draft
        self._long_prefill_tokens = long_prefill_tokens
        self._skipped: list[EngineRequest] = []
        self._loras = {name for request in draft.shares if (name := request.request.lora_name) is not None}
        self._joins_others = bool(draft.shares)
        self._runs_prefill = any(request.is_prefilling for request in draft.shares)

    def run(self) -> None:
        """Admit until the budget, the seats or the blocks are gone."""
        state = self._state
        while self._draft.budget > 0 and len(state.running) < state.limits.max_num_seqs:
            queue = self._queue()
            if not queue:
                break
            if self._take_turn(queue) is _Turn.STOP:
                break
        state.room.put_back(self._skipped)

    def _queue(self) -> WaitingQueue:
        room = self._state.room
        return room.holding if room.holding or self._state.pause is not PauseState.RUNNING else room.queued

    def _take_turn(self, queue: WaitingQueue) -> _Turn:
        request = queue.head()
        turn = self._admit(request)
        if turn is not _Turn.STOP:
            queue.pop()
            if turn is _Turn.SKIPPED:
                self._state.room.deferred.add(request)
                self._skipped.append(request)
        return turn

    def _admit(self, request: EngineRequest) -> _Turn:
        if not self._is_ready(request) or self._is_lora_too_many(request):
            return _Turn.SKIPPED
        lookup = look_up(self._state, request)
        if lookup is None:
            return _Turn.SKIPPED
        chunk = _Chunk(0) if lookup.is_async else self._chunk(request, lookup)
        if chunk is None or not self._allocate(request, lookup, chunk):
            return _Turn.STOP
        if lookup.was_made:
            record_external(self._state, request, lookup)
        request.request.num_computed_tokens = lookup.num_computed
        if lookup.is_async:
            request.blocked = Blocked.REMOTE_KV
            self._state.prefilling.add(request)
            return _Turn.SKIPPED
        self._join(request, lookup, chunk)
        return _Turn.ADMITTED

    def _is_ready(self, request: EngineRequest) -> bool:
        if request.blocked is Blocked.REMOTE_KV:
            if request.request_id not in self._state.received:
                return False
            take_up_load(self._state, request)
        if request.blocked is not None:
            return False
        # Resumed now, it would compute positions that running steps still have output for.
        return request.num_stale_tokens == 0 or request.drop_stale

    def _is_lora_too_many(self, request: EngineRequest) -> bool:
        name = request.request.lora_name
        most = self._state.limits.max_loras
        return most is not None and name is not None and name not in self._loras and len(self._loras) >= most

    def _chunk(self, request: EngineRequest, lookup: Lookup) -> _Chunk | None:
        """What to compute now; None ends the admissions: the request has to wait for a larger share of a step."""
        limits = self._state.limits
        budget = self._draft.budget
        num_tokens = request.request.num_tokens - lookup.num_computed
        if self._is_padded(num_tokens, lookup.num_computed):
            padded = 1 + limits.num_speculative_tokens
            return _Chunk(padded, limits.num_speculative_tokens) if padded <= budget else None
        if 0 < self._long_prefill_tokens < num_tokens:
            num_tokens = self._long_prefill_tokens
        if num_tokens > budget and not limits.enable_chunked_prefill:
            return None
        num_tokens = min(num_tokens, budget)
        if self._state.chunk_rule is not None:
            num_tokens = self._state.chunk_rule.next_tokens(request, lookup.num_computed, num_tokens)
        return _Chunk(num_tokens) if num_tokens else None

    def _is_padded(self, num_tokens: int, num_computed: int) -> bool:
        """Whether a request that lacks one token joins with drafts that cannot be right, as wide as those it joins."""
        limits = self._state.limits
        return (
            limits.num_speculative_tokens > 0
            and num_tokens == 1
            and not self._runs_prefill
            and (self._joins_others or num_computed > 0)
            and num_computed + limits.num_speculative_tokens + 2 <= limits.max_model_len
        )

    def _allocate(self, request: EngineRequest, lookup: Lookup, chunk: _Chunk) -> bool:
        state = self._state
        reserved = 0
        if lookup.is_async:  # it will hold its blocks for long and cannot be preempted: leave room for all begun
            reserved = sum(remaining_blocks(state, other) for other in state.prefilling) + state.draft_blocks
        blocks = state.cache.allocate_slots(
            request.request,
            chunk.num_tokens,
            new_computed_tokens=lookup.local_tokens,
            computed_blocks=lookup.hit,
            lookahead_tokens=0 if lookup.is_async else state.limits.lookahead_tokens,
            external_tokens=lookup.external_tokens,
            rules=AllocationRules(
                delay_caching=lookup.is_async,
                full_sequence_must_fit=state.limits.reserve_full_sequence,
                reserved_blocks=reserved,
                has_scheduled_requests=bool(state.running),
            ),
        )
        if blocks is None:
            return False
        if state.connector is not None:
            table = state.cache.block_ids(request.request_id)
            state.connector.update_state_after_alloc(request.request, table, lookup.external_tokens)
        return True

    def _join(self, request: EngineRequest, lookup: Lookup, chunk: _Chunk) -> None:
        state = self._state
        inner = request.request
        (self._draft.resumed if inner.status is RequestStatus.PREEMPTED else self._draft.admitted).append(request)
        inner.status = RequestStatus.RUNNING
        state.room.deferred.discard(request)
        state.running.append(request)
        if inner.lora_name is not None:
            self._loras.add(inner.lora_name)
        self._draft.add(request, chunk.num_tokens, chunk.num_drafts, drafts_are_padding=chunk.num_drafts > 0)
        if lookup.num_computed + chunk.num_tokens < inner.num_tokens:
            state.prefilling.add(request)
