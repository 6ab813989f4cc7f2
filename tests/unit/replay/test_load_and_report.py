"""The seeded load, and the sums over its results."""

import pytest

from kvatlas.replay import ConversationSettings, TurnResult, make_conversations, percentile, summarise


def result(
    worker: str,
    prompt: int,
    cached: int | None,
    *,
    predicted: int | None = None,
    ttft_s: float = 0.1,
    error: str | None = None,
) -> TurnResult:
    return TurnResult("c", 0, worker, 200, error, prompt, cached, predicted, 1, ttft_s, 0.5)


def test_equal_seeds_give_equal_loads() -> None:
    """A load is its settings and its seed."""
    settings = ConversationSettings(conversations=5, turns=3)
    assert make_conversations(settings, 1) == make_conversations(settings, 1)
    assert make_conversations(settings, 1) != make_conversations(settings, 2)


def test_conversations_share_system_prompts_and_nothing_else() -> None:
    """As many different system prompts as asked for; every question is its own."""
    load = make_conversations(ConversationSettings(conversations=40, turns=2, system_prompts=3), 1)
    assert len({conversation.system for conversation in load}) == 3
    questions = [question for conversation in load for question in conversation.questions]
    assert len(set(questions)) == len(questions) == 80
    assert all(len(conversation.pauses_s) == 2 for conversation in load)


def test_summary_counts_tokens_as_engines_report_them() -> None:
    """Hit rate over prompt tokens, work over all workers (idle ones too), predictions only where both numbers are known."""
    summary = summarise(
        [
            result("a", 100, 50, predicted=50, ttft_s=0.1),
            result("a", 100, 0, predicted=10, ttft_s=0.3),
            result("b", 50, None, predicted=10, ttft_s=0.2),
            result("b", 999, 0, error="broken"),
        ],
        worker_count=3,
    )
    assert summary.hit_rate == pytest.approx(50 / 250)
    assert summary.max_over_mean_work == pytest.approx(150 / (200 / 3))
    assert (summary.requests, summary.failed, summary.predicted, summary.predicted_equal) == (3, 1, 2, 1)
    assert (summary.predicted_over, summary.predicted_under) == (1, 0)
    assert summary.ttft_p50_ms == pytest.approx(200)
    assert summary.ttft_p90_ms == pytest.approx(300)


def test_summary_keeps_three_different_errors() -> None:
    """The same failure a hundred times is one line; of many different ones the first three stay, in order."""
    texts = ["refused", "refused", "reset", "refused", "503", "late"]
    summary = summarise([result("", 0, None, error=text) for text in texts], worker_count=1)
    assert summary.errors == ("refused", "reset", "503")


def test_predictions_that_miss_are_told_apart() -> None:
    """Over: promised more than the engine had. Under: less."""
    rows = [result("a", 100, cached, predicted=48) for cached in (0, 16, 48, 64)]
    summary = summarise(rows, worker_count=1)
    assert (summary.predicted_equal, summary.predicted_over, summary.predicted_under) == (1, 2, 1)


def test_summary_of_nothing_is_zero() -> None:
    """A run that never got an answer divides by nothing."""
    summary = summarise([], worker_count=2)
    assert (summary.hit_rate, summary.max_over_mean_work, summary.requests) == (0.0, 0.0, 0)


@pytest.mark.parametrize(("percent", "expected"), [(1, 1.0), (50, 2.0), (75, 3.0), (76, 4.0), (100, 4.0)])
def test_percentile_is_nearest_rank(percent: float, expected: float) -> None:
    """No interpolation: a percentile is a value that occurred."""
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == expected
