"""The scheduler against its promises, whatever is sent, aborted and reset, in any order, on a pool that is too small."""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvatlas.hashing import VllmHasher
from kvatlas.prefix_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheManager, Request
from kvatlas.simulator import (
    EngineRequest,
    FinishReason,
    PauseState,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
    SchedulingPolicy,
    StepPlan,
)

EOS = 4999
BLOCK = 4
MAX_MODEL_LEN = 40
NUM_BLOCKS = 14
HASHER = VllmHasher("xxhash_cbor", "0")
# Prompts share beginnings: few roots, cut anywhere.
ROOTS = tuple(tuple(range(first, first + MAX_MODEL_LEN)) for first in (0, 1000, 2000))


class Tokens:
    """Output tokens that name their index, so that a lost or doubled one shows; the end of text at `end`."""

    def __init__(self, end):
        self.end = end

    def token_id(self, index):
        """See the class."""
        return EOS if index == self.end else 5000 + index


class SchedulerMachine(RuleBasedStateMachine):
    """Steps that overlap or not, arrivals, aborts, resets and pauses in any order, under any rules."""

    @initialize(
        budget=st.integers(4, 40),
        seqs=st.integers(1, 6),
        policy=st.sampled_from(SchedulingPolicy),
        async_scheduling=st.booleans(),
        drafts=st.sampled_from((0, 0, 1, 3)),
        lookahead=st.sampled_from((0, 2)),
        long_prefill=st.sampled_from((0, 5)),
    )
    def start(self, budget, seqs, policy, async_scheduling, drafts, lookahead, long_prefill):
        """An empty engine with some limits."""
        self.budget = budget
        self.depth = 2 if async_scheduling else 1
        self.cache = KVCacheManager(
            KVCacheConfig(
                num_blocks=NUM_BLOCKS,
                groups=(KVCacheGroup(FullAttentionSpec(BLOCK)),),
                hash_block_size=BLOCK,
                max_model_len=MAX_MODEL_LEN,
            )
        )
        limits = SchedulerLimits(
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            max_model_len=MAX_MODEL_LEN,
            eos_token_id=EOS,
            policy=policy,
            async_scheduling=async_scheduling,
            num_speculative_tokens=drafts,
            lookahead_tokens=lookahead,
            long_prefill_tokens=long_prefill,
        )
        self.scheduler = Scheduler(self.cache, limits)
        self.requests: list[EngineRequest] = []
        self.running: deque[StepPlan] = deque()
        self.resident: dict[int, int] = {}

    @rule(
        root=st.sampled_from(ROOTS),
        length=st.integers(1, MAX_MODEL_LEN - 1),
        tail=st.lists(st.integers(0, 5003), max_size=3),
        max_tokens=st.integers(1, 30),
        end=st.none() | st.integers(0, 8),
        priority=st.integers(0, 2),
        skip=st.booleans(),
    )
    def arrive(self, root, length, tail, max_tokens, end, priority, skip):
        """A request comes; its prompt begins like others do."""
        prompt = [*root[:length], *tail][: MAX_MODEL_LEN - 1]
        number = len(self.requests)
        request = EngineRequest(
            request=Request(
                f"r{number}",
                prompt,
                HASHER,
                BLOCK,
                priority=priority,
                arrival_s=float(number),
                skip_reading_prefix_cache=skip,
            ),
            params=SamplingParams(max_tokens=max_tokens),
            source=Tokens(end),
        )
        self.requests.append(request)
        self.scheduler.add(request)

    @precondition(lambda self: any(request.finish_reason is None for request in self.requests))
    @rule(data=st.data())
    def abort(self, data):
        """A client hangs up, perhaps while steps run for it."""
        live = [request for request in self.requests if request.finish_reason is None]
        request = data.draw(st.sampled_from(live))
        assert self.scheduler.abort(request.request_id) is request
        assert request.finish_reason is FinishReason.ABORT

    @precondition(lambda self: len(self.running) < self.depth)
    @rule()
    def begin(self):
        """Plan a step."""
        plan = self.scheduler.schedule()
        assert plan.num_tokens <= self.budget
        joined = (*plan.admitted, *plan.resumed)
        assert not (plan.preempted and joined)
        for request in joined:
            tokens = (
                request.request.num_tokens if request.request.num_preemptions else request.request.num_prompt_tokens
            )
            assert request.cached_tokens <= (tokens - 1) // BLOCK * BLOCK
        assert len({share.request for share in plan.scheduled}) == len(plan.scheduled)
        self.running.append(plan)

    @precondition(lambda self: self.running)
    @rule(accepted=st.integers(0, 3))
    def end(self, accepted):
        """End the oldest step: as many drafts are right."""
        plan = self.running.popleft()
        sampled = []
        for share in plan.scheduled:
            first = share.request.request.num_output_tokens
            right = 0 if share.drafts_are_padding else min(accepted, share.num_drafts)
            count = 1 + right if share.samples else 0
            sampled.append([share.request.source.token_id(first + index) for index in range(count)])
        self.follow(self.scheduler.update(plan, sampled).events)

    @rule()
    def reset(self):
        """The cache is reset exactly when nobody holds blocks."""
        holds = [request for request in self.requests if any(self.cache.block_ids(request.request_id)[0])]
        assert self.scheduler.reset_prefix_cache() is (not holds)

    @rule()
    def reset_running(self):
        """Preempting everybody makes a reset possible at any time."""
        assert self.scheduler.reset_prefix_cache(reset_running=True)
        assert self.scheduler.num_running == 0

    @rule(pause=st.sampled_from(PauseState))
    def pause(self, pause):
        """Scheduling stops or goes on."""
        self.scheduler.set_pause(pause)

    def follow(self, events):
        """Keep the number of copies of each block, as a router would."""
        for event in events:
            match event:
                case BlockStored():
                    for block in event.block_hashes:
                        self.resident[block] = self.resident.get(block, 0) + 1
                case BlockRemoved():
                    for block in event.block_hashes:
                        self.resident[block] -= 1
                        assert self.resident[block] >= 0, "removed what was never stored"
                        if not self.resident[block]:
                            del self.resident[block]
                case AllBlocksCleared():
                    self.resident.clear()

    @invariant()
    def counts_are_sane(self):
        """Nothing is negative, and what is computed beyond the known tokens is placeholders and drafts of steps."""
        for request in getattr(self, "requests", ()):
            inner = request.request
            assert 0 <= request.num_stale_tokens <= inner.num_in_flight_tokens
            assert request.num_placeholders >= 0
            if request.finish_reason is None:
                in_drafts = sum(
                    share.num_drafts for plan in self.running for share in plan.scheduled if share.request is request
                )
                assert inner.num_computed_tokens - request.num_placeholders <= inner.num_tokens + in_drafts
                assert len(inner.block_hashes) == inner.num_tokens // BLOCK

    @invariant()
    def nobody_is_lost(self):
        """Each live request is in exactly one queue."""
        if not hasattr(self, "scheduler"):
            return
        queued = sorted([*self.scheduler.running_ids, *self.scheduler.waiting_ids])
        assert queued == sorted(request.request_id for request in self.requests if request.finish_reason is None)

    @invariant()
    def blocks_belong_to_running_requests(self):
        """Waiting and ended requests hold no blocks; running ones hold what they computed."""
        if not hasattr(self, "scheduler"):
            return
        running = set(self.scheduler.running_ids)
        for request in self.requests:
            held = len(self.cache.block_ids(request.request_id)[0])
            if request.request_id not in running:
                assert held == 0
            else:
                assert held * BLOCK >= request.request.num_computed_tokens

    def teardown(self):
        """Whatever happened, everybody ends, the tokens are right, no block leaks, and the events told the truth."""
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.set_pause(PauseState.RUNNING)
        for _ in range(4000):
            if self.scheduler.has_requests and len(self.running) < self.depth:
                self.begin()
            elif self.running:
                self.end(accepted=1)
            else:
                break
        assert not self.scheduler.has_requests, "a request never ends"
        self.follow(self.scheduler.take_events())
        assert self.cache.num_free_blocks == NUM_BLOCKS - 1
        assert len(self.resident) == self.cache.num_cached_keys
        for request in self.requests:
            inner = request.request
            output = inner.all_token_ids[inner.num_prompt_tokens :]
            assert output == [request.source.token_id(index) for index in range(len(output))]
            whole = min(request.params.max_tokens, MAX_MODEL_LEN - inner.num_prompt_tokens)
            if request.finish_reason is FinishReason.STOP:
                assert len(output) == request.source.end + 1 <= whole
            elif request.finish_reason is FinishReason.LENGTH:
                assert len(output) == whole


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=60)
