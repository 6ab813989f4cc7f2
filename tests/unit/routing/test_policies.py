"""What each routing policy prefers, and how it breaks ties."""

from collections import Counter

import pytest

from kvatlas.errors import ConfigError
from kvatlas.routing import (
    DEFAULT_POLICY,
    POLICY_NAMES,
    Candidate,
    PolicySettings,
    RoutingRequest,
    cost_terms,
    make_policy,
    uncached_tokens,
)

PROMPT = RoutingRequest("r", prompt_tokens=10_000, max_tokens=100)


def worker(name, hit=0, *, confidence=1.0, queued=0, running=0, waiting=0):
    """A candidate that computes 10,000 prompt tokens a second."""
    return Candidate(
        worker_id=name,
        hit_tokens=hit,
        confidence=confidence,
        queued_prefill_tokens=queued,
        running_requests=running,
        waiting_requests=waiting,
        kv_usage=0.5,
        prefill_tokens_per_s=10_000.0,
        decode_step_s=0.02,
        trust="synced",
    )


def chosen(policy, candidates, request=PROMPT):
    """The name of the worker a policy puts first."""
    return candidates[policy.pick(request, candidates).order[0]].worker_id


def test_cost_is_the_default_and_every_name_makes_its_policy():
    """The registry's names and the policies' own names agree."""
    assert DEFAULT_POLICY == "cost"
    assert [make_policy(name).name for name in POLICY_NAMES] == list(POLICY_NAMES)
    assert set(POLICY_NAMES) == {"cost", "round_robin", "random", "least_loaded", "longest_prefix"}


def test_an_unknown_policy_name_is_answered_with_the_known_ones():
    """A wrong name in a configuration is a ConfigError that lists the choices."""
    with pytest.raises(ConfigError, match="longest_prefix"):
        make_policy("fastest")


def test_cost_prefers_the_longest_hit_among_idle_workers():
    """With no queues, the worker that has most of the prompt answers first."""
    assert chosen(make_policy("cost"), [worker("a", 2000), worker("b", 8000), worker("c")]) == "b"


def test_cost_leaves_a_hit_when_its_queue_outweighs_it():
    """8,000 cached tokens save their own time and half of it again for requests behind: worth 12,000 queued ones."""
    assert chosen(make_policy("cost"), [worker("a", 8000, queued=13_000), worker("b")]) == "b"
    assert chosen(make_policy("cost"), [worker("a", 8000, queued=11_000), worker("b")]) == "a"


def test_cost_discounts_a_hit_it_does_not_trust():
    """Half believed 8,000 tokens lose against 5,000 certain ones."""
    assert chosen(make_policy("cost"), [worker("a", 8000, confidence=0.5), worker("b", 5000)]) == "b"


def test_cost_counts_requests_that_run_and_wait():
    """Between equal hits and queues, decoding and waiting requests decide."""
    assert chosen(make_policy("cost"), [worker("a", running=60), worker("b", running=3)]) == "b"
    assert chosen(make_policy("cost"), [worker("a", waiting=9), worker("b", waiting=1)]) == "b"


def test_cost_terms_add_up_to_the_score_in_seconds():
    """Queue, prefill and decode are seconds, and the last token is always computed."""
    terms = cost_terms(10_000, worker("a", 10_000, queued=5000, running=10, waiting=2), decode_share=0.1)
    assert terms.queue_s == pytest.approx(0.5)
    assert terms.prefill_s == pytest.approx(0.0001)
    assert terms.decode_s == pytest.approx(3 * 0.02)
    assert terms.total_s == pytest.approx(0.5601)
    assert uncached_tokens(100, worker("a", 100)) == 1.0
    ranking = make_policy("cost").pick(PROMPT, [worker("a", 4000, queued=700)])
    assert ranking.scores == (ranking.terms[0].total_s,)
    assert ranking.score_unit == "s"


def test_cold_equal_workers_share_evenly():
    """Without hits or load, cost gives every worker its turn."""
    for seed in range(3):
        policy = make_policy("cost", seed=seed)
        candidates = [worker(name) for name in "abcde"]
        counts = Counter(chosen(policy, candidates) for _ in range(50))
        assert counts == dict.fromkeys("abcde", 10)


def test_gateways_with_other_seeds_begin_with_other_workers():
    """Equal workers are taken in an order that depends on the seed: no herd at start."""
    firsts = {chosen(make_policy("cost", seed=seed), [worker(name) for name in "abcdefgh"]) for seed in range(20)}
    assert len(firsts) > 3


