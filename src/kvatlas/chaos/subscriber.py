"""A subscriber without sockets: `SubscriberCore` between a `FaultyStream` and an `EventSink`, in virtual time.

It asks, waits, retries and probes as `kvatlas.stream.ZmqEventSubscriber` does, with the same `SubscriberConfig` and the
same core.
"""

from collections.abc import Callable, Sequence
from functools import partial

from kvatlas.chaos.timeline import Timeline, Timer
from kvatlas.events import AskReplay, SequenceTracker
from kvatlas.simulator import FaultyStream
from kvatlas.stream import EventSink, LinkDown, LiveStep, Sent, Spread, StreamCounters, SubscriberConfig, SubscriberCore

__all__ = ["VirtualSubscriber"]

_ROUND_TRIP_S = 0.001
_EPSILON_S = 1e-9


class VirtualSubscriber:
    """Follows one stream.

    Args:
        config: its durations count; a `replay_endpoint` of None means that there is no replay.
        on_connected: called when a connection stands, before anything comes over it.
        on_replay_complete: called when a replay's end marker came, before it is judged.
        on_received: told the number of every batch that arrives, live or replayed, before it is judged.
        on_settled: called when all that came of an arrival was delivered.
    """

    def __init__(
        self,
        config: SubscriberConfig,
        stream: FaultyStream,
        sink: EventSink,
        timeline: Timeline,
        *,
        on_connected: Callable[[], None] = lambda: None,
        on_received: Callable[[int], None] = lambda _: None,
        on_replay_complete: Callable[[], None] = lambda: None,
        on_settled: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._stream = stream
        self._sink = sink
        self._timeline = timeline
        self._on_connected = on_connected
        self._on_received = on_received
        self._on_replay_complete = on_replay_complete
        self._on_settled = on_settled
        self._core = SubscriberCore(
            config, sink, counters=StreamCounters(), ask=self._ask_later, spread=Spread(most=1.0), now_s=timeline.now_s
        )
        self._question = 0
        self._answer_by_s = 0.0
        self._timers: dict[str, Timer] = {}

    @property
    def batches(self) -> int:
        """Batches delivered so far."""
        return self._core.counters.batches

    @property
    def next_probe_s(self) -> float:
        """When the tail is asked for next, if the stream stays quiet until then."""
        return self._core.probe_due_s

    @property
    def tracker(self) -> SequenceTracker:
        """The state of the stream's order, to read."""
        return self._core.tracker

    def start(self) -> None:
        """Connect, if the publisher is up."""
        self._core.connecting("no connection yet")
        if self._stream.is_up:
            self._connect()
        self._arm_probe()

    def take(self, steps: Sequence[LiveStep]) -> None:
        """What happens on the live channel."""
        for step in steps:
            if isinstance(step, Sent):
                if self._core.is_connected:
                    self._on_live(step)
            elif isinstance(step, LinkDown):
                self._on_down(step.reason)
            else:
                self._set_timer("connect", self._config.reconnect_s, self._connect)

    def probe_soon(self) -> None:
        """Ask for the tail now."""
        self._core.probe()
        self._settle()

    def distrust(self, reason: str) -> None:
        """The stream is dead, whatever its connection says: report it lost until it brings a batch."""
        self._core.distrust(reason)
        self._on_settled()

    # -- the connection --

    def _connect(self) -> None:
        if self._core.is_connected or not self._stream.is_up:
            return
        self._on_connected()
        self._core.connected()
        self._settle()

    def _on_down(self, reason: str) -> None:
        if self._core.is_connected:
            self._core.gone(reason)
            self._on_settled()

    def _on_live(self, sent: Sent) -> None:
        self._core.heard(self._timeline.now_s)
        self._arm_probe()
        self._on_received(sent.seq)
        self._core.take(sent.seq, sent.payload)
        self._settle()

    def _settle(self) -> None:
        """Carry out all that follows from an arrival, then say how things stand."""
        self._core.carry_out_all()
        self._core.report_order()
        self._on_settled()

    # -- questions --

    def _ask_later(self, step: AskReplay) -> None:
        delay_s = self._core.ask_delay_s(step.attempt, self._timeline.now_s)
        self._set_timer("ask", delay_s, partial(self._ask, step))

    def _ask(self, step: AskReplay) -> None:
        if not self._core.is_wanted(step):
            return
        now_s = self._timeline.now_s
        self._core.asked(step, now_s)
        self._question += 1
        self._answer_by_s = now_s + self._config.replay_timeout_s
        self._set_timer("answer", self._config.replay_timeout_s, partial(self._check_answer, step))
        answer = self._stream.replay(step.from_seq)
        if answer is None:
            return
        parts: list[Sent | None] = [*answer.batches, *([None] if answer.has_marker else [])]
        if answer.interval_s:
            for number, part in enumerate(parts, 1):
                delay_s = _ROUND_TRIP_S + min(number, len(answer.batches)) * answer.interval_s
                self._timeline.after(delay_s, partial(self._on_answer, self._question, [part]))
        else:
            self._timeline.after(_ROUND_TRIP_S, partial(self._on_answer, self._question, parts))

    def _on_answer(self, question: int, parts: Sequence[Sent | None]) -> None:
        """Batches of an answer, None for its end marker. Answers to an earlier question die with its socket."""
        if question != self._question or not self._stream.is_up:
            return
        self._answer_by_s = self._timeline.now_s + self._config.replay_timeout_s
        for part in parts:
            if part is None:
                self._on_replay_complete()
                self._core.end_replay(complete=True)
            else:
                self._on_received(part.seq)
                self._core.take_replayed(part.seq, part.payload)
            self._core.carry_out_all()
        self._settle()

    def _check_answer(self, step: AskReplay) -> None:
        if not self._core.is_wanted(step):
            return
        wait_s = self._answer_by_s - self._timeline.now_s
        if wait_s > _EPSILON_S:
            self._set_timer("answer", wait_s, partial(self._check_answer, step))
            return
        self._core.end_replay(step.token, complete=False)
        self._settle()

    # -- the poll --

    def _arm_probe(self) -> None:
        """A running timer that fires before is left: it looks again. One that fires later would miss the time."""
        running = self._timers.get("probe")
        if running is None or not running.is_set or running.due_s > self._core.probe_due_s:
            self._set_timer("probe", self._core.probe_due_s - self._timeline.now_s, self._probe_if_quiet)

    def _probe_if_quiet(self) -> None:
        now_s = self._timeline.now_s
        if now_s >= self._core.probe_due_s - _EPSILON_S:
            self._core.probe_quiet_stream(now_s, idle=True)
            self._settle()
        self._arm_probe()

    def _set_timer(self, name: str, delay_s: float, call: Callable[[], None]) -> None:
        previous = self._timers.get(name)
        if previous is not None:
            previous.cancel()
        self._timers[name] = self._timeline.after(delay_s, call)
