"""Usage, timers, counters, values and error answers."""

import math

import msgspec
import pytest

from kvatlas.clock import ManualClock
from kvatlas.errors import BodyTooLarge, ConfigError, NoWorkerAvailable
from kvatlas.gateway import FixedPlanner, GatewayConfig, GatewayRequest, GatewayStats, Target, Timeouts
from kvatlas.gateway.responses import error_response
from kvatlas.gateway.stats import Histogram
from kvatlas.gateway.timers import Timer, TimerWheel
from kvatlas.gateway.usage import NO_USAGE, Usage, parse_usage

USAGE = b'"usage":{"prompt_tokens":10,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":8},"x":[1]}'
FOUND = Usage(10, 2, 8)


class TestParseUsage:
    """`parse_usage`"""

    @pytest.mark.parametrize(
        "tail",
        [
            b"{" + USAGE + b"}",
            b'dy": 1}, ' + USAGE.replace(b":", b" : ", 1) + b',"after":{"n":{}}}',
            b'data: {"usage":null}\n\ndata: {"choices":[],' + USAGE + b"}\n\ndata: [DONE]\n\n",
            b"{" + USAGE[:40] + b"\r\n1a\r\n" + USAGE[40:] + b"}\r\n0\r\n\r\n",
            b'{"usage":{"prompt_tokens":1}}{' + USAGE + b'},"usage":null',
        ],
        ids=["json", "fragment", "sse", "chunk edge inside", "last of several"],
    )
    def test_finds_the_last_usage(self, tail: bytes):
        """Whole JSON, a fragment of it, SSE and chunked framing all give the same numbers."""
        assert parse_usage(tail) == parse_usage(bytearray(tail)) == FOUND

    @pytest.mark.parametrize(
        "tail",
        [
            b"",
            b"no json",
            b'{"usage":',
            b'{"usage":{"prompt_tokens":1',
            b'{"usage":null}',
            b'{"usage":"usage"}',
            b'{"usage":{"prompt_tokens":"many"}}',
            b'{"usage":{"prompt_tokens":{{{',
            b'{"text":"say \\"usage\\":{\\"prompt_tokens\\":1}"}',
            b'"usage"' * 5000,
            b"\x1f\x8b\x08" + bytes(100),
        ],
    )
    def test_is_silent_about_everything_else(self, tail: bytes):
        """No usage, cut usage, wrong types and text that talks about usage give nothing and raise nothing."""
        assert parse_usage(tail) == NO_USAGE

    def test_missing_details_are_unknown_and_not_zero(self):
        """An engine that does not report cached tokens did not say that there were none."""
        assert parse_usage(b'{"usage":{"prompt_tokens":3,"prompt_tokens_details":null}}') == Usage(3, None, None)

    def test_understands_the_responses_api(self):
        """Input and output tokens are the same thing under other names."""
        wire = b'{"usage":{"input_tokens":5,"output_tokens":6,"input_tokens_details":{"cached_tokens":4}}}'
        assert parse_usage(wire) == Usage(5, 6, 4)


class TestTimerWheel:
    """`TimerWheel`"""

    def make(self) -> tuple[ManualClock, TimerWheel, Timer, list[float]]:
        """A wheel with one timer that notes when it fires."""
        clock, fired = ManualClock(), []
        wheel = TimerWheel(clock)
        return clock, wheel, Timer(lambda: fired.append(clock.monotonic_s())), fired

    def tick(self, clock: ManualClock, wheel: TimerWheel, seconds: float) -> None:
        """Advance in ticks of 0.1 s."""
        for _ in range(round(seconds * 10)):
            clock.advance(0.1)
            wheel.advance()

    @pytest.mark.parametrize("after_s", [0.01, 0.1, 0.55, 5.0, 102.3, 102.5, 250.0])
    def test_fires_once_never_early_and_at_most_two_ticks_late(self, after_s: float):
        """Also beyond the wheel's span."""
        clock, wheel, timer, fired = self.make()
        wheel.arm(timer, after_s)
        self.tick(clock, wheel, after_s + 1)
        assert len(fired) == 1
        assert after_s <= fired[0] <= after_s + 0.2 + 1e-6

    def test_a_deadline_moves_both_ways(self):
        """Later without being placed anew, earlier at once."""
        clock, wheel, timer, fired = self.make()
        wheel.arm(timer, 1.0)
        for step in range(20):
            wheel.arm(timer, 1.0 + step)
        self.tick(clock, wheel, 10)
        assert fired == []
        wheel.arm(timer, clock.monotonic_s() + 0.5)
        self.tick(clock, wheel, 1)
        assert len(fired) == 1

    def test_cancelled_and_endless_timers_do_not_fire(self):
        """And a cancelled one can be armed again."""
        clock, wheel, timer, fired = self.make()
        wheel.arm(timer, 0.5)
        wheel.cancel(timer)
        endless = Timer(lambda: fired.append(-1.0))
        wheel.arm(endless, math.inf)
        self.tick(clock, wheel, 300)
        assert fired == []
        wheel.arm(timer, clock.monotonic_s() + 0.2)
        self.tick(clock, wheel, 1)
        assert len(fired) == 1

    def test_a_stalled_loop_catches_up(self):
        """After a pause longer than the wheel's span everything due fires in one go."""
        clock, wheel, timer, fired = self.make()
        others = [Timer(lambda: fired.append(0.0)) for _ in range(50)]
        for n, other in enumerate(others):
            wheel.arm(other, n * 7.3)
        wheel.arm(timer, 200.0)
        clock.advance(1000)
        wheel.advance()
        assert len(fired) == 51

    def test_timers_may_arm_and_cancel_others_when_they_fire(self):
        """One that fires in the same tick may cancel its neighbour or arm itself anew."""
        clock, wheel, _, fired = self.make()
        timers: list[Timer] = []

        def first() -> None:
            fired.append(1.0)
            for other in timers:
                wheel.cancel(other)
            wheel.arm(timers[0], clock.monotonic_s() + 0.3)

        timers += [Timer(first), Timer(first)]
        for timer in timers:
            wheel.arm(timer, 0.5)
        self.tick(clock, wheel, 0.7)
        assert fired == [1.0]
        self.tick(clock, wheel, 0.5)
        assert fired == [1.0, 1.0]

    def test_a_failing_timer_does_not_stop_the_others(self):
        """Its error is raised after all had their turn."""
        clock, wheel, timer, fired = self.make()

        def fail() -> None:
            raise ZeroDivisionError

        bad = Timer(fail)
        wheel.arm(bad, 0.05)
        wheel.arm(timer, 0.05)
        clock.advance(0.2)
        with pytest.raises(ZeroDivisionError):
            wheel.advance()
        assert len(fired) == 1


