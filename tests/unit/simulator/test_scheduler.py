"""What a step computes, and for whom: budget, chunks, order, preemption, ends."""

import pytest

from kvatlas.events import AllBlocksCleared, BlockStored
from kvatlas.hashing import hash64
from kvatlas.simulator import FinishReason


def shares(plan):
    """Request id -> tokens computed in this step, in order."""
    return {share.request.request_id: share.num_tokens for share in plan.scheduled}


def stored(result):
    """Number of blocks in each BlockStored of a step."""
    return [len(event.block_hashes) for event in result.events if isinstance(event, BlockStored)]


class TestBudget:
    """The token budget and what it does to long prompts."""

    def test_whole_prompt_in_one_step(self, make_driver):
        """A prompt within the budget is computed at once and gives its first token in the same step."""
        driver = make_driver()
        driver.add("a", range(13), max_tokens=3)
        plan, result = driver.step()
        assert shares(plan) == {"a": 13}
        assert (plan.prefill_tokens, plan.decode_requests) == (13, 0)
        assert [output.token_ids for output in result.outputs] == [(100,)]

    def test_long_prompt_is_chunked(self, make_driver):
        """Chunks of the budget's size; each announces the blocks it completes; only the last one says a token."""
        driver = make_driver(budget=6)
        driver.add("a", range(18), max_tokens=1)
        steps = [driver.step() for _ in range(3)]
        assert [shares(plan) for plan, _ in steps] == [{"a": 6}, {"a": 6}, {"a": 6}]
        assert [stored(result) for _, result in steps] == [[1], [2], [1]]
        assert [len(result.outputs) for _, result in steps] == [0, 0, 1]

    def test_running_requests_go_first(self, make_driver):
        """Decoding takes its share of the budget before a new prompt gets the rest."""
        driver = make_driver(budget=8)
        driver.add("a", range(8), max_tokens=5)
        driver.step()
        driver.add("b", range(50, 66), max_tokens=5)
        plan, _ = driver.step()
        assert shares(plan) == {"a": 1, "b": 7}
        assert (plan.prefill_tokens, plan.decode_requests) == (7, 1)

    def test_budget_is_never_exceeded(self, make_driver):
        """No step computes more tokens than the budget, however many requests run."""
        driver = make_driver(num_blocks=101, budget=10, max_model_len=100)
        for number in range(8):
            driver.add(f"r{number}", range(number * 100, number * 100 + 17), max_tokens=6)
        plans = driver.run()
        assert max(plan.num_tokens for plan in plans) == 10

    def test_most_running_requests(self, make_driver):
        """`max_num_seqs` holds the others back until somebody ends."""
        driver = make_driver(seqs=2)
        for name in "abc":
            driver.add(name, range(4), max_tokens=2)
        driver.step()
        assert driver.scheduler.running_ids == ("a", "b")
        driver.step()
        plan, _ = driver.step()
        assert list(shares(plan)) == ["c"]


