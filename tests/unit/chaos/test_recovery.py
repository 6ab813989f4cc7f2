"""How recall is reckoned."""

import math

from kvatlas.chaos import Recovery


def test_recall_weighs_by_asking() -> None:
    """Windows of a quarter turnover; blocks count as often as they are asked for."""
    recovery = Recovery(100)
    recovery.begin(1000)
    recovery.add(1000, held=10, found=0)
    recovery.add(1010, held=30, found=30)
    recovery.add(1030, held=50, found=50)
    assert recovery.recalls() == [(0.0, 0.75), (0.25, 1.0)]
    assert recovery.whole_after() == 0.25


def test_recall_must_stay() -> None:
    """A later window below 99 % puts the time off; what was never whole in a turnover is infinite."""
    recovery = Recovery(100)
    recovery.begin(0)
    for stored, found in ((0, 100), (30, 90), (60, 100), (110, 99)):
        recovery.add(stored, held=100, found=found)
    assert recovery.whole_after() == 0.5
    recovery.add(130, held=100, found=0)
    assert recovery.whole_after() == math.inf


def test_too_short_a_run_says_nothing() -> None:
    """Without a loss, and below one turnover without whole recall, there is no figure."""
    recovery = Recovery(100)
    recovery.add(0, held=1, found=0)
    assert recovery.whole_after() is None
    recovery.begin(0)
    recovery.add(50, held=10, found=1)
    assert recovery.whole_after() is None
    recovery.begin(60)
    assert recovery.recalls() == []
