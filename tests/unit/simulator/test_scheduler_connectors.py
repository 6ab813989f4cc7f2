"""The scheduler with KV outside the device: loads, failed loads, ends that wait, statistics.

Scenario numbers are those that tests/README.md speaks of.
"""

from dataclasses import dataclass, field

import pytest

from kvatlas.clock import ManualClock
from kvatlas.errors import PrefixCacheError
from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvatlas.hashing import VllmHasher, hash64, key_with_group
from kvatlas.prefix_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheManager,
    Request,
    RequestStatus,
    SlidingWindowSpec,
)
from kvatlas.prefix_cache.connector import NO_TRANSFER_RESULTS, ExternalHit, LoadFailurePolicy, TransferResults
from kvatlas.prefix_cache.connectors import HostMemoryConnector, OffloadConfig, StoreWhen, synthetic_payload
from kvatlas.simulator import EngineRequest, FinishReason, SamplingParams, Scheduler, SchedulerLimits

BLOCK_SIZE = 4
BLOCK_BYTES = 1000
PROMPT = list(range(13))
HASHER = VllmHasher("sha256_cbor", "0")
ONE_GROUP = (FullAttentionSpec(BLOCK_SIZE),)
TWO_GROUPS = (FullAttentionSpec(BLOCK_SIZE), SlidingWindowSpec(BLOCK_SIZE, 8))


class Tokens:
    """Output tokens 100, 101, ..."""

    def token_id(self, index):
        """See the class."""
        return 100 + index


@dataclass
class Engine:
    """A scheduler over a small pool and a connector, driven by hand."""

    scheduler: Scheduler
    cache: KVCacheManager
    connector: HostMemoryConnector
    clock: ManualClock
    events: list = field(default_factory=list)

    def add(self, name, prompt=PROMPT, *, max_tokens=1, **settings):
        """A request that ends after so many tokens."""
        request = EngineRequest(
            request=Request(name, prompt, HASHER, BLOCK_SIZE, **settings),
            params=SamplingParams(max_tokens=max_tokens),
            source=Tokens(),
        )
        self.scheduler.add(request)
        return request

    def put(self, prompt=PROMPT, *, group=0, indexes=None):
        """Blocks of a prompt into the store, as if an earlier life had left them; returns the keys."""
        hashes = Request("earlier", prompt, HASHER, BLOCK_SIZE).block_hashes
        keys = [key_with_group(hashes[index], group) for index in (indexes or range(len(hashes)))]
        for key in keys[::-1]:
            self.connector.host.write(key, synthetic_payload(key, 16))
        self.connector.take_events()
        return keys

    def spoil(self, key):
        """Make a stored block fail to load."""
        self.connector.host._payloads[key] = b"not these bytes"

    def finish(self, plan):
        """End a step with a token for everybody who samples."""
        sampled = [
            [share.request.source.token_id(share.request.request.num_output_tokens)] if share.samples else []
            for share in plan.scheduled
        ]
        result = self.scheduler.update(plan, sampled)
        self.events.extend(result.events)
        return result

    def step(self):
        """One whole step."""
        plan = self.scheduler.schedule()
        return plan, self.finish(plan)

    def run(self):
        """Steps, and time for the connector, until nobody is left."""
        for _ in range(100):
            if not self.scheduler.has_requests:
                return
            self.step()
            self.clock.advance(1)
        raise AssertionError("the scheduler makes no progress")

    def table(self, request):
        """Block ids of a request."""
        return self.cache.block_ids(request.request_id)[0]

    def take_events(self, medium="GPU"):
        """Events of one medium so far."""
        placed = [event for event in self.events if not isinstance(event, AllBlocksCleared)]
        self.events = [event for event in placed if event.medium != medium]
        return [event for event in placed if event.medium == medium]


