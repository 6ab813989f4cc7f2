"""One engine without I/O: scheduler, cache, replies and the time each step takes. Whoever drives it owns the clock.

`engine.py` drives it in real time behind HTTP; a trace replay can drive it in virtual time. A driver does, again
and again::

    step = core.begin_step(now_s)
    ... let step.duration_s simulated seconds pass; requests may be added and aborted meanwhile ...
    result = core.end_step(step, now_s)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.hashing import NO_EXTRAS, RequestExtras, VllmHasher
from kvatlas.prefix_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheManager,
    PrefixCacheStats,
    Request,
)
from kvatlas.simulator.config import EngineConfig
from kvatlas.simulator.latency import LatencyModel
from kvatlas.simulator.replies import ReplySampler
from kvatlas.simulator.request import EngineRequest, TokenSource
from kvatlas.simulator.sampling import FinishReason, SamplingParams
from kvatlas.simulator.scheduler import Scheduler, SchedulerLimits
from kvatlas.simulator.step import ScheduledRequest, StepPlan, StepResult

__all__ = ["EngineCore", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is running: its plan and its simulated seconds."""

    plan: StepPlan
    duration_s: float


class EngineCore:
    """The engine as a state machine.

    Args:
        config: sizes, rates and seeds; the network parts are not looked at.
        sampler: makes the replies.
    """

    def __init__(self, config: EngineConfig, sampler: ReplySampler) -> None:
        self._config = config
        self._sampler = sampler
        self._latency = LatencyModel(config.latency, seed=config.seed * 1_000_003 + config.engine_index)
        self._hasher = VllmHasher(config.hash_algo, config.hash_seed) if config.enable_prefix_caching else None
        cache = KVCacheManager(
            KVCacheConfig(
                num_blocks=config.num_blocks,
                groups=(KVCacheGroup(FullAttentionSpec(config.block_size)),),
                hash_block_size=config.block_size,
                max_model_len=config.max_model_len,
                enable_caching=config.enable_prefix_caching,
                enable_events=config.events.enabled,
                int_block_hashes=config.events.int_block_hashes,
            )
        )
        self._scheduler = Scheduler(
            cache,
            SchedulerLimits(
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
                max_model_len=config.max_model_len,
                eos_token_id=sampler.eos_token_id,
            ),
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
        request = EngineRequest(
            request=Request(
                request_id,
                prompt_token_ids,
                self._hasher,
                self._config.block_size,
                extras=extras,
                arrival_s=now_s,
                max_tokens=params.max_tokens,
            ),
            params=params,
            source=source or self._sampler.reply_to(prompt_token_ids, params),
            arrival_s=now_s,
        )
        self._scheduler.add(request)
        return request

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> EngineRequest | None:
        """Drop a request and free its blocks, in mid-step too. None when it had ended."""
        return self._scheduler.abort(request_id, reason)

    def reset_prefix_cache(self) -> bool:
        """Forget the cache unless a request holds blocks. Its event goes out with the next step's."""
        return self._scheduler.reset_prefix_cache()

    def take_stats(self) -> PrefixCacheStats:
        """Lookups and hits since the last call."""
        return self._scheduler.take_stats()

    def begin_step(self, now_s: float) -> Step:
        """Schedule a step that starts at `now_s` and say how long it takes."""
        plan = self._scheduler.schedule()
        for request in plan.admitted:
            if request.admitted_s is None:
                request.admitted_s = now_s
        return Step(plan, self._latency.step_s(plan.prefill_tokens, plan.decode_requests))

    def end_step(self, step: Step, now_s: float) -> StepResult:
        """Give every request that reached its end its next token.

        Args:
            step: what `begin_step` returned last.
            now_s: the time the step ended, for the requests' milestones.
        """
        result = self._scheduler.update(step.plan, [_next_token_id(share) for share in step.plan.scheduled])
        for output in result.outputs:
            output.request.mark_token(now_s)
        return result


def _next_token_id(share: ScheduledRequest) -> int | None:
    request = share.request
    if not share.samples or request.finish_reason is not None:
        return None
    return request.source.token_id(request.request.num_output_tokens)
