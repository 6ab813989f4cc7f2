"""The scheduler against its promises, whatever is sent, aborted and reset, in any order, on a pool that is too small."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvatlas.hashing import VllmHasher
from kvatlas.prefix_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheManager, Request
from kvatlas.simulator import EngineRequest, FinishReason, SamplingParams, Scheduler, SchedulerLimits

BLOCK = 4
MAX_MODEL_LEN = 40
NUM_BLOCKS = 14
HASHER = VllmHasher("xxhash_cbor", "0")
# Prompts share beginnings: few roots, cut anywhere.
ROOTS = tuple(tuple(range(first, first + MAX_MODEL_LEN)) for first in (0, 1000, 2000))


class Tokens:
    """Output tokens that name their index, so that a lost or doubled one shows."""

    def token_id(self, index):
        """See the class."""
        return 5000 + index


class SchedulerMachine(RuleBasedStateMachine):
    """Steps, arrivals, aborts and resets in any order."""

    @initialize(budget=st.integers(3, 40), seqs=st.integers(1, 6))
    def start(self, budget, seqs):
        """An empty engine with some limits."""
        self.budget = budget
        self.cache = KVCacheManager(
            KVCacheConfig(
                num_blocks=NUM_BLOCKS,
                groups=(KVCacheGroup(FullAttentionSpec(BLOCK)),),
                hash_block_size=BLOCK,
                max_model_len=MAX_MODEL_LEN,
            )
        )
        limits = SchedulerLimits(max_num_batched_tokens=budget, max_num_seqs=seqs, max_model_len=MAX_MODEL_LEN)
        self.scheduler = Scheduler(self.cache, limits)
        self.requests: list[EngineRequest] = []
        self.resident: dict[int, int] = {}

    @rule(
        root=st.sampled_from(ROOTS),
        length=st.integers(1, MAX_MODEL_LEN - 1),
        tail=st.lists(st.integers(0, 5003), max_size=3),
        max_tokens=st.integers(1, 30),
    )
    def arrive(self, root, length, tail, max_tokens):
        """A request comes; its prompt begins like others do."""
        prompt = [*root[:length], *tail][: MAX_MODEL_LEN - 1]
        request = EngineRequest(
            request=Request(f"r{len(self.requests)}", prompt, HASHER, BLOCK),
            params=SamplingParams(max_tokens=max_tokens),
            source=Tokens(),
        )
        self.requests.append(request)
        self.scheduler.add(request)

    @precondition(lambda self: any(request.finish_reason is None for request in self.requests))
    @rule(data=st.data())
    def abort(self, data):
        """A client hangs up."""
        live = [request for request in self.requests if request.finish_reason is None]
        request = data.draw(st.sampled_from(live))
        assert self.scheduler.abort(request.request_id) is request
        assert request.finish_reason is FinishReason.ABORT

    @rule(abort_one=st.booleans())
    def step(self, abort_one):
        """One step, perhaps with a client that hangs up while it runs."""
        plan = self.scheduler.schedule()
        assert plan.num_tokens <= self.budget
        assert not (plan.preempted and plan.admitted)
        for request in plan.admitted:
            tokens = (
                request.request.num_tokens if request.request.num_preemptions else request.request.num_prompt_tokens
            )
            assert request.cached_tokens <= (tokens - 1) // BLOCK * BLOCK
        if abort_one and plan.scheduled:
            self.scheduler.abort(plan.scheduled[0].request.request_id)
        tokens = [
            [share.request.source.token_id(share.request.request.num_output_tokens)] if share.samples else []
            for share in plan.scheduled
        ]
        self.follow(self.scheduler.update(plan, tokens).events)

    @rule()
    def reset(self):
        """The cache is reset exactly when nobody holds blocks."""
        holds = [request for request in self.requests if any(self.cache.block_ids(request.request_id)[0])]
        assert self.scheduler.reset_prefix_cache() is (not holds)

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
        for _ in range(3000):
            if not self.scheduler.has_requests:
                break
            self.step(abort_one=False)
        assert not self.scheduler.has_requests, "a request never ends"
        self.follow(self.scheduler.take_events())
        assert self.cache.num_free_blocks == NUM_BLOCKS - 1
        assert len(self.resident) == self.cache.num_cached_keys
        for request in self.requests:
            output = request.request.all_token_ids[request.request.num_prompt_tokens :]
            assert output == [5000 + index for index in range(len(output))]
            if request.finish_reason is FinishReason.LENGTH:
                room = MAX_MODEL_LEN - request.request.num_prompt_tokens
                assert len(output) == min(request.params.max_tokens, room)


TestScheduler = SchedulerMachine.TestCase