def make_engine(
    *,
    num_blocks=11,
    specs=ONE_GROUP,
    policy=LoadFailurePolicy.FAIL,
    budget=64,
    max_model_len=40,
    connector=None,
    capacity_blocks=100,
    load_bytes_per_s=BLOCK_BYTES,
    limits=None,
    **settings,
):
    """An engine whose connector loads a block a second unless told otherwise."""
    cache = KVCacheManager(
        KVCacheConfig(
            num_blocks=num_blocks,
            groups=tuple(map(KVCacheGroup, specs)),
            hash_block_size=BLOCK_SIZE,
            max_model_len=max_model_len,
        )
    )
    clock = ManualClock()
    config = OffloadConfig(
        specs, BLOCK_SIZE, block_bytes=BLOCK_BYTES, payload_bytes=16, load_bytes_per_s=load_bytes_per_s, **settings
    )
    connector = connector or HostMemoryConnector(config, clock, capacity_blocks=capacity_blocks)
    scheduler = Scheduler(
        cache,
        SchedulerLimits(
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            load_failure_policy=policy,
            **(limits or {}),
        ),
        connector,
    )
    return Engine(scheduler, cache, connector, clock)


def handles(prompt=PROMPT, start=0, end=None):
    """Hashes of a prompt's blocks as events carry them."""
    return [hash64(digest) for digest in Request("x", prompt, HASHER, BLOCK_SIZE).block_hashes[start:end]]


def shares(plan):
    """Request id -> (start, tokens) of this step."""
    return {share.request.request_id: (share.start_tokens, share.num_tokens) for share in plan.scheduled}


