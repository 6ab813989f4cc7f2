"""Asynchronous scheduling: a step is planned before the tokens of the one that runs are known."""

import pytest

from kvatlas.events import BlockStored
from kvatlas.simulator import FinishReason


@pytest.fixture
def make_async(make_driver):
    """A driver factory with asynchronous scheduling."""
    return lambda *args, **settings: make_driver(*args, async_scheduling=True, **settings)


def stored(result):
    """Blocks in each BlockStored of a step."""
    return [len(event.block_hashes) for event in result.events if isinstance(event, BlockStored)]


def shares(plan):
    """Request id -> tokens computed."""
    return {share.request.request_id: share.num_tokens for share in plan.scheduled}


def test_a_token_is_computed_before_it_is_known(make_async):
    """The second step computes the first output token, which the first step has still to say."""
    driver = make_async()
    request = driver.add("a", range(6), max_tokens=9)
    first = driver.scheduler.schedule()
    second = driver.scheduler.schedule()
    assert (shares(first), shares(second)) == ({"a": 6}, {"a": 1})
    assert (request.request.num_computed_tokens, request.num_placeholders, request.request.num_tokens) == (7, 2, 6)
    assert [output.token_ids for output in driver.finish(first).outputs] == [(100,)]
    assert (request.request.num_tokens, request.num_placeholders) == (7, 1)
    assert [output.token_ids for output in driver.finish(second).outputs] == [(101,)]


def test_a_block_is_announced_when_its_last_token_is_known(make_async):
    """Scenario 53: the step that fills a block does not announce it, nor does the update before its own: the last token
    is a placeholder until then. What is announced never goes beyond computed minus placeholders.
    """
    driver = make_async()
    request = driver.add("a", range(6), max_tokens=9)
    plans = [driver.scheduler.schedule(), driver.scheduler.schedule()]
    assert stored(driver.finish(plans[0])) == [1]  # the prompt's first block, at allocation
    plans.append(driver.scheduler.schedule())
    assert request.request.num_computed_tokens == 8
    assert driver.cache.num_cached_keys == 1
    assert stored(driver.finish(plans[1])) == []
    assert (request.request.num_tokens, request.num_placeholders) == (8, 1)
    assert stored(driver.finish(plans[2])) == [1]


def test_nothing_is_planned_behind_the_last_token(make_async):
    """When the running steps reach `max_tokens`, the next plan leaves the request out."""
    driver = make_async()
    driver.add("a", range(4), max_tokens=2)
    plans = [driver.scheduler.schedule() for _ in range(2)]
    assert not driver.finish(plans[0]).finished
    assert shares(driver.scheduler.schedule()) == {}
    assert [request.request_id for request in driver.finish(plans[1]).finished] == ["a"]
    assert driver.scheduler.usage == 0


def test_an_end_nobody_foresaw_wastes_a_step(make_async):
    """An end of text in the first step is seen when the second runs already: its token is thrown away."""
    driver = make_async()
    request = driver.add("a", range(4), end=0, max_tokens=9)
    plans = [driver.scheduler.schedule() for _ in range(2)]
    assert driver.finish(plans[0]).finished == (request,)
    result = driver.finish(plans[1])
    assert (result.outputs, request.finish_reason) == ((), FinishReason.STOP)
    assert (request.request.num_output_tokens, driver.scheduler.usage) == (1, 0)


def test_output_of_a_preempted_request_is_kept(make_async):
    """A request preempted while its step runs gets that step's token, waits until it came, and then starts over."""
    driver = make_async(num_blocks=10, max_model_len=36)
    driver.add("a", range(16), max_tokens=20)
    driver.add("b", range(100, 116), max_tokens=20)
    first = driver.scheduler.schedule()
    second = driver.scheduler.schedule()
    assert [request.request_id for request in second.preempted] == ["b"]
    victim = driver.requests["b"]
    assert victim.num_stale_tokens == 16
    driver.scheduler.abort("a")
    assert shares(driver.scheduler.schedule()) == {}  # resumed now, it would compute what the first step still brings
    assert [output.request_id for output in driver.finish(first).outputs] == ["b"]
    assert driver.output("b") == [100]
    assert shares(driver.scheduler.schedule()) == {"b": 1}
    assert second.num_tokens == 1


