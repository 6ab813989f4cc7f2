"""One engine without I/O: scheduler, cache, replies and the time each step takes. Whoever drives it owns the clock.

`engine.py` drives it in real time behind HTTP; a trace replay can drive it in virtual time. A driver does, again
and again::

    step = core.begin_step(now_s)
    ... let step.duration_s simulated seconds and step.load_s pass; requests may come and go meanwhile ...
    result = core.end_step(step, now_s)

With asynchronous scheduling (`max_running_steps` is 2) the next step is begun while one runs: begin, begin, then end
the older and begin again. Steps end in the order they began, and each runs when the one before it has ended.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.hashing import NO_EXTRAS, RequestExtras, VllmHasher
from kvatlas.prefix_cache import KVCacheManager, Request
from kvatlas.prefix_cache.connector import KVConnector
from kvatlas.simulator.config import EngineConfig
from kvatlas.simulator.engine_setup import cache_config, scheduler_limits
from kvatlas.simulator.latency import LatencyModel
from kvatlas.simulator.replies import ReplySampler
from kvatlas.simulator.request import EngineRequest, TokenSource
from kvatlas.simulator.sampling import FinishReason, SamplingParams
from kvatlas.simulator.scheduler import Scheduler
from kvatlas.simulator.scheduler_state import PauseState
from kvatlas.simulator.step import CacheStats, ScheduledRequest, StepPlan, StepResult

__all__ = ["EngineCore", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is running.

    Args:
        plan: what it computes.
        duration_s: simulated seconds it takes.
        load_s: seconds on the connector's clock it waits before, for KV from outside the device.
    """

    plan: StepPlan
    duration_s: float
    load_s: float = 0.0


class EngineCore:
    """The engine as a state machine.

    Args:
        config: sizes, rates and seeds; the network parts are not looked at.
        sampler: makes the replies.
        connector: KV outside the device.
        rank: which data-parallel rank this is; each has a jitter of its own.

    Raises:
        ConfigError: kinds of layers, sizes or rules that cannot work together.
    """

    def __init__(
        self, config: EngineConfig, sampler: ReplySampler, *, connector: KVConnector | None = None, rank: int = 0
    ) -> None:
        self._config = config
        self._sampler = sampler
        self._connector = connector
        seed = config.seed * 1_000_003 + config.engine_index + rank * 7919
        self._latency = LatencyModel(config.latency, seed=seed)
        self._draft_luck = random.Random(seed)
        hashes = config.enable_prefix_caching or connector is not None
        self._hasher = VllmHasher(config.hash_algo, config.hash_seed) if hashes else None
        kv_config = cache_config(config, hashes=hashes)
        self._hash_block_size = kv_config.hash_block_size
        self._lora_ids = {name: number for number, name in enumerate(config.lora_modules, 1)}
        self._scheduler = Scheduler(
            KVCacheManager(kv_config), scheduler_limits(config, sampler.eos_token_id), connector
        )

    @property
    def scheduler(self) -> Scheduler:
        """The queues and the cache, to be read."""
        return self._scheduler

    @property
    def latency(self) -> LatencyModel:
        """The time of a step."""
        return self._latency

    @property
    def max_running_steps(self) -> int:
        """Steps that may be begun and not ended."""
        return 2 if self._config.async_scheduling else 1

    @property
    def has_requests(self) -> bool:
        """Whether there is a step to take."""
        return self._scheduler.has_requests

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        extras: RequestExtras = NO_EXTRAS,
        now_s: float = 0.0,
        source: TokenSource | None = None,
    ) -> EngineRequest:
        """Queue a request. `source` overrides the simulated reply, e.g. with a recorded one.

        Raises:
            HashingError: a token id is negative or too large.
        """
        inner = Request(
            request_id,
            prompt_token_ids,
            self._hasher,
            self._hash_block_size,
            extras=extras,
            skip_reading_prefix_cache=params.skip_reading_prefix_cache,
            report_mode=params.kv_cache_report_mode,
            priority=params.priority,
            arrival_s=now_s,
            max_tokens=params.max_tokens,
        )
        inner.session_id = params.session_id
        if extras.lora is not None:
            inner.lora_id = self._lora_ids.get(extras.lora.name)
        request = EngineRequest(
            request=inner,
            params=params,
            source=source or self._sampler.reply_to(prompt_token_ids, params),
            arrival_s=now_s,
        )
        self._scheduler.add(request)
        return request

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> EngineRequest | None:
        """Drop a request and free its blocks, in mid-step too. None when it had ended."""
        return self._scheduler.abort(request_id, reason)

    def abort_all(self) -> list[EngineRequest]:
        """Drop every request. Returns them."""
        return self._scheduler.abort_all()

    def reset_prefix_cache(self, *, reset_running: bool = False, reset_connector: bool = False) -> bool:
        """Forget the cache unless a request holds blocks. Its event goes out with the next step's.

        Args:
            reset_running: preempt all running requests first.
            reset_connector: forget what is stored outside the device too.

        Raises:
            PrefixCacheError: running requests were to be preempted, and still blocks are held.
        """
        return self._scheduler.reset_prefix_cache(reset_running=reset_running, reset_connector=reset_connector)

    def set_pause(self, pause: PauseState) -> None:
        """Stop scheduling, wholly or in part, or go on."""
        self._scheduler.set_pause(pause)

    def take_stats(self) -> CacheStats:
        """What the caches and the scheduler counted since the last call."""
        scheduler = self._scheduler
        return CacheStats(scheduler.take_stats(), scheduler.take_connector_stats(), scheduler.take_preemptions())

    def next_transfer_s(self) -> float | None:
        """When, on the connector's clock, a running transfer ends; None when none runs."""
        return None if self._connector is None else self._connector.next_ready_s()

    def begin_step(self, now_s: float) -> Step:
        """Plan a step. It runs from `now_s`, or from the end of the step that runs, and takes `duration_s`."""
        plan = self._scheduler.schedule()
        for request in (*plan.admitted, *plan.resumed):
            if request.admitted_s is None:
                request.admitted_s = now_s
        duration_s = self._latency.step_s(plan.prefill_tokens, plan.decode_requests) if plan.scheduled else 0.0
        load_s = 0.0 if self._connector is None else self._connector.sync_load_s(plan.transfers)
        return Step(plan, duration_s, load_s)

    def end_step(self, step: Step, now_s: float) -> StepResult:
        """Give every request that reached its end its next token, or several when drafts were right.

        Args:
            step: the oldest of `begin_step` that has not ended.
            now_s: the time the step ended, for the requests' milestones.
        """
        result = self._scheduler.update(step.plan, [self._next_tokens(share) for share in step.plan.scheduled])
        for output in result.outputs:
            if output.token_ids:
                output.request.mark_token(now_s)
        return result

    def _next_tokens(self, share: ScheduledRequest) -> tuple[int, ...]:
        request = share.request
        if not share.samples or request.finish_reason is not None:
            return ()
        first = request.request.num_output_tokens
        count = 1 + self._num_accepted(share)
        last = min(first + count, max(first + 1, request.params.max_tokens))
        return tuple([request.source.token_id(index) for index in range(first, last)])

    def _num_accepted(self, share: ScheduledRequest) -> int:
        """Drafts that turn out right: each with the same chance, none after the first wrong one."""
        if share.drafts_are_padding:
            return 0
        rate = self._config.speculative.acceptance_rate
        accepted = 0
        while accepted < share.num_drafts and self._draft_luck.random() < rate:
            accepted += 1
        return accepted