class TestAsynchronousLoad:
    """KV comes while the request waits."""

    def test_47_nothing_is_announced_before_it_is_there(self):
        """12 of 13 tokens: blocks are taken, no event; then one store of 3 blocks, and 1 token is computed."""
        engine = make_engine()
        engine.put()
        request = engine.add("a", max_tokens=2)
        plan, _ = engine.step()
        assert shares(plan) == {}
        assert engine.table(request) == [1, 2, 3]
        assert (engine.scheduler.waiting_ids, request.request.num_computed_tokens) == (("a",), 12)
        assert engine.take_events() == []
        engine.clock.advance(3)
        engine.step()
        assert engine.take_events() == []
        plan, result = engine.step()
        assert shares(plan) == {"a": (12, 1)}
        (stored,) = engine.take_events()
        assert isinstance(stored, BlockStored)
        assert stored.block_hashes == handles()
        assert stored.parent_block_hash is None
        assert stored.token_ids == PROMPT[:12]
        assert [output.token_ids for output in result.outputs] == [(100,)]
        assert (request.cached_tokens, request.external_tokens) == (12, 12)

    def test_48_a_prompt_loaded_as_a_whole_computes_its_last_token(self):
        """All 12 of 12 tokens are loaded and all 3 blocks announced; one token is left to sample from."""
        engine = make_engine(load_bytes_per_s=None)
        engine.put(range(12))
        request = engine.add("a", range(12))
        engine.step()
        assert request.request.num_computed_tokens == 12
        plan, _ = engine.step()
        assert shares(plan) == {"a": (11, 1)}
        assert [event.block_hashes for event in engine.take_events()] == [handles(range(12))]

    def test_the_load_follows_the_local_hit(self):
        """What the device has is adopted and announced by nobody; only the rest is loaded."""
        engine = make_engine(load_bytes_per_s=None)
        engine.add("first", range(8))
        engine.run()
        engine.take_events()
        engine.put()
        request = engine.add("a")
        engine.step()
        assert (request.cached_tokens, request.external_tokens) == (12, 4)
        engine.step()
        (stored,) = engine.take_events()
        assert (stored.block_hashes, stored.parent_block_hash) == (handles(start=2), handles()[1])

    def test_others_pass_while_it_loads(self):
        """A loading request blocks nobody, and has its turn before the queue when it is ready."""
        engine = make_engine(num_blocks=21, budget=5)
        engine.put()
        engine.add("loads", max_tokens=3)
        engine.add("cold", range(50, 58), max_tokens=3)
        plan, _ = engine.step()
        assert shares(plan) == {"cold": (0, 5)}
        engine.clock.advance(3)
        engine.step()
        engine.add("late", range(70, 78))
        plan, _ = engine.step()
        assert shares(plan) == {"cold": (8, 1), "loads": (12, 1), "late": (0, 3)}

    def test_a_load_waits_for_room_and_holds_up_the_queue(self):
        """It is admitted only where its blocks fit; the waiting pass ends there, as for anybody."""
        engine = make_engine(num_blocks=6)
        engine.add("runs", range(50, 62), max_tokens=3)
        engine.step()
        engine.put()
        engine.add("loads")
        engine.add("small", range(70, 72))
        engine.step()
        assert engine.scheduler.running_ids == ("runs",)
        assert engine.scheduler.waiting_ids == ("loads", "small")
        engine.run()
        assert engine.scheduler.take_connector_stats().hits == 12

    def test_blocks_are_reserved_for_prefills_that_began(self):
        """A load leaves the blocks that a chunked prefill still needs; without the prefill it would be admitted."""
        for busy in (True, False):
            engine = make_engine(num_blocks=11, budget=8)
            engine.put()
            if busy:
                engine.add("long", range(100, 132), max_tokens=1)
                engine.step()
            engine.add("loads")
            engine.step()
            assert len(engine.cache.block_ids("loads")[0]) == (0 if busy else 3)

    def test_an_abort_frees_when_the_load_has_ended(self):
        """Blocks that are being written must not be given to others."""
        engine = make_engine()
        engine.put()
        request = engine.add("a")
        engine.step()
        free = engine.cache.num_free_blocks
        engine.scheduler.abort("a")
        engine.step()
        assert (engine.cache.num_free_blocks, engine.scheduler.has_requests) == (free, True)
        engine.clock.advance(3)
        engine.step()
        assert (engine.cache.num_free_blocks, engine.scheduler.has_requests) == (10, False)
        assert request.finish_reason is FinishReason.ABORT
        assert engine.take_events() == []

    def test_a_preempted_request_is_loaded_again(self):
        """It comes back as preempted, its hits counted apart."""
        engine = make_engine(load_bytes_per_s=None, store_when=StoreWhen.FILLED)
        request = engine.add("a", max_tokens=8)
        engine.step()
        engine.step()
        engine.scheduler.reset_prefix_cache(reset_running=True)
        plan, _ = engine.step()
        assert (shares(plan), request.request.num_computed_tokens) == ({}, 12)
        engine.step()
        assert request.request.status is RequestStatus.RUNNING
        stats = engine.scheduler.take_connector_stats()
        assert (stats.queries, stats.hits) == (13, 0)
        assert (stats.preempted_queries, stats.preempted_hits) == (15, 12)


