"""Why predictions fail, and when failing ones are too many."""

import pytest

from kvatlas.fleet import Cause, PredictionAudit, cause_of

PLAIN = {"parity": True, "same_epoch": True, "removed": False, "stored": False, "block_size": 16}


@pytest.mark.parametrize(
    ("error_tokens", "changes", "cause"),
    [
        (0, {"parity": False}, None),
        (32, {}, Cause.UNEXPLAINED),
        (32, {"removed": True}, Cause.EVICTED),
        (32, {"stored": True}, Cause.UNEXPLAINED),
        (32, {"same_epoch": False, "removed": True}, Cause.STALE),
        (32, {"parity": False, "removed": True}, Cause.PARITY),
        (8, {"removed": True}, Cause.BELOW_BLOCK),
        (-8, {}, Cause.BELOW_BLOCK),
        (-32, {}, Cause.UNEXPLAINED),
        (-32, {"stored": True}, Cause.IN_FLIGHT),
        (-32, {"removed": True}, Cause.UNEXPLAINED),
    ],
)
def test_causes(error_tokens: int, changes: dict[str, bool], cause: Cause | None) -> None:
    """The first cause that fits is named: our count, the unit, the stream, the cache; else none is known."""
    assert cause_of(error_tokens, **(PLAIN | changes)) is cause


def test_errors_are_counted_by_direction_and_cause() -> None:
    """Over- and under-claims are told apart, each with its cause."""
    audit = PredictionAudit()
    audit.record(32, 16, Cause.EVICTED)
    audit.record(16, 32, Cause.IN_FLIGHT)
    audit.record(16, 32, Cause.IN_FLIGHT)
    audit.record(16, 16)
    assert audit.over_by_cause == {Cause.EVICTED: 1}
    assert audit.under_by_cause == {Cause.IN_FLIGHT: 2}
    assert (audit.over, audit.under, audit.equal, audit.compared) == (1, 2, 1, 4)


def test_three_unexplained_overclaims_of_sixteen_raise_the_alarm() -> None:
    """The third within sixteen comparisons does, once; explained ones and under-claims never do."""
    audit = PredictionAudit()
    assert not any(audit.record(32, 16, Cause.EVICTED) for _ in range(20))
    assert not any(audit.record(16, 32, Cause.UNEXPLAINED) for _ in range(20))
    assert [audit.record(32, 16, Cause.UNEXPLAINED) for _ in range(4)] == [False, False, True, False]
    assert audit.alarms == 1


def test_rare_ones_do_not() -> None:
    """Two in sixteen, again and again, stay below the alarm."""
    audit = PredictionAudit()
    for number in range(160):
        cause = Cause.UNEXPLAINED if number % 8 == 0 else None
        assert not audit.record(32, 16 if cause else 32, cause)
    assert audit.alarms == 0
