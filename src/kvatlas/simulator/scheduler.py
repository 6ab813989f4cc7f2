"""Which requests compute which tokens in the next step: vLLM's scheduler, without I/O.

A step is `schedule()`, the model's work, `update()`. All a scheduler decides follows from the calls made to it: no
clock, no randomness. With asynchronous scheduling a second `schedule()` comes before the `update()` of the first;
updates come in the order of their plans.

A plan is made in two passes, each a module of its own:

1. `running.py`: running requests go first, in the order they were admitted, each with what it lacks, as far as the
   token budget goes. When a block cannot be had, somebody is preempted.
2. `admission.py`: waiting requests join, only in a step that preempted nobody.

`outputs.py` takes the tokens, `external_kv.py` speaks with the connector, `queues.py` says who waits where,
`chunks.py` where a prefill is cut, and `scheduler_state.py` is what they share.

Source: vLLM 0.32.0, v1/core/sched/scheduler.py and async_scheduler.py.
"""

from collections.abc import Sequence
from functools import partial

from kvatlas.errors import PrefixCacheError
from kvatlas.events import Event
from kvatlas.prefix_cache import KVCacheManager, PrefixCacheStats
from kvatlas.prefix_cache.connector import (
    NO_TRANSFER_RESULTS,
    NO_TRANSFERS,
    ConnectorStats,
    KVConnector,
    LoadFailurePolicy,
)
from kvatlas.simulator.admission import AdmissionPass
from kvatlas.simulator.chunks import chunk_rule
from kvatlas.simulator.external_kv import finish_transfers, mark_failed_loads
from kvatlas.simulator.limits import SchedulerLimits
from kvatlas.simulator.outputs import advance, take_outputs
from kvatlas.simulator.queues import WaitingRoom
from kvatlas.simulator.request import Blocked, EngineRequest
from kvatlas.simulator.running import RunningPass
from kvatlas.simulator.sampling import FinishReason
from kvatlas.simulator.scheduler_state import PauseState, SchedulerState, end_request, preempt
from kvatlas.simulator.step import RequestOutput, StepDraft, StepPlan, StepResult

__all__ = ["Scheduler"]