class TestSynchronousLoad:
    """KV comes with the step that admits the request."""

    def test_blocks_are_announced_at_once(self):
        """The request runs in the same step; loaded and computed blocks are one store."""
        engine = make_engine(async_loads=False)
        engine.put()
        engine.add("a", range(17), max_tokens=2)
        plan, _ = engine.step()
        assert shares(plan) == {"a": (12, 5)}
        assert engine.connector.sync_load_s(plan.transfers) == 3.0
        assert [event.block_hashes for event in engine.take_events()] == [handles(range(17))]

    def test_49_a_failed_load_ends_the_request_and_evicts(self):
        """Policy fail: the first bad block and all later ones are removed, the request ends with an error."""
        engine = make_engine(async_loads=False)
        keys = engine.put(range(16))
        engine.spoil(keys[1])
        request = engine.add("a", range(17), max_tokens=5)
        _, result = engine.step()
        assert [(output.token_ids, output.finish_reason) for output in result.outputs] == [((), FinishReason.ERROR)]
        assert request.finish_reason is FinishReason.ERROR
        stored, *removed = engine.take_events()
        assert stored.block_hashes == handles(range(17))
        assert all(isinstance(event, BlockRemoved) for event in removed)
        assert sorted(event.block_hashes[0] for event in removed) == sorted(handles(range(17), start=1))
        assert engine.cache.num_cached_keys == 1
        engine.run()
        assert engine.cache.num_free_blocks == 10

    def test_50_a_failed_load_is_computed_instead(self):
        """Policy recompute: nothing is removed, the request goes on from its first bad block."""
        engine = make_engine(async_loads=False, policy=LoadFailurePolicy.RECOMPUTE)
        keys = engine.put(range(16))
        engine.spoil(keys[1])
        request = engine.add("a", range(17), max_tokens=2)
        _, result = engine.step()
        assert result.outputs == ()
        plan, result = engine.step()
        assert shares(plan) == {"a": (4, 13)}
        assert [output.token_ids for output in result.outputs] == [(100,)]
        engine.run()
        assert request.finish_reason is FinishReason.LENGTH
        assert [event for event in engine.take_events() if isinstance(event, BlockRemoved)] == []

    def test_a_shared_bad_block_is_recomputed_once(self):
        """Two requests of one step rest on it: the first computes it again, the second only its own part."""
        engine = make_engine(num_blocks=21, async_loads=False, policy=LoadFailurePolicy.RECOMPUTE)
        keys = engine.put(range(12))
        engine.spoil(keys[2])
        engine.add("a", [*range(12), 50, 51], max_tokens=1)
        engine.add("b", [*range(12), 60, 61], max_tokens=1)
        plan, result = engine.step()
        assert shares(plan) == {"a": (12, 2), "b": (12, 2)}
        assert result.outputs == ()
        plan, _ = engine.step()
        assert shares(plan) == {"a": (8, 6), "b": (12, 2)}

    def test_what_rests_on_bad_blocks_does_not_reach_the_store(self):
        """Filled blocks computed after a failed load are stored only once they were computed again."""
        engine = make_engine(async_loads=False, policy=LoadFailurePolicy.RECOMPUTE, store_when=StoreWhen.FILLED)
        keys = engine.put(range(8))
        engine.spoil(keys[1])
        engine.add("a", range(17), max_tokens=2)
        engine.step()
        assert len(engine.connector.host) == 2
        engine.step()
        assert len(engine.connector.host) == 4


class TestFailedAsynchronousLoad:
    """The same two policies when the request was waiting."""

    def test_policy_fail_ends_it_without_events(self):
        """Nothing of the load was announced, so nothing is taken back; blocks return to the pool."""
        engine = make_engine(load_bytes_per_s=None)
        keys = engine.put()
        engine.spoil(keys[1])
        request = engine.add("a")
        _, result = engine.step()
        assert [output.finish_reason for output in result.outputs] == [FinishReason.ERROR]
        assert request.finish_reason is FinishReason.ERROR
        assert engine.take_events() == []
        engine.run()
        assert engine.cache.num_free_blocks == 10

    def test_policy_recompute_keeps_the_valid_part(self):
        """The blocks before the first bad one are announced, the rest is computed in place."""
        engine = make_engine(load_bytes_per_s=None, policy=LoadFailurePolicy.RECOMPUTE)
        keys = engine.put()
        engine.spoil(keys[1])
        request = engine.add("a")
        engine.step()
        assert engine.table(request) == [1, 2, 3]
        plan, _ = engine.step()
        assert shares(plan) == {"a": (4, 9)}
        assert [event.block_hashes for event in engine.take_events()] == [handles(end=1), handles(start=1)]
        engine.run()
        assert request.finish_reason is FinishReason.LENGTH

    def test_policy_recompute_starts_over_when_nothing_is_valid(self):
        """With the first block bad the blocks are given back, and the request looks up anew."""
        engine = make_engine(load_bytes_per_s=None, policy=LoadFailurePolicy.RECOMPUTE)
        keys = engine.put()
        engine.spoil(keys[0])
        engine.add("a")
        engine.step()
        engine.connector.host.clear()
        plan, _ = engine.step()
        assert shares(plan) == {"a": (0, 13)}

    def test_with_several_groups_the_whole_load_fails(self):
        """The request is named, not blocks; with recompute it starts over, with fail it ends."""
        for policy in LoadFailurePolicy:
            engine = make_engine(num_blocks=31, specs=TWO_GROUPS, load_bytes_per_s=None, policy=policy)
            engine.put()
            keys = engine.put(group=1)
            engine.spoil(keys[2])
            request = engine.add("a", max_tokens=1)
            engine.step()
            engine.connector.host.clear()
            engine.run()
            expected = FinishReason.ERROR if policy is LoadFailurePolicy.FAIL else FinishReason.LENGTH
            assert request.finish_reason is expected
            assert engine.cache.num_free_blocks == 30


