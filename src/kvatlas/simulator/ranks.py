"""The engines behind one port: which of the data-parallel ranks takes a request, and what concerns all of them.

With one rank this is a thin layer over one engine. Source: vLLM 0.32.0 (internal load balancer,
`AsyncLLM.check_admission`, `EngineCore.sleep`).
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from kvatlas.errors import BadRequest, KvAtlasError, NoWorkerAvailable
from kvatlas.hashing import NO_EXTRAS, RequestExtras
from kvatlas.simulator.config import EngineConfig
from kvatlas.simulator.engine import SimulatedEngine
from kvatlas.simulator.metrics import EngineMetrics, SleepState
from kvatlas.simulator.metrics_page import MetricsPage
from kvatlas.simulator.sampling import FinishReason, SamplingParams
from kvatlas.simulator.scheduler_state import PauseState
from kvatlas.simulator.streams import OutputStream

__all__ = ["EngineRanks", "PauseMode"]

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
_MEMORY = ("weights", "kv_cache")
_SLEEP_STATES = (SleepState.AWAKE, SleepState.WEIGHTS_OFFLOADED, SleepState.DISCARD_ALL)


class EngineRanks:
    """All engines of one server, by rank.

    Args:
        config: for the admission limits.
        engines: started engines.
        metrics: theirs, aligned.
        page: theirs.
    """

    def __init__(
        self,
        config: EngineConfig,
        engines: Sequence[SimulatedEngine],
        metrics: Sequence[EngineMetrics],
        page: MetricsPage,
    ) -> None:
        self._config = config
        self._engines = tuple(engines)
        self._metrics = tuple(metrics)
        self._page = page
        self._first = 0
        self._asleep: set[str] = set()
        self._is_paused = False
        self._owners: dict[str, SimulatedEngine] = {}

    @property
    def engines(self) -> tuple[SimulatedEngine, ...]:
        """By rank."""
        return self._engines

    @property
    def is_healthy(self) -> bool:
        """False once any engine's loop has died."""
        return all(engine.is_healthy for engine in self._engines)

    @property
    def is_sleeping(self) -> bool:
        """Whether scheduling is paused or memory is given up, at any level."""
        return self._is_paused or bool(self._asleep)

    @property
    def num_waiting(self) -> int:
        """Waiting requests of all ranks."""
        return sum(engine.core.scheduler.num_waiting for engine in self._engines)

    @property
    def usage(self) -> float:
        """KV-cache usage, 0..1, of the fullest rank."""
        return max(engine.core.scheduler.usage for engine in self._engines)

    def check_rank(self, header: str | None) -> int | None:
        """Read `X-data-parallel-rank`. What is no integer is as good as no header.

        Raises:
            BadRequest: there is no such rank.
        """
        try:
            rank = int(header or "")
        except ValueError:
            return None
        if not 0 <= rank < len(self._engines):
            raise BadRequest(
                f"data_parallel_rank {rank} is out of range: this server has ranks 0 to {len(self._engines) - 1}"
            )
        return rank

    def check_admission(self, num_replies: int) -> None:
        """Refuse a request that would queue more than is allowed.

        Raises:
            NoWorkerAvailable: 503: too many unfinished requests, or too many prompt tokens not prefilled yet.
        """
        most_requests = self._config.max_num_queued_reqs
        if most_requests is not None:
            unfinished = sum(engine.core.scheduler.num_unfinished for engine in self._engines)
            if unfinished + num_replies > most_requests:
                self._page.rejections["max_num_queued_reqs"].inc()
                raise NoWorkerAvailable(
                    f"{unfinished} requests are unfinished and at most {most_requests} may be: try again later"
                )
        most_tokens = self._config.max_num_queued_tokens
        if most_tokens is not None:
            queued = sum(engine.core.scheduler.num_queued_tokens for engine in self._engines)
            if queued >= most_tokens:
                self._page.rejections["max_num_queued_tokens"].inc()
                raise NoWorkerAvailable(
                    f"{queued} prompt tokens wait to be prefilled and at most {most_tokens} may: try again later"
                )

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        rank: int | None = None,
        extras: RequestExtras = NO_EXTRAS,
        stream: OutputStream,
    ) -> None:
        """Queue a request on a rank: the one asked for, or the one with the least to do.

        Raises:
            HashingError: a token id is out of range.
            KvAtlasError: the engine is dead.
        """
        engine = self._engines[self._least_loaded() if rank is None else rank]
        engine.add_request(request_id, prompt_token_ids, params, extras=extras, stream=stream)
        self._owners[request_id] = engine

    def _least_loaded(self) -> int:
        """The rank with the lowest score; ties go round. The prefix cache plays no part in it."""
        count = len(self._engines)
        order = [(self._first + step) % count for step in range(count)]
        self._first = (self._first + 1) % count
        return min(order, key=self._score)

    def _score(self, rank: int) -> float:
        """Requests there; those that wait weigh up to four times as much as the cache fills."""
        scheduler = self._engines[rank].core.scheduler
        score = float(max(scheduler.num_unfinished, scheduler.num_waiting + scheduler.num_running))
        return score + scheduler.num_waiting * 6.0 * max(0.0, scheduler.usage - 0.5)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """Drop a request; False when it had ended."""
        engine = self._owners.get(request_id)
        return engine is not None and engine.abort(request_id, reason)

    def forget(self, request_ids: Sequence[str]) -> None:
        """These requests were answered or dropped: nobody asks for them any more."""
        for request_id in request_ids:
            self._owners.pop(request_id, None)

    def reset_prefix_cache(self, *, reset_running: bool, reset_connector: bool) -> bool:
        """Reset every rank; True when all could.

        Raises:
            PrefixCacheError: running requests were to be preempted, and still a rank's blocks are held.
        """
        done = [
            engine.reset_prefix_cache(reset_running=reset_running, reset_connector=reset_connector)
            for engine in self._engines
        ]
        return all(done)

    @property
    def is_paused(self) -> bool:
        """Whether scheduling is stopped."""
        return self._is_paused

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop scheduling and wait until nothing runs; new requests wait until `resume`.

        Args:
            mode: what becomes of present requests: "abort" ends them, "wait" lets them end, "keep" freezes them (they
                start over if the caches are forgotten).
            clear_cache: forget the caches when nothing runs.

        Raises:
            KvAtlasError: a cache could not be reset.
        """
        self._is_paused = True
        pause = PauseState.ALL if mode == "keep" else PauseState.NO_NEW
        for engine in self._engines:
            await engine.pause(pause, abort=mode == "abort")
        if clear_cache and not self.reset_prefix_cache(reset_running=True, reset_connector=True):
            raise KvAtlasError("the caches could not be reset: a connector still moves blocks; try again")

    def resume(self) -> None:
        """Go on scheduling."""
        self._is_paused = False
        for engine in self._engines:
            engine.resume()

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Stop scheduling and wait until nothing runs; from level 1 on forget the caches too.

        Args:
            level: 0 pauses, 1 also moves the weights to the host, 2 drops them.
            mode: see `pause`.

        Raises:
            KvAtlasError: a cache could not be reset.
        """
        await self.pause(mode, clear_cache=level >= 1)
        if level >= 1:
            self._asleep = set(_MEMORY)
        self._show(_SLEEP_STATES[level])

    def wake_up(self, tags: Sequence[str] | None) -> bool:
        """Undo `sleep`. Returns whether everything is there again and scheduling goes on.

        Args:
            tags: what to bring back: "weights", "kv_cache", "scheduling"; None = all.
        """
        self._asleep -= set(_MEMORY if tags is None else tags)
        if self._asleep:
            return False
        self.resume()
        self._show(SleepState.AWAKE)
        return True

    def _show(self, state: SleepState) -> None:
        for metrics in self._metrics:
            metrics.set_sleep_state(state)