def test_a_nearly_equal_score_counts_as_a_tie():
    """A difference of a percent is settled by requests held, not by the percent."""
    assert chosen(make_policy("cost"), [worker("a", 5050, running=1), worker("b", 5000)]) == "b"
    exact = PolicySettings(tie_share=0.0, tie_floor_s=0.0, decode_share=0.0)
    assert chosen(make_policy("cost", settings=exact), [worker("a", 5050, running=1), worker("b", 5000)]) == "a"


def test_a_short_hit_does_not_draw_all_new_conversations_to_one_worker():
    """On an idle fleet where one worker holds what all prompts begin with, the others still get their part."""
    policy = make_policy("cost")
    counts = Counter(chosen(policy, [worker("a", 1000), *(worker(name) for name in "bcd")]) for _ in range(400))
    assert max(counts.values()) <= 1.5 * 100
    without = make_policy("cost", settings=PolicySettings(balance_weight=0.0))
    assert chosen(without, [worker("a", 1000), worker("b")]) == chosen(without, [worker("a", 1000), worker("b")]) == "a"


def test_a_conversation_stays_where_it_is_when_others_are_idle():
    """A long hit survives the surcharge: most of the prompt is there."""
    policy = make_policy("cost")
    assert {chosen(policy, [worker("a", 9500), worker("b", 500), worker("c")]) for _ in range(50)} == {"a"}


def test_round_robin_is_even_for_each_set_of_candidates():
    """Two models behind one gateway do not take each other's turns, and the listing order does not matter."""
    policy = make_policy("round_robin")
    first, second = [worker(name) for name in "abc"], [worker(name) for name in "cd"]
    counts = {"first": Counter(), "second": Counter()}
    for turn in range(60):
        counts["first"][chosen(policy, first if turn % 2 else first[::-1])] += 1
        counts["second"][chosen(policy, second)] += 1
    assert counts["first"] == dict.fromkeys("abc", 20)
    assert counts["second"] == dict.fromkeys("cd", 30)


def test_round_robin_fails_over_to_the_next_in_turn():
    """The order after the first is the coming turns."""
    policy = make_policy("round_robin")
    candidates = [worker(name) for name in "abc"]
    assert policy.pick(PROMPT, candidates).order == (0, 1, 2)
    assert policy.pick(PROMPT, candidates).order == (1, 2, 0)


def test_round_robin_forgets_sets_it_has_not_seen_for_long():
    """Memory stays bounded while candidate sets change."""
    policy = make_policy("round_robin")
    for number in range(5000):
        policy.pick(PROMPT, [worker(f"w{number}"), worker("z")])
    assert len(policy._turns) <= 1024


def test_random_repeats_itself_with_the_same_seed_only():
    """Draws come from the seed, and reach every worker."""
    candidates = [worker(name) for name in "abcd"]
    one, same, other = (make_policy("random", seed=seed) for seed in (7, 7, 8))
    first = [chosen(one, candidates) for _ in range(200)]
    assert first == [chosen(same, candidates) for _ in range(200)]
    assert first != [chosen(other, candidates) for _ in range(200)]
    assert min(Counter(first).values()) > 30


def test_least_loaded_looks_at_requests_then_queued_tokens():
    """Hits do not count; equal workers take turns."""
    policy = make_policy("least_loaded")
    assert chosen(policy, [worker("a", 9000, running=2), worker("b", running=1)]) == "b"
    assert chosen(policy, [worker("a", queued=10), worker("b", queued=5)]) == "b"
    counts = Counter(chosen(policy, [worker("c"), worker("d")]) for _ in range(10))
    assert counts == {"c": 5, "d": 5}


def test_longest_prefix_breaks_ties_by_load():
    """The hit decides, whatever the queue; load only among equals."""
    policy = make_policy("longest_prefix")
    assert chosen(policy, [worker("a", 512, queued=10**6, running=99), worker("b", 0)]) == "a"
    assert chosen(policy, [worker("a", 512, running=3), worker("b", 512, running=2)]) == "b"
    assert chosen(policy, [worker("a", 512, confidence=0.1), worker("b", 256)]) == "b"


def test_memory_of_picks_stays_bounded_while_workers_come_and_go():
    """Pods that are replaced under new names all day do not grow the policy."""
    policy = make_policy("cost")
    for number in range(20_000):
        policy.pick(PROMPT, [worker(f"pod-{number}")])
    assert len(policy._turns._last_turn) <= 4097
    assert len(policy._recent._scaled_tokens) <= 4097