class Scheduler:
    """Waiting and running requests over one KV cache.

    Args:
        cache: this scheduler's alone.
        limits: bounds and rules.
        connector: KV outside the device, None = there is none. It is bound to the cache here.
    """

    def __init__(self, cache: KVCacheManager, limits: SchedulerLimits, connector: KVConnector | None = None) -> None:
        rule = chunk_rule(cache.config, limits)
        self._state = SchedulerState(cache, limits, WaitingRoom(limits.policy), connector, rule)
        if connector is not None:
            connector.bind(cache)

    @property
    def num_running(self) -> int:
        """Admitted requests."""
        return len(self._state.running)

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet, preempted, or loading."""
        return len(self._state.room)

    @property
    def num_deferred(self) -> int:
        """Waiting requests that something else than capacity holds back."""
        return len(self._state.room.deferred)

    @property
    def has_requests(self) -> bool:
        """Whether a step would have anything to do: requests it may touch, or transfers that must end."""
        state = self._state
        if state.lingering or state.deferred_frees:
            return True
        match state.pause:
            case PauseState.RUNNING:
                return bool(state.requests)
            case PauseState.NO_NEW:
                return bool(state.running or state.room.holding)
            case PauseState.ALL:
                return False

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended, whether a step may touch them or not."""
        return len(self._state.requests)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of requests that have no output yet. O(requests)."""
        return sum(
            r.request.num_prompt_tokens for r in self._state.requests.values() if not r.request.num_output_tokens
        )

    @property
    def running_ids(self) -> tuple[str, ...]:
        """Ids of the running requests, first admitted first."""
        return tuple(request.request_id for request in self._state.running)

    @property
    def waiting_ids(self) -> tuple[str, ...]:
        """Ids of the waiting requests, next first."""
        return tuple(request.request_id for request in self._state.room)

    @property
    def loras(self) -> tuple[frozenset[str], frozenset[str]]:
        """Names of the adapters of running and of waiting requests."""
        running = {request.request.lora_name for request in self._state.running}
        waiting = {request.request.lora_name for request in self._state.room}
        return frozenset(name for name in running if name), frozenset(name for name in waiting if name)

    @property
    def usage(self) -> float:
        """Share of the pool's blocks held by requests, 0..1; cached blocks nobody holds count as free."""
        return self._state.cache.usage

    @property
    def cache(self) -> KVCacheManager:
        """The KV cache, to be read."""
        return self._state.cache

    def add(self, request: EngineRequest) -> None:
        """Let a request wait."""
        self._state.requests[request.request_id] = request
        self._state.room.add(request)

    def unblock(self, request_id: str) -> None:
        """What a request added as blocked waited for is there. Nothing happens for others."""
        request = self._state.requests.get(request_id)
        if request is not None and request.blocked is Blocked.GRAMMAR:
            request.blocked = None

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> EngineRequest | None:
        """Take a request out wherever it is and free its blocks. Returns it, or None when it had ended before."""
        request = self._state.requests.get(request_id)
        if request is None:
            return None
        if request in self._state.running:
            self._state.running.remove(request)
        else:
            self._state.room.remove(request)
        end_request(self._state, request, reason)
        return request

    def abort_all(self) -> list[EngineRequest]:
        """Abort every request, running ones first. Returns them."""
        ids = [*self.running_ids, *self.waiting_ids]
        return [request for request_id in ids if (request := self.abort(request_id)) is not None]

    def schedule(self) -> StepPlan:
        """Plan the next step and allocate its blocks; full blocks are announced here, before they are computed."""
        state = self._state
        state.step += 1
        state.cache.new_step_starts()
        draft = StepDraft(state.limits.max_num_batched_tokens)
        if state.pause is not PauseState.ALL:
            alone = len(state.running) + len(state.room) <= 1
            long_prefill_tokens = 0 if alone else state.limits.long_prefill_tokens
            RunningPass(state, draft, long_prefill_tokens).run()
            if not draft.preempted:
                AdmissionPass(state, draft, long_prefill_tokens).run()
        shares = tuple(draft.shares.values())
        self._release_copies()
        advance(state, shares)
        transfers = NO_TRANSFERS
        if state.connector is not None:
            transfers = state.connector.build_step([share.request.request for share in shares])
        return StepPlan(
            scheduled=shares,
            admitted=tuple(draft.admitted),
            preempted=tuple(draft.preempted),
            resumed=tuple(draft.resumed),
            number=state.step,
            transfers=transfers,
        )

    def _release_copies(self) -> None:
        """Blocks that hits share in part are copied with the step; source and copy are held until they were."""
        state = self._state
        copies = state.cache.take_block_copies()
        if copies and state.defers_frees:
            state.deferred_frees.append((state.step, partial(state.cache.release_block_copies, copies)))
        elif copies:
            state.cache.release_block_copies(copies)

    def update(self, plan: StepPlan, sampled: Sequence[Sequence[int]]) -> StepResult:
        """Take what a step brought.

        Args:
            plan: the oldest plan of `schedule` that was not updated yet.
            sampled: for each share its new tokens: accepted drafts and one more; empty where it does not sample.

        Raises:
            PrefixCacheError: the connector broke its contract.
        """
        state = self._state
        state.processed_step = plan.number
        while state.deferred_frees and state.deferred_frees[0][0] <= plan.number:
            state.deferred_frees.popleft()[1]()
        results = NO_TRANSFER_RESULTS
        void: frozenset[EngineRequest] = frozenset()
        if state.connector is not None:
            results = state.connector.run_step(plan.transfers)
            if results.failed_receiving or results.invalid_block_ids:
                void = mark_failed_loads(state, plan, results)
        outputs = take_outputs(state, plan, sampled, void)
        outputs += self._end_failed(void)
        finish_transfers(state, results)
        finished = tuple(output.request for output in outputs if output.finish_reason is not None)
        return StepResult(tuple(outputs), finished, tuple(self.take_events()))

    def _end_failed(self, void: frozenset[EngineRequest]) -> list[RequestOutput]:
        """Requests whose load failed end with an error, if that is the policy; otherwise they go on."""
        if not self._ends_failed:
            return []
        failed = sorted(void, key=lambda request: request.request_id)
        for request in failed:
            self.abort(request.request_id, FinishReason.ERROR)
        return [RequestOutput(request, (), FinishReason.ERROR) for request in failed]

    @property
    def _ends_failed(self) -> bool:
        return self._state.limits.load_failure_policy is LoadFailurePolicy.FAIL

    def take_events(self) -> list[Event]:
        """Events of the pool, then of the connector, since the last call, each in the order things happened."""
        events = self._state.cache.take_events()
        if self._state.connector is not None:
            events += self._state.connector.take_events()
        return events

    def reset_prefix_cache(self, *, reset_running: bool = False, reset_connector: bool = False) -> bool:
        """Forget every cached block. False, and nothing changes, while any request holds blocks.

        Args:
            reset_running: preempt all running requests first; what running steps bring for them is dropped, and they
                start over in the order they were admitted.
            reset_connector: forget what is stored outside the device too.

        Raises:
            PrefixCacheError: blocks are held although no request runs: by loads from outside, or with a connector and
                asynchronous scheduling by the steps that run. The requests stay preempted.
        """
        state = self._state
        if reset_running:
            while state.running:
                preempt(state, state.running.pop(), drop_output=True)
        done = state.cache.reset_prefix_cache()
        if reset_running and not done:
            raise PrefixCacheError(
                "the prefix cache cannot be reset although all running requests were preempted: loads from outside, or "
                "running steps that a load must not overtake, hold blocks; try again when they have ended"
            )
        if reset_connector and state.connector is not None:
            cleared = state.connector.reset_cache() is not False
            state.connector_stats.reset = state.connector_stats.reset or cleared
            done = done and cleared
        return done

    def set_pause(self, pause: PauseState) -> None:
        """Rest, wholly or in part, or go on. Requests may be added all the while."""
        self._state.pause = pause

    @property
    def pause(self) -> PauseState:
        """How much of the scheduler rests."""
        return self._state.pause

    def take_stats(self) -> PrefixCacheStats:
        """Local lookups and hits of admissions since the last call."""
        return self._state.cache.make_stats()

    def take_connector_stats(self) -> ConnectorStats:
        """Lookups and hits outside the device since the last call."""
        stats, self._state.connector_stats = self._state.connector_stats, ConnectorStats()
        return stats

    def take_preemptions(self) -> int:
        """Preemptions since the last call, those of a reset included."""
        count, self._state.num_preempted = self._state.num_preempted, 0
        return count
