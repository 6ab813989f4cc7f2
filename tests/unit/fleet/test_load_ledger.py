"""The ledger of what was sent and not seen finished."""

import pytest

from kvatlas.clock import ManualClock
from kvatlas.fleet import FleetSpeed, LoadLedger, PrefillSpeed


@pytest.fixture(name="clock")
def _clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(name="ledger")
def _ledger(clock: ManualClock) -> LoadLedger:
    return LoadLedger(clock, PrefillSpeed(clock, FleetSpeed(1000.0)), decode_step_s=0.01)


def test_dispatch_counts_at_once(ledger: LoadLedger) -> None:
    """The next decision sees the tokens of the last one, before anything was answered."""
    ledger.dispatch(300)
    ledger.dispatch(200)
    assert ledger.in_flight == 2
    assert ledger.queued_prefill_tokens == 500


def test_queue_drains_at_prefill_speed(ledger: LoadLedger, clock: ManualClock) -> None:
    """Requests that give no sign of their first token leave the queue as time passes."""
    ledger.dispatch(500)
    clock.advance(0.2)
    assert ledger.queued_prefill_tokens == 300
    clock.advance(1.0)
    assert ledger.queued_prefill_tokens == 0
    assert ledger.in_flight == 1


def test_first_token_empties_the_queue_before_it(ledger: LoadLedger, clock: ManualClock) -> None:
    """A first token proves that the prefills up to it are done, earlier than reckoned or not."""
    first = ledger.dispatch(200)
    ledger.dispatch(400)
    clock.advance(0.05)
    ledger.first_token(first)
    assert ledger.queued_prefill_tokens == pytest.approx(400, abs=1)
    assert ledger.in_flight == 2


def test_finish_returns_to_zero_and_may_be_repeated(ledger: LoadLedger) -> None:
    """After every request has ended nothing is charged, however they ended."""
    tickets = [ledger.dispatch(100) for _ in range(3)]
    for ticket in tickets:
        ledger.finish(ticket)
        ledger.finish(ticket)
    assert ledger.in_flight == 0
    assert ledger.queued_prefill_tokens == 0


def test_abort_takes_back_only_its_own_share(ledger: LoadLedger) -> None:
    """A request that is aborted before its prefill leaves the queue of the others."""
    aborted = ledger.dispatch(100)
    ledger.dispatch(400)
    ledger.finish(aborted)
    assert ledger.queued_prefill_tokens == 400


def test_whole_answers_leave_the_queue_of_the_others_as_it_is(ledger: LoadLedger, clock: ManualClock) -> None:
    """Five whole answers, one a second: what one of them drained is not taken off the others once more."""
    tickets = [ledger.dispatch(1000) for _ in range(5)]
    queues = []
    for ticket in tickets:
        clock.advance(1.0)
        ledger.finish(ticket)
        queues.append(ledger.queued_prefill_tokens)
    assert queues == [4000, 3000, 2000, 1000, 0]


def test_abort_of_the_one_at_work_leaves_the_next_whole(ledger: LoadLedger, clock: ManualClock) -> None:
    """What the engine had computed of an aborted prompt was not computed of the prompt behind it."""
    aborted = ledger.dispatch(10_000)
    ledger.dispatch(8000)
    clock.advance(9.0)
    ledger.finish(aborted)
    assert ledger.queued_prefill_tokens == 8000


def test_guessed_lengths_measure_nothing(ledger: LoadLedger, clock: ManualClock) -> None:
    """A request whose tokens are a guess is load, but no measure of the worker's speed."""
    ticket = ledger.dispatch(4000, measurable=False)
    assert ledger.queued_prefill_tokens == 4000
    clock.advance(0.01)
    ledger.first_token(ticket)
    assert ledger.prefill_tokens_per_s == 1000.0


def test_speed_is_measured(ledger: LoadLedger, clock: ManualClock) -> None:
    """Long prefills move the speed towards what was seen; short ones measure round trips and do not."""
    ticket = ledger.dispatch(1000)
    clock.advance(0.5)
    ledger.first_token(ticket)
    assert 1000 < ledger.prefill_tokens_per_s < 2000
    ledger.finish(ticket)
    faster = ledger.prefill_tokens_per_s
    short = ledger.dispatch(10)
    clock.advance(0.001)
    ledger.first_token(short)
    assert ledger.prefill_tokens_per_s == pytest.approx(faster, rel=1e-3)


def test_a_speed_that_is_not_renewed_fades_into_the_fleets(clock: ManualClock) -> None:
    """A worker measured as slow is not avoided for ever, and one never measured counts as the others do."""
    fleet = FleetSpeed(1000.0)
    slow, unknown = PrefillSpeed(clock, fleet), PrefillSpeed(clock, fleet)
    for _ in range(20):
        slow.measure(1000, 10.0)
        PrefillSpeed(clock, fleet).measure(10_000, 1.0)
    assert slow.tokens_per_s < 150
    assert unknown.tokens_per_s == fleet.tokens_per_s > 1000
    clock.advance(600.0)
    assert slow.tokens_per_s == pytest.approx(fleet.tokens_per_s, rel=0.01)