def test_histogram_counts_by_upper_bound():
    """A value on a bound belongs below it, one above all bounds to the rest."""
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    snapshot = histogram.snapshot()
    assert (snapshot.counts, snapshot.total, snapshot.count) == ((2, 1, 1), 12.0, 4)


def test_a_snapshot_does_not_move():
    """Counting goes on, the copy stays."""
    stats = GatewayStats()
    stats.worker("w").ended("client_abort", 0, 1.0, None, "x")
    before = stats.snapshot()
    stats.worker("w").ended("ok", 200, 1.0, 0.5, "x")
    stats.refused("bad_request")
    assert before.workers["w"].responses_by_class[:3] == (1, 0, 0)
    assert before.workers["w"].errors_by_code == {"x": 1}
    assert before.refused_by_code == {}
    assert stats.snapshot().workers["w"].ttft_s.count == 1


@pytest.mark.parametrize(
    ("kind", "status", "ttft_s", "counted"),
    [
        ("ok", 200, 0.5, (1, 1)),
        ("ok", 200, None, (0, 1)),
        ("ok", 404, 0.5, (0, 0)),
        ("ok", 503, None, (0, 0)),
        ("client_abort", 200, 0.5, (1, 0)),
        ("timeout", 0, None, (0, 0)),
    ],
)
def test_times_are_those_of_successful_answers(kind: str, status: int, ttft_s: float | None, counted: tuple[int, int]):
    """A fast 404 makes no engine look quick; a stream cut after its first token has a time to it, but no end."""
    stats = GatewayStats()
    stats.worker("w").ended(kind, status, 1.0, ttft_s, None)
    worker = stats.snapshot().workers["w"]
    assert (worker.ttft_s.count, worker.duration_s.count) == counted


def test_a_request_reads_its_own_headers():
    """Order, spelling and duplicates as sent; look-up by lower-case name finds the first."""
    request = GatewayRequest("id", "GET", b"/a?b", "/a", b"\r\nHost: h\r\nX-A:1 \r\nx-a: 2", b"")
    assert request.headers == [(b"Host", b"h"), (b"X-A", b"1"), (b"x-a", b"2")]
    assert (request.header(b"x-a"), request.header(b"x-b")) == (b"1", None)


@pytest.mark.parametrize(
    "status_error", [(413, BodyTooLarge("big")), (503, NoWorkerAvailable("none")), (500, KeyError("secret"))]
)
def test_error_answers_have_one_shape(status_error: tuple[int, Exception]):
    """Status line, framing and `{"error": {message, type, code}}` agree; HEAD gets the head alone."""
    status, error = status_error
    answer = error_response(error, "r1", close=True)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\ncontent-length: %d\r\nx-request-id: r1\r\n" % len(body) in head
    assert sorted(msgspec.json.decode(body)["error"]) == ["code", "message", "type"]
    assert b"secret" not in body
    assert error_response(error, "r1", close=True, head_only=True) == head + b"\r\n\r\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"base_path": "no-slash"},
        {"base_path": "/end/"},
        {"base_path": "/a b"},
        {"host": "h\r\nX: y"},
        {"headers": ((b"a", b"b\nc"),)},
        {"headers": ((b"a: b", b"c"),)},
        {"headers": ((b"", b"c"),)},
    ],
)
def test_a_target_that_would_corrupt_heads_cannot_be_made(fields: dict[str, object]):
    """What ends up in a request head is checked where it is configured."""
    with pytest.raises(ConfigError):
        Target("w", **({"host": "h", "port": 1} | fields))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: GatewayConfig(port=70_000), "port"),
        (lambda: GatewayConfig(max_head_bytes=10), "max_head_bytes"),
        (lambda: Timeouts(connect_s=0), "connect_s"),
        (lambda: Timeouts(idle_s=-1.0), "idle_s"),
        (lambda: Timeouts(first_byte_s=math.nan), "first_byte_s"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_by_name(make, names: str):
    """The message names the setting and what it may be."""
    with pytest.raises(ConfigError, match=names + " is .*expected"):
        make()


def test_the_fixed_planner_takes_turns():
    """Each request begins with the next target and keeps the others behind it; without targets it is not ready."""
    a, b = Target("a", "h", 1), Target("b", "h", 2)
    request = GatewayRequest("id", "GET", b"/", "/", b"", b"")
    planner = FixedPlanner((a, b))
    assert [planner.plan(request).targets for _ in range(3)] == [(a, b), (b, a), (a, b)]
    assert planner.ready()
    assert FixedPlanner(()).plan(request).targets == ()
    assert not FixedPlanner(()).ready()