class TestOverlappingSteps:
    """Asynchronous scheduling: the next step is planned before the last one's output is known."""

    def test_transfers_end_with_their_own_step(self):
        """Each plan carries what was decided in it, and its blocks are stored with its update, not an earlier one."""
        engine = make_engine(store_when=StoreWhen.FILLED, limits={"async_scheduling": True})
        engine.add("a", range(8), max_tokens=6)
        first = engine.scheduler.schedule()
        second = engine.scheduler.schedule()
        assert ([len(job.keys) for job in first.transfers.stores], second.transfers.stores) == ([2], ())
        assert len(engine.connector.host) == 0
        engine.finish(first)
        assert len(engine.connector.host) == 2
        engine.finish(second)
        engine.run()
        assert len(engine.connector.host) == 3
        assert engine.cache.num_free_blocks == 10

    def test_a_failed_load_voids_the_steps_behind_it(self):
        """Two steps rest on a bad block; recomputing, neither gives a token, and the reply is complete at the end."""
        engine = make_engine(async_loads=False, policy=LoadFailurePolicy.RECOMPUTE, limits={"async_scheduling": True})
        keys = engine.put()
        engine.spoil(keys[1])
        request = engine.add("a", max_tokens=4)
        first = engine.scheduler.schedule()
        second = engine.scheduler.schedule()
        assert (shares(first), shares(second)) == ({"a": (12, 1)}, {"a": (13, 1)})
        assert engine.finish(first).outputs == ()
        assert engine.finish(second).outputs == ()
        engine.run()
        assert request.request.all_token_ids == [*PROMPT, 100, 101, 102, 103]
        assert engine.cache.num_free_blocks == 10


class TestEnds:
    """Who ends with blocks on their way out."""

    def test_blocks_are_freed_when_they_were_sent(self):
        """The reply is out at once; the blocks return when the store has them."""
        engine = make_engine(store_bytes_per_s=BLOCK_BYTES)
        engine.add("a")
        _, result = engine.step()
        assert [output.finish_reason for output in result.outputs] == [FinishReason.LENGTH]
        assert engine.cache.num_free_blocks == 6
        engine.step()
        assert engine.scheduler.has_requests
        engine.clock.advance(3)
        engine.step()
        assert (engine.cache.num_free_blocks, engine.scheduler.has_requests) == (10, False)

    def test_a_second_request_hits_the_store_after_the_device_forgot(self):
        """Through the whole circle: computed, stored, evicted from the device, loaded, verified."""
        engine = make_engine(load_bytes_per_s=None)
        engine.add("a")
        engine.run()
        assert engine.scheduler.reset_prefix_cache()
        request = engine.add("b")
        engine.run()
        assert (request.cached_tokens, request.external_tokens) == (12, 12)
        assert engine.connector.loads.blocks_loaded == 3
        assert [event.block_hashes for event in engine.take_events()] == [handles()] * 2
        assert [event.block_hashes for event in engine.take_events("CPU")] == [[handle] for handle in handles()]

    def test_events_of_the_pool_come_first(self):
        """Within a step the device's events precede the store's."""
        engine = make_engine(store_when=StoreWhen.FILLED)
        engine.add("a", max_tokens=2)
        _, result = engine.step()
        assert [event.medium for event in result.events] == ["GPU", "CPU", "CPU", "CPU"]


