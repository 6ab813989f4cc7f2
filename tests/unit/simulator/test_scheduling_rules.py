"""Who is admitted when, and who is preempted: priorities, adapters, blocked requests, watermarks, pauses, reports."""

import pytest

from kvatlas.hashing import Lora, RequestExtras
from kvatlas.simulator import Blocked, PauseState, SchedulingPolicy


def ids(plan):
    """Who computes something in a step, in order."""
    return [share.request.request_id for share in plan.scheduled]


class TestPriority:
    """Lower value first; last arrival with the largest value goes first when blocks run out."""

    @pytest.fixture
    def driver(self, make_driver):
        """A small engine under the priority policy."""
        return make_driver(num_blocks=10, max_model_len=36, policy=SchedulingPolicy.PRIORITY)

    def test_order_of_admission(self, driver):
        """By priority, then by arrival, whatever the order they were queued in."""
        for name, priority, arrival_s in [("late", 1, 9.0), ("low", 5, 0.0), ("early", 1, 3.0), ("urgent", -2, 8.0)]:
            driver.add(name, range(4), priority=priority, arrival_s=arrival_s, max_tokens=1)
        assert driver.scheduler.waiting_ids == ("urgent", "early", "late", "low")
        assert ids(driver.step()[0]) == ["urgent", "early", "late", "low"]

    def test_choice_of_the_preempted(self, driver):
        """The largest value goes, even when it was admitted first and has had its turn in this step: that is undone."""
        driver.add("low", range(16), priority=5, max_tokens=20)
        driver.step()
        driver.add("high", range(100, 116), priority=0, arrival_s=1.0, max_tokens=20)
        driver.step()
        while not (plan := driver.step()[0]).preempted:
            assert ids(plan) == ["low", "high"]
        assert [request.request_id for request in plan.preempted] == ["low"]
        assert ids(plan) == ["high"]
        assert driver.scheduler.waiting_ids == ("low",)

    def test_everybody_ends_whole(self, driver):
        """A preempted request waits in its place of the order, and every reply is whole in the end."""
        for number in range(6):
            driver.add(
                f"r{number}", range(number * 50, number * 50 + 9), priority=-number, arrival_s=number, max_tokens=12
            )
        driver.run()
        assert all(driver.output(f"r{number}") == list(range(100, 112)) for number in range(6))
        assert driver.scheduler.usage == 0


class TestSkipped:
    """Requests that something else than capacity holds back are stepped over and keep their place."""

    def test_blocked_request(self, make_driver):
        """A request that waits for its grammar lets others pass, is counted as deferred, and goes first once it may."""
        driver = make_driver(seqs=2)
        driver.add("blocked", range(4), blocked=Blocked.GRAMMAR, max_tokens=9)
        driver.add("next", range(4), max_tokens=9)
        assert ids(driver.step()[0]) == ["next"]
        assert (driver.scheduler.num_waiting, driver.scheduler.num_deferred) == (1, 1)
        driver.add("third", range(4), max_tokens=9)
        driver.scheduler.unblock("blocked")
        assert ids(driver.step()[0]) == ["next", "blocked"]
        assert (driver.scheduler.num_waiting, driver.scheduler.num_deferred) == (1, 0)

    def test_one_adapter_too_many(self, make_driver):
        """With room for one adapter, a second one waits until the first is through; the base model is no adapter."""
        driver = make_driver(max_loras=1)
        for name, lora in [("a1", "a"), ("b1", "b"), ("base", None), ("a2", "a")]:
            extras = RequestExtras(lora=Lora(lora, f"/{lora}") if lora else None)
            driver.add(name, range(4), extras=extras, max_tokens=2)
        assert ids(driver.step()[0]) == ["a1", "base", "a2"]
        assert driver.scheduler.loras == (frozenset("a"), frozenset("b"))
        assert ids(driver.step()[0]) == ["a1", "base", "a2"]
        assert ids(driver.step()[0]) == ["b1"]

    def test_order_is_kept(self, make_driver):
        """Those who were skipped wait before those who came later."""
        driver = make_driver(seqs=1)
        for name in "xyz":
            driver.add(name, range(4), blocked=Blocked.GRAMMAR if name != "z" else None, max_tokens=3)
        driver.step()
        assert driver.scheduler.waiting_ids == ("x", "y")


