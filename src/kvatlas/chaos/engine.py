"""An engine on the timeline: `EngineCore` for its work, `FaultPlan` for its fate, `FaultyStream` for its events."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvatlas.chaos.timeline import Timeline, Timer
from kvatlas.events import Event, EventBatch, encode_batch
from kvatlas.fleet import TrafficCount
from kvatlas.simulator import (
    Crash,
    EngineConfig,
    EngineCore,
    EngineRequest,
    FaultPlan,
    FaultyStream,
    ReplySampler,
    Restart,
    SamplingParams,
    Step,
    StepResult,
)
from kvatlas.stream import LiveStep

__all__ = ["EngineHooks", "Job", "VirtualEngine"]

_EMPTY_STEP_S = 0.002


@dataclass(slots=True)
class Job:
    """One request on an engine.

    Attributes:
        on_first: called with its first output.
        on_end: called once, with the request, or with None when the answer never came whole.
        pieces: outputs so far.
    """

    on_first: Callable[[], None]
    on_end: Callable[[EngineRequest | None], None]
    pieces: int = 0


@dataclass(frozen=True, slots=True)
class EngineHooks:
    """Who is told.

    Attributes:
        on_events: the events of a step and the bytes of their batch, before the stream gets it.
        on_batch: what the live channel made of the batch.
        on_live: what time alone made happen on the live channel.
        on_restart: the engine's cache is empty, a new life begins; before the stream tells.
    """

    on_events: Callable[[Sequence[Event], bytes], None]
    on_batch: Callable[[Sequence[LiveStep]], None]
    on_live: Callable[[Sequence[LiveStep]], None]
    on_restart: Callable[[], None]


class VirtualEngine:
    """One engine with one rank.

    Args:
        config: sizes and rates; its time scale is not looked at.
        plan: its faults.
        stream: its outlet.
    """

    def __init__(
        self,
        config: EngineConfig,
        sampler: ReplySampler,
        plan: FaultPlan,
        stream: FaultyStream,
        timeline: Timeline,
        hooks: EngineHooks,
    ) -> None:
        self._config = config
        self._sampler = sampler
        self._plan = plan
        self._stream = stream
        self._timeline = timeline
        self._hooks = hooks
        self._core = EngineCore(config, sampler)
        self._jobs: dict[str, Job] = {}
        self._running: deque[tuple[Step, float]] = deque()
        self._busy_until_s = 0.0
        self._step_timer: Timer | None = None
        self._wake_timer: Timer | None = None
        self._serves_from_s = 0.0
        self._computed_tokens = 0
        self._ended_requests = 0

    @property
    def stream(self) -> FaultyStream:
        """Its outlet."""
        return self._stream

    @property
    def is_serving(self) -> bool:
        """Whether requests can be sent: its life has begun, and it answers."""
        down = self._stream.life > 0 and self._timeline.now_s < self._serves_from_s
        return not down and not self._plan.is_hung()

    @property
    def num_cached_blocks(self) -> int:
        """Distinct blocks that its pool can be hit by now; what its events say is the same right after a step ended."""
        return self._core.scheduler.cache.num_cached_keys

    @property
    def traffic(self) -> TrafficCount:
        """Its counters, as its metrics page would show them; they start at 0 with each life."""
        return TrafficCount(self._computed_tokens, self._ended_requests, self._core.scheduler.num_running)

    def start(self) -> None:
        """Begin to follow the plan."""
        self._wake()

    def send(self, request_id: str, token_ids: Sequence[int], max_tokens: int, job: Job) -> None:
        """Queue a request."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self._core.add(request_id, token_ids, params, now_s=self._timeline.now_s)
        self._jobs[request_id] = job
        self._pump()

    # -- steps --

    def _pump(self) -> None:
        """Begin steps as long as the engine takes them, and wait for the end of the oldest."""
        if self._step_timer is not None:
            return
        core, running = self._core, self._running
        wait_s = 0.0
        while core.has_requests and len(running) < core.max_running_steps:
            now_s = self._timeline.now_s
            step = core.begin_step(now_s)
            self._busy_until_s = max(self._busy_until_s, now_s) + step.duration_s
            running.append((step, self._busy_until_s))
            if not step.plan.scheduled:
                wait_s = _EMPTY_STEP_S
                break
        if running:
            self._step_timer = self._timeline.at(max(running[0][1], self._timeline.now_s + wait_s), self._end_step)

    def _end_step(self) -> None:
        self._step_timer = None
        if self._plan.is_hung():
            return  # `_wake` goes on when the hang ends
        step, _ = self._running.popleft()
        result = self._core.end_step(step, self._timeline.now_s)
        life = self._stream.life
        if result.events:
            payload = encode_batch(EventBatch(self._plan.wall_s(), list(result.events), 0))
            self._hooks.on_events(result.events, payload)
            self._hooks.on_batch(self._stream.publish(payload))
        self._hand_over(result)
        if self._stream.life == life:
            self._wake()
            self._pump()

    def _hand_over(self, result: StepResult) -> None:
        life = self._stream.life
        for output in result.outputs:
            job = self._jobs.get(output.request_id)
            if job is None:
                continue
            if not job.pieces:
                self._computed_tokens += output.request.request.num_prompt_tokens - (output.request.cached_tokens or 0)
                job.on_first()
            job.pieces += 1
            befalls = self._plan.on_piece(job.pieces)
            if isinstance(befalls, Crash):
                self._end_life(befalls)
            elif befalls is not None:
                self._core.abort(output.request_id)
                self._ended_requests += 1
                del self._jobs[output.request_id]
                job.on_end(None)
            elif output.finish_reason is not None:
                del self._jobs[output.request_id]
                self._ended_requests += 1
                job.on_end(output.request)
            if self._stream.life != life:
                return

    # -- fate --

    def _wake(self) -> None:
        """Carry out what is due, and look again when more will be."""
        while True:
            for fault in self._plan.take_due():
                self._end_life(fault)
            steps = self._stream.due()
            if steps:
                self._hooks.on_live(steps)
            if not self._plan.is_hung() and self._running and self._step_timer is None:
                self._step_timer = self._timeline.at(self._running[0][1], self._end_step)
            due = [due_s for due_s in (self._plan.next_due_s(), self._stream.next_due_s()) if due_s is not None]
            if not due or min(due) > 0:
                break
        if self._wake_timer is not None:
            self._wake_timer.cancel()
        self._wake_timer = self._timeline.after(min(due), self._wake) if due else None

    def _end_life(self, fault: Restart | Crash) -> None:
        if self._step_timer is not None:
            self._step_timer.cancel()
            self._step_timer = None
        self._running.clear()
        self._busy_until_s = 0.0
        self._computed_tokens = self._ended_requests = 0
        self._core = EngineCore(self._config, self._sampler)
        slow = self._plan.slow_start()
        self._serves_from_s = self._timeline.now_s + fault.down_s + (slow.for_s if slow else 0.0)
        self._hooks.on_restart()
        self._hooks.on_live(self._stream.restart(fault))
        lost, self._jobs = list(self._jobs.values()), {}
        for job in lost:
            job.on_end(None)
        self._wake()
