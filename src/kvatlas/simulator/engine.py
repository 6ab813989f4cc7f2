"""The engine in real time: an asyncio loop around `EngineCore` that waits as long as a GPU would work."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from kvatlas.clock import Clock, SystemClock
from kvatlas.errors import KvAtlasError
from kvatlas.events import EventBatch
from kvatlas.hashing import NO_EXTRAS, RequestExtras
from kvatlas.simulator.core import EngineCore
from kvatlas.simulator.metrics import EngineMetrics
from kvatlas.simulator.sampling import FinishReason, SamplingParams
from kvatlas.simulator.step import StepResult
from kvatlas.simulator.streams import OutputStream

__all__ = ["EventPublisher", "SimulatedEngine"]

_log = logging.getLogger(__name__)
_MOST_LAG_S = 0.1


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
        clock: tells when a step is over.
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
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._error: KvAtlasError | None = None

    @property
    def is_healthy(self) -> bool:
        """False once the loop has died."""
        return self._error is None

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
        self._wake.set()
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
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget the cache unless a request holds blocks; subscribers hear of it with the next step that has output."""
        return self._core.reset_prefix_cache()

    async def _run(self) -> None:
        try:
            while True:
                await self._wake.wait()
                await self._run_until_idle()
                self._wake.clear()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, the clients must hear of it
            _log.exception("the simulated engine's loop died")
            self._error = KvAtlasError(f"the engine died: {error!r}; restart it")
            for stream in self._streams.values():
                stream.fail(self._error)

    async def _run_until_idle(self) -> None:
        step_ends_s = self._clock.monotonic_s()
        while self._core.has_requests:
            now_s = self._clock.monotonic_s()
            step = self._core.begin_step(now_s)
            # A step begins when the last one ended, whatever the timer's grain and our own work: only lag resets it.
            if now_s - step_ends_s > _MOST_LAG_S:
                step_ends_s = now_s
            step_ends_s += self._core.latency.real_s(step.duration_s)
            await self._sleep(max(0.0, step_ends_s - now_s))
            now_s = self._clock.monotonic_s()
            result = self._core.end_step(step, now_s)
            self._metrics.on_step(step.plan, result, self._core.take_stats(), now_s)
            self._publish(result)
            self._deliver(result)

    def _publish(self, result: StepResult) -> None:
        if result.events and self._publisher is not None:
            self._publisher.publish(EventBatch(self._clock.wall_s(), list(result.events)))

    def _deliver(self, result: StepResult) -> None:
        for output in result.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.deliver(output)
        for request in result.finished:
            self._streams.pop(request.request_id, None)
