"""An engine's scheduler on a small pool, driven by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from kvatlas.hashing import VllmHasher
from kvatlas.prefix_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheManager, Request
from kvatlas.simulator import EngineRequest, SamplingParams, Scheduler, SchedulerLimits, StepPlan, StepResult

EOS = 999
REQUEST_SETTINGS = ("extras", "skip_reading_prefix_cache", "report_mode", "priority", "arrival_s")


@dataclass
class CountingTokens:
    """Output tokens 100, 101, ...; `EOS` at `end` when given."""

    end: int | None = None

    def token_id(self, index):
        """See the class."""
        return EOS if index == self.end else 100 + index


@dataclass
class SchedulerDriver:
    """A scheduler, its cache, and the requests put into it."""

    block_size: int
    cache: KVCacheManager
    scheduler: Scheduler
    hasher: VllmHasher
    requests: dict[str, EngineRequest] = field(default_factory=dict)

    def add(self, name: str, prompt: Sequence[int], *, end: int | None = None, **settings) -> EngineRequest:
        """Queue a request; `end` is where its reply ends by itself. Settings are the request's or its parameters'."""
        own = {key: settings.pop(key) for key in tuple(settings) if key in REQUEST_SETTINGS}
        blocked = settings.pop("blocked", None)
        request = EngineRequest(
            request=Request(name, prompt, self.hasher, self.block_size, **own),
            params=SamplingParams(**settings),
            source=CountingTokens(end),
            blocked=blocked,
        )
        self.requests[name] = request
        self.scheduler.add(request)
        return request

    def finish(self, plan: StepPlan, *, accepted: int = 0) -> StepResult:
        """End a step: every request that samples says its next token, and `accepted` more where it has drafts."""
        sampled = []
        for share in plan.scheduled:
            first = share.request.request.num_output_tokens
            count = 1 + min(accepted, share.num_drafts) if share.samples else 0
            sampled.append([share.request.source.token_id(first + index) for index in range(count)])
        return self.scheduler.update(plan, sampled)

    def step(self) -> tuple[StepPlan, StepResult]:
        """One whole step."""
        plan = self.scheduler.schedule()
        return plan, self.finish(plan)

    def run(self, most_steps: int = 1000) -> list[StepPlan]:
        """Steps until nobody is left."""
        plans = []
        while self.scheduler.has_requests:
            plans.append(self.step()[0])
            assert len(plans) <= most_steps, "the scheduler makes no progress"
        return plans

    def output(self, name: str) -> list[int]:
        """The tokens a request has said."""
        request = self.requests[name].request
        return request.all_token_ids[request.num_prompt_tokens :]


@pytest.fixture
def make_driver() -> Callable[..., SchedulerDriver]:
    """A driver factory: `num_blocks` counts the null block."""

    def make(
        num_blocks: int = 11,
        block_size: int = 4,
        *,
        max_model_len: int = 40,
        budget: int = 64,
        seqs: int = 16,
        watermark: float = 0.0,
        **limits,
    ):
        cache = KVCacheManager(
            KVCacheConfig(
                num_blocks=num_blocks,
                groups=(KVCacheGroup(FullAttentionSpec(block_size)),),
                hash_block_size=block_size,
                max_model_len=max_model_len,
                watermark=watermark,
            )
        )
        limits = SchedulerLimits(
            max_num_batched_tokens=budget, max_num_seqs=seqs, max_model_len=max_model_len, eos_token_id=EOS, **limits
        )
        return SchedulerDriver(block_size, cache, Scheduler(cache, limits), VllmHasher("sha256_cbor", "0"))

    return make
