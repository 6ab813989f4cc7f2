"""The engine in real time: an asyncio loop around `EngineCore` that waits as long as a GPU would work."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from kvatlas.clock import Clock, SystemClock
from kvatlas.errors import KvAtlasError
from kvatlas.events import EventBatch
from kvatlas.hashing import NO_EXTRAS, RequestExtras
from kvatlas.simulator.core import EngineCore, Step
from kvatlas.simulator.metrics import EngineMetrics
from kvatlas.simulator.sampling import FinishReason, SamplingParams
from kvatlas.simulator.scheduler_state import PauseState
from kvatlas.simulator.step import RequestOutput
from kvatlas.simulator.streams import OutputStream

__all__ = ["EventPublisher", "SimulatedEngine"]

_log = logging.getLogger(__name__)
_MOST_LAG_S = 0.1
_POLL_S = 0.002


class EventPublisher(Protocol):
    """Where a step's KV events go."""

    def publish(self, batch: EventBatch) -> None:
        """Send one batch to the subscribers."""
        ...


class SimulatedEngine:
    """Takes requests, runs steps while there are any, publishes one event batch per step that has events.

    Args:
        core: the engine proper.
        metrics: counts what the steps did.
        publisher: None = events go nowhere.
        clock: tells when a step is over. A connector's clock must be the same.
        sleep: waits real seconds; tests pass one that moves their clock.
    """

    def __init__(
        self,
        core: EngineCore,
        metrics: EngineMetrics,
        *,
        publisher: EventPublisher | None = None,
        clock: Clock | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._core = core
        self._metrics = metrics
        self._publisher = publisher
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._streams: dict[str, OutputStream] = {}
        self._running_steps: deque[tuple[Step, float]] = deque()
        self._busy_until_s = 0.0
        self._is_busy = False
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._error: KvAtlasError | None = None

    @property
    def is_healthy(self) -> bool:
        """False once the loop has died."""
        return self._error is None

    @property
    def core(self) -> EngineCore:
        """The engine proper, to be read."""
        return self._core

    def start(self) -> None:
        """Start the loop on the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="simulated-engine")

    async def close(self) -> None:
        """Stop the loop; requests still running are dropped."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        extras: RequestExtras = NO_EXTRAS,
        stream: OutputStream | None = None,
    ) -> OutputStream:
        """Queue a request and return the stream its outputs come on (`stream`, or a new one).

        Raises:
            HashingError: a token id is out of range.
            KvAtlasError: the engine is dead.
        """
        if self._error is not None:
            raise self._error
        self._core.add(request_id, prompt_token_ids, params, extras=extras, now_s=self._clock.monotonic_s())
        stream = stream or OutputStream()
        stream.expect(request_id)
        self._streams[request_id] = stream
        self._notice()
        return stream

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """Drop a request whose client is gone, or has enough (reason stop). Its blocks are free at once.

        Returns:
            False when it had ended.
        """
        request = self._core.abort(request_id, reason)
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.close_request(request_id)
        if request is None:
            return False
        self._metrics.on_finished(request, self._clock.monotonic_s())
        self._notice()
        return True

    def reset_prefix_cache(self, *, reset_running: bool = False, reset_connector: bool = False) -> bool:
        """Forget the cache unless a request holds blocks; subscribers hear of it with the next step that has output.

        Args:
            reset_running: preempt all running requests first.
            reset_connector: forget what is stored outside the device too.

        Raises:
            PrefixCacheError: running requests were to be preempted, and still blocks are held.
        """
        return self._core.reset_prefix_cache(reset_running=reset_running, reset_connector=reset_connector)

    async def pause(self, pause: PauseState, *, abort: bool = False) -> None:
        """Stop scheduling and wait until nothing runs. Requests may come all the while; they wait.

        Args:
            pause: NO_NEW lets running requests end, ALL freezes them.
            abort: end all requests first; their clients get what they had, with the reason abort.
        """
        if abort:
            now_s = self._clock.monotonic_s()
            for request in self._core.abort_all():
                self._metrics.on_finished(request, now_s)
                self._hand_over(RequestOutput(request, (), FinishReason.ABORT))
        self._core.set_pause(pause)
        self._notice()
        await self._idle.wait()

    def resume(self) -> None:
        """Go on scheduling."""
        self._core.set_pause(PauseState.RUNNING)
        self._notice()

    def _notice(self) -> None:
        """Something may have to be done."""
        if self._core.has_requests or self._running_steps:
            self._idle.clear()
            self._wake.set()

    async def _run(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await self._run_until_idle()
                self._idle.set()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, the clients must hear of it
            _log.exception("the simulated engine's loop died")
            self._error = KvAtlasError(f"the engine died: {error!r}; restart it")
            self._idle.set()
            for stream in self._streams.values():
                stream.fail(self._error)

    async def _run_until_idle(self) -> None:
        """Begin steps as long as the engine takes them, then end the oldest, and so on."""
        running = self._running_steps
        while self._core.has_requests or running:
            begun = None
            if self._core.has_requests and len(running) < self._core.max_running_steps:
                begun = self._begin_step()
                if begun.plan.scheduled and len(running) < self._core.max_running_steps:
                    continue
            step, ends_s = running[0]
            await self._sleep(max(0.0, ends_s - self._clock.monotonic_s()))
            running.popleft()
            self._end_step(step)
            if step is begun and not step.plan.scheduled and self._core.has_requests:
                await self._sleep(self._until_next_transfer_s())

    def _begin_step(self) -> Step:
        """Plan a step. The device works at one at a time: this one starts when the one before it has ended."""
        now_s = self._clock.monotonic_s()
        step = self._core.begin_step(now_s)
        # A step starts when the last one ended, whatever the timer's grain and our own work: only lag resets it.
        if not self._is_busy or now_s - self._busy_until_s > _MOST_LAG_S:
            self._busy_until_s = now_s
        self._is_busy = True
        self._busy_until_s += self._core.latency.real_s(step.duration_s) + step.load_s
        self._running_steps.append((step, self._busy_until_s))
        return step

    def _end_step(self, step: Step) -> None:
        now_s = self._clock.monotonic_s()
        result = self._core.end_step(step, now_s)
        self._is_busy = (bool(step.plan.scheduled) and self._core.has_requests) or bool(self._running_steps)
        self._metrics.on_step(step.plan, result, self._core.take_stats(), now_s)
        if result.events and self._publisher is not None:
            self._publisher.publish(EventBatch(self._clock.wall_s(), list(result.events)))
        for output in result.outputs:
            self._hand_over(output)

    def _until_next_transfer_s(self) -> float:
        """Nothing can be computed: wait for the connector, but not so long that a new request would notice."""
        ready_s = self._core.next_transfer_s()
        left_s = _POLL_S if ready_s is None else ready_s - self._clock.monotonic_s()
        return min(max(left_s, 0.0), _POLL_S)

    def _hand_over(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if output.finish_reason is not None:
            self._streams.pop(output.request_id, None)
        if stream is not None:
            stream.deliver(output)