def test_output_dropped_by_a_reset(make_async):
    """After `reset_running_requests` the running step's tokens are thrown away, and the positions computed again."""
    driver = make_async()
    driver.add("a", range(6), max_tokens=3)
    running = [driver.scheduler.schedule(), driver.scheduler.schedule()]
    assert driver.scheduler.reset_prefix_cache(reset_running=True)
    resumed = driver.scheduler.schedule()
    assert shares(resumed) == {"a": 6}
    assert [driver.finish(plan).outputs for plan in running] == [(), ()]
    assert driver.output("a") == []
    driver.finish(resumed)
    driver.run()
    assert driver.output("a") == [100, 101, 102]


@pytest.mark.parametrize("prompt_tokens", [5, 8, 16])
def test_the_same_blocks_as_step_by_step(make_driver, prompt_tokens):
    """Whatever the overlap, a request leaves the same blocks in the cache, announced in the same order."""
    announced = []
    for async_scheduling in (False, True):
        driver = make_driver(async_scheduling=async_scheduling)
        driver.add("a", range(prompt_tokens), max_tokens=15)
        running = []
        blocks = []
        while driver.scheduler.has_requests:
            while len(running) < 1 + async_scheduling:
                running.append(driver.scheduler.schedule())
            for event in driver.finish(running.pop(0)).events:
                blocks += event.block_hashes
        announced.append(blocks)
    assert announced[0] == announced[1]
    assert len(announced[0]) == (prompt_tokens + 14) // 4


class TestDrafts:
    """Speculative decoding."""

    def test_drafts_are_not_hashed(self, make_driver):
        """Scenario 28: 7 known tokens and 3 drafts fill two blocks, but only the first is announced until accepted."""
        driver = make_driver(num_speculative_tokens=3)
        driver.add("a", range(6), max_tokens=12)
        assert stored(driver.step()[1]) == [1]
        plan = driver.scheduler.schedule()
        (share,) = plan.scheduled
        assert (share.num_tokens, share.num_drafts, share.is_decode) == (4, 3, True)
        assert driver.cache.num_cached_keys == 1
        assert [output.token_ids for output in driver.finish(plan, accepted=1).outputs] == [(101, 102)]
        assert driver.cache.num_cached_keys == 1
        assert stored(driver.step()[1]) == [1]
        assert driver.cache.num_cached_keys == 2

    @pytest.mark.parametrize("async_scheduling", [False, True])
    @pytest.mark.parametrize("accepted", [0, 1, 3])
    def test_rejected_slots_are_used_again(self, make_driver, async_scheduling, accepted):
        """Tokens come out in order, none lost or doubled, however many drafts are right and however steps overlap."""
        driver = make_driver(num_blocks=21, num_speculative_tokens=3, async_scheduling=async_scheduling)
        for name in "ab":
            driver.add(name, range(7), max_tokens=14)
        running = []
        while driver.scheduler.has_requests:
            while len(running) < 1 + async_scheduling:
                running.append(driver.scheduler.schedule())
            driver.finish(running.pop(0), accepted=accepted)
        assert driver.output("a") == driver.output("b") == list(range(100, 114))
        assert driver.scheduler.usage == 0

    def test_an_end_among_the_drafts(self, make_driver):
        """Accepted tokens behind the one that ends the reply are thrown away."""
        driver = make_driver(num_speculative_tokens=3)
        request = driver.add("a", range(6), end=2, max_tokens=12)
        driver.step()
        result = driver.finish(driver.scheduler.schedule(), accepted=3)
        assert [output.token_ids for output in result.outputs] == [(101, 999)]
        assert request.finish_reason is FinishReason.STOP

    def test_a_request_that_lacks_one_token_joins_as_wide(self, make_driver):
        """A resumed request that lacks one token is padded with drafts that cannot be right, like those it joins."""
        driver = make_driver(num_blocks=10, max_model_len=36, num_speculative_tokens=2)
        driver.add("a", range(8), max_tokens=1)
        driver.run()
        driver.add("b", range(9), max_tokens=5)
        (share,) = driver.step()[0].scheduled
        assert (share.start_tokens, share.num_tokens, share.num_drafts, share.drafts_are_padding) == (8, 3, 2, True)
        assert driver.output("b") == [100]

    def test_a_draft_model_needs_slots_ahead(self, make_driver):
        """Lookahead tokens get blocks without being computed or cached."""
        plain, ahead = make_driver(), make_driver(lookahead_tokens=3)
        for driver in (plain, ahead):
            driver.add("a", range(6), max_tokens=3)
            driver.step()
        assert len(plain.cache.block_ids("a")[0]) == 2
        assert len(ahead.cache.block_ids("a")[0]) == 3
        assert ahead.cache.num_cached_keys == 1