class TestRoom:
    """How much must be free before somebody joins."""

    def test_watermark(self, make_driver):
        """Scenario 31: two of six blocks stay free when a request joins others; alone it may have them."""
        alone = make_driver(num_blocks=6, max_model_len=20, watermark=0.4)
        alone.add("a", range(16), max_tokens=1)
        assert ids(alone.step()[0]) == ["a"]
        joined = make_driver(num_blocks=6, max_model_len=20, watermark=0.4)
        joined.add("first", range(4), max_tokens=3)
        joined.step()
        joined.add("a", range(50, 62), max_tokens=1)
        assert ids(joined.step()[0]) == ["first"]

    @pytest.mark.parametrize(("reserve", "started"), [(True, ["running"]), (False, ["running", "long"])])
    def test_full_sequence_rule(self, make_driver, reserve, started):
        """Scenario 32: a first chunk that fits is started only without the rule that the whole prompt must fit."""
        driver = make_driver(num_blocks=9, budget=10, reserve_full_sequence=reserve)
        driver.add("running", range(16), max_tokens=3)
        driver.step()
        driver.step()
        driver.add("long", range(100, 128), max_tokens=1)
        assert ids(driver.step()[0]) == started

    def test_without_chunked_prefill(self, make_driver):
        """A prompt over what is left of the budget waits for a step that has room for it, and nobody passes it."""
        driver = make_driver(budget=16, enable_chunked_prefill=False)
        driver.add("running", range(3), max_tokens=2)
        driver.step()
        driver.add("long", range(100, 116), max_tokens=1)
        driver.add("short", range(200, 202), max_tokens=1)
        assert ids(driver.step()[0]) == ["running"]
        assert ids(driver.step()[0]) == ["long"]

    def test_long_prompts_share(self, make_driver):
        """A prompt takes at most the threshold of a step it shares, and all of it when it is alone."""
        driver = make_driver(num_blocks=21, max_model_len=76, budget=24, long_prefill_tokens=8)
        driver.add("a", range(20), max_tokens=1)
        driver.add("b", range(100, 120), max_tokens=1)
        assert [share.num_tokens for share in driver.step()[0].scheduled] == [8, 8]
        driver.scheduler.abort("b")
        assert [share.num_tokens for share in driver.step()[0].scheduled] == [12]


class TestReading:
    """Requests that do not read the cache, and requests that report what they read."""

    def test_skip_reading(self, make_driver):
        """Scenario 27: nothing is hit or counted, everything is computed, and the duplicates are announced."""
        driver = make_driver()
        driver.add("a", range(8), max_tokens=1)
        driver.run()
        driver.scheduler.take_stats()
        again = driver.add("b", range(8), skip_reading_prefix_cache=True, max_tokens=1)
        plan, result = driver.step()
        assert plan.num_tokens == 8
        assert again.cached_tokens == 0
        assert [len(event.block_hashes) for event in result.events] == [2]
        assert driver.scheduler.take_stats().queries == 0

    def test_full_report(self, make_driver):
        """Scenario 57: the hit chain is announced from block 0 at every lookup, failed admissions included."""
        driver = make_driver(num_blocks=9)
        driver.add("a", range(12), max_tokens=1)
        driver.run()
        driver.add("running", range(100, 117), max_tokens=4)
        driver.step()
        driver.add("b", range(16), report_mode="full", max_tokens=1)
        steps = [driver.step()[1] for _ in range(3)]
        from_block_0 = [[event for event in step.events if event.parent_block_hash is None] for step in steps]
        assert [[len(event.block_hashes) for event in events] for events in from_block_0] == [[3]] * 3
        assert driver.scheduler.waiting_ids == ("b",)


class TestPause:
    """Resting, in part or wholly."""

    def test_no_new(self, make_driver):
        """Running requests go on to their end; new ones wait until the pause is over."""
        driver = make_driver()
        driver.add("a", range(4), max_tokens=2)
        driver.step()
        driver.scheduler.set_pause(PauseState.NO_NEW)
        driver.add("b", range(4), max_tokens=1)
        assert ids(driver.step()[0]) == ["a"]
        assert not driver.scheduler.has_requests
        assert driver.scheduler.num_unfinished == 1
        driver.scheduler.set_pause(PauseState.RUNNING)
        assert ids(driver.step()[0]) == ["b"]

    def test_all(self, make_driver):
        """Nothing is scheduled; requests keep their blocks and go on where they were."""
        driver = make_driver()
        driver.add("a", range(4), max_tokens=3)
        driver.step()
        driver.scheduler.set_pause(PauseState.ALL)
        assert not driver.scheduler.has_requests
        assert ids(driver.step()[0]) == []
        assert driver.scheduler.usage > 0
        driver.scheduler.set_pause(PauseState.RUNNING)
        driver.run()
        assert driver.output("a") == [100, 101, 102]

    def test_abort_all(self, make_driver):
        """Running and waiting requests end at once, running ones first; nothing stays allocated."""
        driver = make_driver(seqs=1)
        driver.add("a", range(4), max_tokens=3)
        driver.add("b", range(4), max_tokens=3)
        driver.step()
        assert [request.request_id for request in driver.scheduler.abort_all()] == ["a", "b"]
        assert (driver.scheduler.num_unfinished, driver.scheduler.usage) == (0, 0)


class TestResetRunning:
    """`reset_running_requests`."""

    def test_requests_start_over_in_order(self, make_driver):
        """Scenario 54: all are preempted, the reset succeeds, and they resume with no hit, first admitted first."""
        driver = make_driver()
        for name in "abc":
            driver.add(name, range(ord(name), ord(name) + 9), max_tokens=4)
        driver.step()
        driver.step()
        assert driver.scheduler.reset_prefix_cache(reset_running=True)
        assert driver.scheduler.waiting_ids == ("a", "b", "c")
        plan, _ = driver.step()
        assert [(share.request.request_id, share.start_tokens) for share in plan.scheduled] == [
            ("a", 0),
            ("b", 0),
            ("c", 0),
        ]
        assert ids(plan) == [request.request_id for request in plan.resumed]
        driver.run()
        assert [driver.output(name) for name in "abc"] == [[100, 101, 102, 103]] * 3
