"""Failure lines: what they hold, how seldom they repeat, and that nothing left out goes uncounted."""

import pytest

from kvatlas.clock import ManualClock
from kvatlas.errors import (
    BadRequest,
    BadUpstreamResponseError,
    KvAtlasError,
    NoWorkerAvailable,
    UpstreamConnectError,
    UpstreamTimeoutError,
)
from kvatlas.gateway.failure_log import FailureLog


@pytest.fixture(name="clock")
def _clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(name="failures")
def _failures(clock: ManualClock) -> FailureLog:
    return FailureLog(clock)


def fail(failures: FailureLog, worker_id: str = "w1", request_id: str = "r", reason: str = "refused") -> None:
    failures.attempt_failed(request_id, worker_id, "connect_error", UpstreamConnectError(reason), head_sent=False)


class TestSpacing:
    def test_one_line_a_second_of_a_kind(
        self, clock: ManualClock, failures: FailureLog, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Within a second only the first is written; the next line says how many were not."""
        for _ in range(5):
            fail(failures)
        clock.advance(1.0)
        fail(failures, request_id="r2")
        assert caplog.messages == [
            "worker w1: connect_error upstream_connect_error before any answer, request r: refused",
            "worker w1: connect_error upstream_connect_error before any answer, request r2: refused"
            " (4 more since the last such line)",
        ]

    def test_workers_codes_and_answers_do_not_hide_each_other(
        self, failures: FailureLog, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Another worker, another code, and the answer to the same failure each have a line of their own."""
        for _ in range(2):
            fail(failures)
            fail(failures, "w2")
            failures.attempt_failed("r", "w1", "timeout", UpstreamTimeoutError("slow"), head_sent=False)
            failures.answered("r", "w1", UpstreamConnectError("refused"))
        assert len(caplog.messages) == 4

    def test_flush_tells_what_was_left_out_and_forgets(
        self, clock: ManualClock, failures: FailureLog, caplog: pytest.LogCaptureFixture
    ) -> None:
        """After the last of a burst nothing stays uncounted, and the memory is empty; not before its second is over."""
        for _ in range(3):
            fail(failures)
        fail(failures, "w2")
        failures.flush()
        assert len(caplog.messages) == 2
        clock.advance(1.0)
        failures.flush()
        assert caplog.messages[2:] == ["worker w1: 2 more attempts failed with upstream_connect_error, not shown"]
        failures.flush()
        fail(failures)
        assert len(caplog.messages) == 4

    def test_final_flush_does_not_wait(self, failures: FailureLog, caplog: pytest.LogCaptureFixture) -> None:
        """When the gateway closes, what the running second left out is told too."""
        for _ in range(2):
            failures.answered("r", None, NoWorkerAvailable("none"))
        failures.flush(final=True)
        assert caplog.messages == [
            "worker -: answered 503 no_worker_available, request r: none",
            "worker -: 1 more requests answered 503 with no_worker_available, not shown",
        ]


class TestWhatIsLogged:
    @pytest.mark.parametrize(
        ("error", "logged"),
        [
            (NoWorkerAvailable("x"), True),
            (BadUpstreamResponseError("x"), True),
            (UpstreamTimeoutError("x"), True),
            (BadRequest("x"), False),
            (KvAtlasError("x"), False),
            (ValueError("x"), False),
        ],
    )
    def test_only_502_503_and_504_answers(
        self, failures: FailureLog, caplog: pytest.LogCaptureFixture, error: Exception, logged: bool
    ) -> None:
        """A client's mistake is no operator's business; a planner's fault has its own line elsewhere."""
        failures.answered("r", None, error)
        assert bool(caplog.messages) is logged

    def test_a_cut_stream_says_so(self, failures: FailureLog, caplog: pytest.LogCaptureFixture) -> None:
        """After the head the client was cut: the line tells it from a failure the client got an answer for."""
        failures.attempt_failed("r", "w1", "upstream_error", BadUpstreamResponseError("gone"), head_sent=True)
        assert caplog.messages == [
            "worker w1: upstream_error bad_upstream_response after the head of its answer, client cut, request r: gone"
        ]
        assert caplog.records[0].levelname == "WARNING"