class TestAdmission:
    """Who is let in, and what is counted."""

    def test_hit_is_not_computed_again(self, make_driver):
        """A resent prompt computes what the rule floor((n-1)/block) leaves, and reports the rest as cached."""
        driver = make_driver()
        driver.add("a", range(16), max_tokens=1)
        driver.run()
        again = driver.add("b", range(16), max_tokens=1)
        plan, _ = driver.step()
        assert shares(plan) == {"b": 4}
        assert again.cached_tokens == (16 - 1) // 4 * 4

    def test_head_of_line(self, make_driver):
        """Scenario 51: the first waiting request does not fit, so a smaller one behind it is not tried."""
        driver = make_driver(num_blocks=9)
        driver.add("running", range(16), max_tokens=9)
        driver.step()
        driver.add("big", range(100, 124), max_tokens=1)
        driver.add("small", range(200, 204), max_tokens=1)
        plan, _ = driver.step()
        assert list(shares(plan)) == ["running"]
        assert driver.scheduler.waiting_ids == ("big", "small")

    def test_long_prompt_waits_until_all_of_it_fits(self, make_driver):
        """Scenario 32: a first chunk that would fit is not started when the whole prompt would not."""
        driver = make_driver(num_blocks=9, budget=20)
        driver.add("running", range(16), max_tokens=3)
        driver.step()
        driver.add("long", range(100, 128), max_tokens=1)
        assert list(shares(driver.step()[0])) == ["running"]
        driver.step()
        assert shares(driver.step()[0]) == {"long": 20}

    def test_waiting_is_counted_once(self, make_driver):
        """Scenario 66: looked up in every step it waits, counted when it is admitted."""
        driver = make_driver(num_blocks=9)
        driver.add("running", range(16), max_tokens=6)
        driver.step()
        driver.scheduler.take_stats()
        driver.add("big", range(100, 124), max_tokens=1)
        for _ in range(4):
            driver.step()
            assert driver.scheduler.take_stats().queries == 0
        driver.run()
        stats = driver.scheduler.take_stats()
        assert (stats.requests, stats.queries, stats.hits) == (1, 24, 0)

    @pytest.mark.parametrize("async_scheduling", [False, True])
    def test_created_tokens(self, make_driver, async_scheduling):
        """With the first output it is known how much of the prompt this request put into the cache."""
        driver = make_driver(async_scheduling=async_scheduling)
        first = driver.add("a", range(13), max_tokens=1)
        driver.run()
        second = driver.add("b", [*range(13), *range(20, 25)], max_tokens=1)
        driver.run()
        assert [(r.cached_tokens, r.created_tokens) for r in (first, second)] == [(0, 12), (12, 4)]

    def test_output_tokens_are_cache_too(self, make_driver):
        """A next turn that contains the reply finds it cached, all but its last token, which was never computed."""
        driver = make_driver()
        driver.add("turn1", range(6), max_tokens=10)
        driver.run()
        reply = list(range(100, 110))
        turn2 = driver.add("turn2", [*range(6), *reply, 1, 2, 3], max_tokens=1)
        driver.step()
        assert turn2.cached_tokens == (6 + 10 - 1) // 4 * 4

    def test_output_blocks_have_the_hashes_of_a_prompt(self, make_driver):
        """A block completed by output tokens is announced under the hash a prompt with the same tokens would have."""
        driver = make_driver()
        driver.add("a", range(6), max_tokens=4)
        results = [driver.step()[1] for _ in range(4)]
        announced = [h for result in results for event in result.events for h in event.block_hashes]
        expected = driver.hasher.hash_tokens([*range(6), 100, 101], 4)
        assert announced == [hash64(digest) for digest in expected]


class TestPreemption:
    """When blocks run out."""

    @pytest.fixture
    def pressed(self, make_driver):
        """Two requests of 16 tokens fill 8 of 9 blocks; a third waits."""
        driver = make_driver(num_blocks=10, max_model_len=36)
        driver.add("a", range(16), max_tokens=20)
        driver.add("b", range(100, 116), max_tokens=20)
        driver.step()
        driver.add("c", range(200, 202), max_tokens=1)
        return driver

    def test_last_admitted_is_preempted(self, pressed):
        """Scenario 52: `a` takes the last block, so `b` gives its blocks up, and nobody waiting is let in this step."""
        plan, _ = pressed.step()
        assert list(shares(plan)) == ["a"]
        assert [request.request_id for request in plan.preempted] == ["b"]
        assert pressed.scheduler.waiting_ids == ("b", "c")

    def test_preempted_request_is_resumed_with_its_cache(self, pressed):
        """Scenario 30: it looks itself up, outputs included; the first admission's hit is what it reports."""
        pressed.step()
        before = pressed.scheduler.take_stats()
        assert (before.requests, before.preempted_requests) == (2, 0)
        pressed.scheduler.abort("a")
        plan, _ = pressed.step()
        resumed = pressed.requests["b"]
        assert list(shares(plan)) == ["b", "c"]
        assert shares(plan)["b"] == 17 - 16
        assert resumed.cached_tokens == 0
        stats = pressed.scheduler.take_stats()
        assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 17, 16)

    def test_everybody_ends_with_the_same_tokens(self, pressed):
        """Preemption costs time, never output: each request ends with all its tokens in order."""
        pressed.run()
        for name, count in {"a": 20, "b": 20, "c": 1}.items():
            request = pressed.requests[name].request
            assert request.all_token_ids[request.num_prompt_tokens :] == list(range(100, 100 + count))
        assert pressed.scheduler.usage == 0
        assert pressed.cache.num_free_blocks == 9