class TestReset:
    """Forgetting with a connector."""

    def test_a_loading_request_holds_blocks(self):
        """A plain reset fails; one that preempts everybody first says why it cannot."""
        engine = make_engine()
        engine.put()
        engine.add("a")
        engine.step()
        assert engine.scheduler.reset_prefix_cache() is False
        with pytest.raises(PrefixCacheError, match="loads"):
            engine.scheduler.reset_prefix_cache(reset_running=True)

    def test_the_store_is_forgotten_only_when_asked(self):
        """`reset_connector` empties the store and marks the statistics; it can fail on its own."""
        engine = make_engine()
        engine.put()
        assert engine.scheduler.reset_prefix_cache()
        assert len(engine.connector.host) == 3
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        assert len(engine.connector.host) == 0
        assert engine.scheduler.take_connector_stats().reset

    @pytest.mark.parametrize(("answer", "expected"), [(None, True), (True, True), (False, False)])
    def test_only_false_is_a_failure(self, answer, expected):
        """None counts as success, as in the engine."""
        engine = make_engine(connector=Scripted(reset=answer))
        assert engine.scheduler.reset_prefix_cache(reset_connector=True) is expected


class TestStatistics:
    """What is counted, and when."""

    def test_queries_are_what_the_device_lacked(self):
        """Counted once, at admission, by source; a request that skips reading counts its misses."""
        engine = make_engine(load_bytes_per_s=None)
        engine.put()
        engine.add("a")
        engine.add("b", range(50, 57))
        engine.run()
        stats = engine.scheduler.take_connector_stats()
        assert (stats.requests, stats.queries, stats.hits) == (2, 20, 12)
        assert stats.hits_by_source == {"host": 12}
        assert engine.scheduler.take_connector_stats().queries == 0
        assert engine.scheduler.take_stats().queries == 20

    def test_a_request_that_skips_reading_loads_nothing(self):
        """Prompt log-probabilities need every token computed."""
        engine = make_engine()
        engine.put()
        engine.add("a", skip_reading_prefix_cache=True)
        plan, _ = engine.step()
        assert shares(plan) == {"a": (0, 13)}


