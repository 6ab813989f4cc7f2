"""Promises against reports."""

import pytest

from kvatlas.fleet import PredictionAudit


@pytest.mark.parametrize(
    ("predicted", "reported", "counts"), [(64, 64, (1, 0, 0)), (64, 32, (0, 1, 0)), (32, 64, (0, 0, 1))]
)
def test_each_comparison_is_equal_over_or_under(predicted: int, reported: int, counts: tuple[int, int, int]) -> None:
    """Over-claims and under-claims are told apart, and the sums of both sides are kept."""
    audit = PredictionAudit()
    audit.record(predicted, reported)
    assert (audit.equal, audit.over, audit.under) == counts
    assert (audit.compared, audit.predicted_tokens, audit.reported_tokens) == (1, predicted, reported)
