"""A pick leaves a record that says what was seen, what was chosen and why."""

import json

import msgspec
import pytest

from kvatlas.clock import ManualClock
from kvatlas.errors import NoWorkerAvailable
from kvatlas.routing import Candidate, DecisionLog, Picker, RoutingRequest, make_policy


def worker(name, hit=0, *, confidence=1.0, queued=0):
    """A candidate that computes 1,000 prompt tokens a second."""
    return Candidate(
        worker_id=name,
        hit_tokens=hit,
        confidence=confidence,
        queued_prefill_tokens=queued,
        running_requests=1,
        waiting_requests=0,
        kv_usage=0.25,
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.01,
        trust="partial" if confidence < 1 else "synced",
        promised_tokens=hit if confidence == 1 else None,
    )


def picker(name="cost", capacity=10):
    """A picker on a standing clock, and its log."""
    log = DecisionLog(capacity)
    return Picker(make_policy(name), ManualClock(wall_s=1234.5), log), log


def test_a_record_holds_what_the_decision_rested_on():
    """Time, policy, candidates with scores and terms, order and prediction are all there."""
    pick, log = picker()
    record = pick.pick(RoutingRequest("r1", 4000), [worker("a"), worker("b", 3000)])
    assert record == log.get("r1")
    assert (record.wall_s, record.policy, record.prompt_tokens, record.score_unit) == (1234.5, "cost", 4000, "s")
    assert (record.chosen, record.order, record.predicted_tokens) == ("b", ("b", "a"), 3000)
    assert [score.score for score in record.candidates] == pytest.approx([6.001, 1.501])
    assert record.candidates[1].terms.prefill_s == pytest.approx(1.0)
    assert record.reason == "b holds 3000 of 4000 tokens, no worker holds more"


def test_the_reason_says_why_the_longest_match_lost():
    """The loser's queue and both scores are named."""
    pick, _ = picker()
    record = pick.pick(RoutingRequest("r", 4000), [worker("a", 3000, confidence=0.9, queued=9000), worker("b", 1000)])
    assert record.chosen == "b"
    assert record.reason.startswith("a holds 3000 of 4000 tokens at confidence 0.90 and lost: it scores 10.95 s")
    assert "9000 tokens queued" in record.reason
    assert "of b, which holds 1000" in record.reason


def test_the_reason_covers_the_plain_cases():
    """One candidate, and nobody with a match."""
    pick, _ = picker()
    assert pick.pick(RoutingRequest("r", 10), [worker("a")]).reason == "a is the only eligible worker"
    assert pick.pick(RoutingRequest("r", 10), [worker("a"), worker("b")]).reason.startswith(
        "no worker holds this prefix"
    )


def test_policies_without_a_cost_are_recorded_too():
    """Records of round robin have scores in turns and no terms."""
    pick, _ = picker("round_robin")
    record = pick.pick(RoutingRequest("r", 10), [worker("a"), worker("b", 5)])
    assert pick.policy_name == record.policy == "round_robin"
    assert [score.terms for score in record.candidates] == [None, None]
    assert "turns" in record.reason


def test_no_candidates_is_an_error_with_a_status():
    """The gateway answers 503 from it."""
    pick, log = picker()
    with pytest.raises(NoWorkerAvailable) as caught:
        pick.pick(RoutingRequest("r", 10), [])
    assert caught.value.http_status == 503
    assert len(log) == 0


def test_the_log_keeps_the_newest_decisions_only():
    """A full log drops the oldest; a repeated id replaces its record and counts as new."""
    pick, log = picker(capacity=3)
    for name in ("r1", "r2", "r3", "r1", "r4"):
        pick.pick(RoutingRequest(name, 10), [worker("a")])
    assert log.get("r2") is None
    assert [record.request_id for record in log.recent(10)] == ["r4", "r1", "r3"]
    assert [record.request_id for record in log.recent(1)] == ["r4"]


def test_a_log_of_no_capacity_keeps_nothing():
    """Capacity 0 turns the log off."""
    pick, log = picker(capacity=0)
    assert pick.pick(RoutingRequest("r", 10), [worker("a")]).chosen == "a"
    assert len(log) == 0


def test_an_outcome_completes_the_record():
    """What the engine reported stands beside the prediction; a lost record is no error."""
    pick, log = picker()
    pick.pick(RoutingRequest("r", 4000), [worker("a", 3000), worker("b")])
    completed = log.set_outcome("r", actual_tokens=2992, served_by="b")
    assert completed == log.get("r")
    assert (completed.predicted_tokens, completed.actual_tokens, completed.served_by) == (3000, 2992, "b")
    assert log.set_outcome("gone", actual_tokens=1) is None


def test_a_large_fleet_leaves_what_explains_the_pick():
    """Of 40 candidates the record keeps 16: the best ones, and the longest match that lost."""
    pick, _ = picker()
    crowd = [worker(f"w{n}", queued=100 * n) for n in range(39)]
    record = pick.pick(RoutingRequest("r", 4000), [*crowd, worker("long", 3000, queued=90_000)])
    kept = [candidate.worker_id for candidate in record.candidates]
    assert record.num_candidates == 40
    assert len(record.order) == 40
    assert len(kept) == 16
    assert {"w0", "long"} <= set(kept)


def test_a_record_turns_into_json():
    """The admin API sends records as they are."""
    pick, _ = picker()
    shown = json.loads(msgspec.json.encode(pick.pick(RoutingRequest("r", 100), [worker("a", 50), worker("b")])))
    assert shown["chosen"] == "a"
    terms = {"queue_s": 0.0, "prefill_s": 0.05, "decode_s": 0.001, "balance_s": 0.0, "crowding_s": 0.025}
    assert shown["candidates"][0]["terms"] == terms
    assert shown["actual_tokens"] is None


def test_a_decision_is_shown_as_it_was_kept():
    """What is kept makes the same record at once and later, in small and large fleets."""
    pick, log = picker()
    for size in (1, 3, 40):
        crowd = [worker(f"w{n}", hit=10 * n, queued=50 * n) for n in range(size)]
        decision = pick.decide(RoutingRequest(f"r{size}", 4000), crowd)
        record = decision.record()
        assert log.get(f"r{size}") == record
        assert (decision.chosen, decision.predicted_tokens) == (record.chosen, record.predicted_tokens)
        assert log.note_outcome(f"r{size}", actual_tokens=5)
        assert log.get(f"r{size}") == msgspec.structs.replace(record, actual_tokens=5)
    assert not log.note_outcome("gone", actual_tokens=1)


def test_scores_are_the_sums_of_their_terms():
    """The score that ranks is the sum of the terms that explain it, to the last bit."""
    pick, _ = picker()
    crowd = [worker(f"w{n}", hit=7 * n, confidence=n / 5, queued=13 * n) for n in range(6)]
    for _ in range(20):
        for scored in pick.pick(RoutingRequest("r", 1000), crowd).candidates:
            assert scored.terms.total_s == scored.score