class TestEnds:
    """How requests end."""

    def test_length(self, make_driver):
        """`max_tokens` ends a request with reason length."""
        driver = make_driver()
        request = driver.add("a", range(4), max_tokens=3)
        driver.run()
        assert (request.finish_reason, request.request.num_output_tokens) == (FinishReason.LENGTH, 3)

    def test_model_length(self, make_driver):
        """So does the model's context."""
        driver = make_driver(max_model_len=10)
        request = driver.add("a", range(4), max_tokens=100)
        driver.run()
        assert (request.finish_reason, request.request.num_tokens) == (FinishReason.LENGTH, 10)

    def test_end_of_text(self, make_driver):
        """The end-of-text token ends a request with reason stop and counts as output."""
        driver = make_driver()
        request = driver.add("a", range(4), end=2, max_tokens=10)
        driver.run()
        assert (request.finish_reason, request.request.num_output_tokens) == (FinishReason.STOP, 3)

    @pytest.mark.parametrize("params", [{"ignore_eos": True}, {"min_tokens": 6}])
    def test_end_of_text_can_be_ignored(self, make_driver, params):
        """`ignore_eos`, or `min_tokens` not reached: the request goes on."""
        driver = make_driver()
        request = driver.add("a", range(4), end=2, max_tokens=6, **params)
        driver.run()
        assert (request.finish_reason, request.request.num_output_tokens) == (FinishReason.LENGTH, 6)

    def test_abort_frees_blocks(self, make_driver):
        """A running and a waiting request leave at once; nothing stays allocated."""
        driver = make_driver(seqs=1)
        driver.add("a", range(13), max_tokens=9)
        driver.add("b", range(13), max_tokens=9)
        driver.step()
        assert driver.scheduler.usage == pytest.approx(0.4)
        assert driver.scheduler.abort("a") is driver.requests["a"]
        assert driver.scheduler.abort("b") is driver.requests["b"]
        assert (driver.scheduler.usage, driver.scheduler.has_requests) == (0, False)
        assert driver.scheduler.abort("a") is None

    def test_abort_in_mid_step(self, make_driver):
        """A request aborted while its step runs gets no more tokens; the others get theirs."""
        driver = make_driver()
        driver.add("a", range(5), max_tokens=9)
        driver.add("b", range(50, 55), max_tokens=9)
        plan = driver.scheduler.schedule()
        driver.scheduler.abort("a")
        result = driver.finish(plan)
        assert [output.request_id for output in result.outputs] == ["b"]
        assert driver.requests["a"].finish_reason is FinishReason.ABORT


class TestReset:
    """Forgetting the cache."""

    def test_refused_while_a_request_runs(self, make_driver):
        """Scenario 23: blocks in use, nothing happens."""
        driver = make_driver()
        driver.add("a", range(8), max_tokens=9)
        driver.step()
        assert not driver.scheduler.reset_prefix_cache()

    def test_event_comes_with_the_next_step(self, make_driver):
        """Scenario 55: reset while idle is announced before the next step's stores; the prompt is cold again."""
        driver = make_driver()
        driver.add("a", range(8), max_tokens=1)
        driver.run()
        assert driver.scheduler.reset_prefix_cache()
        again = driver.add("b", range(8), max_tokens=1)
        _, result = driver.step()
        assert [type(event) for event in result.events] == [AllBlocksCleared, BlockStored]
        assert again.cached_tokens == 0
