"""Properties that hold for every policy, or for cost, whatever the candidates and whatever was picked before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.routing import POLICY_NAMES, Candidate, PolicySettings, RoutingRequest, make_policy

EXACT = PolicySettings(tie_share=0.0, tie_floor_s=0.0)


@st.composite
def candidates(draw, min_size=1):
    """Up to eight workers of one speed, in any state."""
    size = draw(st.integers(min_size, 8))
    return [
        Candidate(
            worker_id=f"w{index}",
            hit_tokens=draw(st.integers(0, 4000)),
            confidence=draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])),
            queued_prefill_tokens=draw(st.integers(0, 20_000)),
            running_requests=draw(st.integers(0, 50)),
            waiting_requests=draw(st.integers(0, 20)),
            kv_usage=draw(st.floats(0, 1)),
            prefill_tokens_per_s=8000.0,
            decode_step_s=0.02,
            trust="synced",
        )
        for index in range(size)
    ]


requests = st.integers(1, 8000).map(lambda tokens: RoutingRequest("r", tokens))
histories = st.lists(st.tuples(requests, candidates()), max_size=5)


def warmed(name, history, settings=None):
    """A policy that has already made some picks."""
    policy = make_policy(name, seed=3, settings=settings)
    for request, seen in history:
        policy.pick(request, seen)
    return policy


@pytest.mark.parametrize("name", POLICY_NAMES)
@given(request_=requests, seen=candidates(), history=histories)
def test_the_order_is_a_permutation_and_scores_are_aligned(name, request_, seen, history):
    """Every candidate is ranked once, so failover reaches all of them."""
    ranking = warmed(name, history).pick(request_, seen)
    assert sorted(ranking.order) == list(range(len(seen)))
    assert len(ranking.scores) == len(seen)
    assert len(ranking.terms) in {0, len(seen)}


def dominates(better, worse):
    """Better in every term that cost looks at."""
    return (
        better.believed_tokens > worse.believed_tokens
        and better.queued_prefill_tokens < worse.queued_prefill_tokens
        and better.running_requests < worse.running_requests
        and better.waiting_requests < worse.waiting_requests
    )


@given(request_=requests, seen=candidates(min_size=2), history=histories)
def test_cost_never_prefers_a_candidate_that_is_worse_in_every_term(request_, seen, history):
    """Recent work is a term like the others: it may excuse a pick only where it speaks for it."""
    policy = warmed("cost", history)
    surplus = policy._recent.surpluses(seen)
    best = policy.pick(request_, seen).order[0]
    for index, other in enumerate(seen):
        assert not (dominates(other, seen[best]) and surplus[index] <= surplus[best])


@given(request_=requests, seen=candidates(min_size=2), history=histories, data=st.data())
def test_cost_does_not_depend_on_the_order_of_candidates(request_, seen, history, data):
    """Ties are broken by worker, never by place: any listing gives the same worker."""
    shuffled = data.draw(st.permutations(seen))
    first = warmed("cost", history).pick(request_, seen)
    second = warmed("cost", history).pick(request_, shuffled)
    assert [seen[index].worker_id for index in first.order] == [shuffled[index].worker_id for index in second.order]


@given(request_=requests, seen=candidates(), history=histories)
def test_cost_puts_the_best_score_first_when_ties_are_exact(request_, seen, history):
    """Without a tie margin the order is the order of scores."""
    ranking = warmed("cost", history, EXACT).pick(request_, seen)
    in_order = [ranking.scores[index] for index in ranking.order]
    assert in_order == sorted(in_order)


@given(request_=requests, seen=candidates(), history=histories)
def test_the_tie_margin_never_costs_more_than_it_says(request_, seen, history):
    """The chosen score is within the margin of the best one."""
    ranking = warmed("cost", history).pick(request_, seen)
    best = min(ranking.scores)
    settings = PolicySettings()
    assert ranking.scores[ranking.order[0]] <= best + max(settings.tie_floor_s, settings.tie_share * best)


@pytest.mark.parametrize("name", ["cost", "least_loaded", "longest_prefix", "round_robin"])
@given(size=st.integers(1, 6), rounds=st.integers(1, 5))
def test_equal_workers_get_equal_numbers(name, size, rounds):
    """Workers nothing distinguishes take turns, exactly."""
    seen = [Candidate(f"w{index}", 0, 1.0, 0, 0, 0, 0.0, 8000.0, 0.02, "synced") for index in range(size)]
    policy = make_policy(name, seed=1)
    picks = [policy.pick(RoutingRequest("r", 100), seen).order[0] for _ in range(size * rounds)]
    assert all(picks.count(index) == rounds for index in range(size))