@dataclass
class Scripted:
    """A connector that says what it is told, and remembers what it was asked."""

    answers: list = field(default_factory=list)
    results: list = field(default_factory=list)
    reset: bool | None = None
    asked: list = field(default_factory=list)
    allocated: list = field(default_factory=list)

    def bind(self, cache):
        """Not needed."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        """The next answer, or nothing found."""
        self.asked.append((request.request_id, num_computed_tokens))
        return self.answers.pop(0) if self.answers else ExternalHit(0)

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        """Remember."""
        self.allocated.append((request.request_id, block_ids, num_external_tokens))

    def external_hit_sources(self, request, num_external_tokens):
        """A sum that is wrong."""
        return {"disk": num_external_tokens + 1}

    def build_step(self, requests):
        """The ids that were scheduled."""
        return tuple(request.request_id for request in requests)

    def run_step(self, transfers):
        """The next results."""
        return self.results.pop(0) if self.results else NO_TRANSFER_RESULTS

    def request_finished(self, request, block_ids):
        """Never waits."""
        return False

    def take_events(self):
        """None."""
        return []

    def reset_cache(self):
        """As told."""
        return self.reset


class TestContract:
    """What the scheduler asks and tells, call by call."""

    def test_an_unknown_answer_skips_the_request_for_a_step(self):
        """Others are tried; it is asked again in the next step, and counted once."""
        engine = make_engine(connector=Scripted([ExternalHit(None), ExternalHit(0), ExternalHit(8)]))
        engine.add("a")
        engine.add("b", range(50, 57), max_tokens=3)
        plan, _ = engine.step()
        assert list(shares(plan)) == ["b"]
        plan, _ = engine.step()
        assert shares(plan)["a"] == (8, 5)
        assert engine.connector.asked == [("a", 0), ("b", 0), ("a", 0)]
        stats = engine.scheduler.take_connector_stats()
        assert (stats.requests, stats.queries, stats.hits) == (2, 20, 8)
        assert stats.hits_by_source == {"external_unspecified": 8}

    def test_the_connector_sees_the_whole_table(self):
        """Hits and new blocks, with the accepted tokens; 0 tokens are told too."""
        engine = make_engine(connector=Scripted([ExternalHit(0), ExternalHit(4)]))
        engine.add("a", range(8))
        engine.run()
        engine.add("b")
        engine.run()
        assert engine.connector.asked == [("a", 0), ("b", 8)]
        assert engine.connector.allocated == [("a", ([1, 2],), 0), ("b", ([1, 2, 3, 4],), 4)]

    def test_a_request_back_from_a_load_is_not_looked_up_again(self):
        """It is told of its blocks a second time, with nothing to load."""
        engine = make_engine(
            connector=Scripted([ExternalHit(12, is_async=True)], [TransferResults(finished_receiving=frozenset({"a"}))])
        )
        engine.add("a")
        engine.run()
        assert engine.connector.asked == [("a", 0)]
        assert [(one, len(tables[0]), tokens) for one, tables, tokens in engine.connector.allocated] == [
            ("a", 3, 12),
            ("a", 4, 0),
        ]

    def test_bad_blocks_need_a_single_group(self):
        """With several groups a block does not tell its request: the engine stops there, and says so."""
        connector = Scripted(results=[TransferResults(invalid_block_ids=frozenset({1}))])
        engine = make_engine(num_blocks=31, specs=TWO_GROUPS, connector=connector)
        engine.add("a")
        with pytest.raises(PrefixCacheError, match="failed_receiving"):
            engine.step()

    def test_a_bad_block_nobody_holds_changes_nothing(self):
        """Its request may have ended in the meantime."""
        connector = Scripted(results=[TransferResults(invalid_block_ids=frozenset({9}))])
        engine = make_engine(connector=connector)
        engine.add("a")
        _, result = engine.step()
        assert [output.finish_reason for output in result.outputs] == [FinishReason.LENGTH]


def test_a_busy_fleet_of_requests_comes_to_rest():
    """Sixty requests over a tiny device and a tiny store, slow links, both load modes: all end, nothing leaks."""
    for is_async in (True, False):
        for when in StoreWhen:
            engine = make_engine(
                num_blocks=16,
                budget=16,
                capacity_blocks=12,
                async_loads=is_async,
                store_when=when,
                load_bytes_per_s=5 * BLOCK_BYTES,
                store_bytes_per_s=5 * BLOCK_BYTES,
            )
            requests = []
            for number in range(60):
                prompt = [number % 3] * 4 + [number % 5] * 6 + [number % 2] * (number % 9)
                requests.append(engine.add(f"r{number}", prompt, max_tokens=1 + number % 6))
                engine.step()
                engine.clock.advance(0.5)
            while engine.scheduler.has_requests:
                engine.run()
            assert {request.finish_reason for request in requests} == {FinishReason.LENGTH}
            assert engine.cache.num_free_blocks == 15
            assert engine.connector.loads.is_idle
            assert engine.connector.host._recency.num_pinned == 0
            assert engine.connector.next_ready_s() is None
            assert engine.scheduler.take_connector_stats().hits > 0
