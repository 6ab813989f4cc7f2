"""A subscriber without sockets: `SequenceTracker` between a `FaultyStream` and an `EventSink`, in virtual time.

It asks, waits, retries and probes as `kvatlas.stream.ZmqEventSubscriber` does, with the same `SubscriberConfig`; what
it judges by is the same tracker. The wiring between the two is written here a second time, because that one lives with
its sockets.
"""

from collections.abc import Callable, Sequence
from functools import partial

from kvatlas.chaos.timeline import Timeline, Timer
from kvatlas.events import Apply, AskReplay, Lost, NewLife, SequenceTracker, Step
from kvatlas.simulator import FaultyStream
from kvatlas.stream import EventSink, LinkDown, LiveStep, Sent, StreamStatus, SubscriberConfig

__all__ = ["VirtualSubscriber"]

_ASK_SPACING_S = 0.05
_LATE_PROBES = 2
_ROUND_TRIP_S = 0.001


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
        self._tracker = SequenceTracker(can_replay=config.replay_endpoint is not None)
        self._connected = False
        self._status: tuple[StreamStatus, str] | None = None
        self._question = 0
        self._asked_s = -_ASK_SPACING_S
        self._answer_by_s = 0.0
        self._timers: dict[str, Timer] = {}
        self._quiet_since_s = timeline.now_s
        self._probe_after_s = config.probe_s
        self._probed_seq: int | None = None
        self._late_probes = 0
        self._doubt: str | None = None
        self.batches = 0
        """Batches delivered so far."""
        self.next_probe_s = 0.0
        """When the tail is asked for next, if the stream stays quiet until then."""

    @property
    def tracker(self) -> SequenceTracker:
        """The state of the stream's order, to read."""
        return self._tracker

    def start(self) -> None:
        """Connect, if the publisher is up."""
        self._report("connecting", "no connection yet")
        if self._stream.is_up:
            self._connect()
        self._arm_probe(self._probe_after_s)

    def take(self, steps: Sequence[LiveStep]) -> None:
        """What happens on the live channel."""
        for step in steps:
            if isinstance(step, Sent):
                if self._connected:
                    self._on_live(step)
            elif isinstance(step, LinkDown):
                self._on_down(step.reason)
            else:
                self._set_timer("connect", self._config.reconnect_s, self._connect)

    def probe_soon(self) -> None:
        """Ask for the tail now."""
        if self._connected:
            self._carry_out(self._tracker.probe())
            self._report_order()

    def distrust(self, reason: str) -> None:
        """The stream is dead, whatever its connection says: report it lost until it brings a batch."""
        self._doubt = reason
        self._report("lost", reason)
        self._on_settled()

    # -- the connection --

    def _connect(self) -> None:
        if self._connected or not self._stream.is_up:
            return
        self._connected = True
        self._on_connected()
        self._carry_out(self._tracker.connected())
        self._report_syncing()
        self._report_order()

    def _on_down(self, reason: str) -> None:
        if not self._connected:
            return
        self._connected = False
        self._report("lost", reason)
        self._on_settled()

    def _on_live(self, sent: Sent) -> None:
        self._quiet_since_s = self._timeline.now_s
        self._probe_after_s = self._config.probe_s
        self._late_probes = 0
        self._probed_seq = None
        self._arm_probe(self._probe_after_s)
        self._on_received(sent.seq)
        self._carry_out(self._tracker.live(sent.seq, sent.payload))
        self._report_order()

    # -- what the tracker asks for --

    def _carry_out(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, Apply):
                self.batches += 1
                self._doubt = None
                self._sink.on_batch(step.seq, step.payload)
            elif isinstance(step, AskReplay):
                self._set_timer("ask", self._ask_delay_s(step.attempt), partial(self._ask, step))
            elif isinstance(step, Lost):
                self._sink.on_gap(step.first_seq, step.last_seq)
            elif isinstance(step, NewLife):
                self._report_syncing()
                self._sink.on_life(step.reason)

    def _ask_delay_s(self, attempt: int) -> float:
        config = self._config
        patience_s = min(config.retry_s * 2 ** (attempt - 1), config.retry_max_s) if attempt else 0.0
        return max(patience_s, self._asked_s + _ASK_SPACING_S - self._timeline.now_s, 0.0)

    def _ask(self, step: AskReplay) -> None:
        if step.token != self._tracker.replay_token:
            return
        now_s = self._timeline.now_s
        self._asked_s = now_s
        self._question += 1
        self._answer_by_s = now_s + self._config.replay_timeout_s
        self._set_timer("answer", self._config.replay_timeout_s, partial(self._check_answer, step.token))
        answer = self._stream.replay(step.from_seq)
        if answer is None:
            return
        parts: list[Sent | None] = [*answer.batches, *([None] if answer.has_marker else [])]
        if answer.interval_s:
            for number, part in enumerate(parts, 1):
                delay_s = _ROUND_TRIP_S + min(number, len(answer.batches)) * answer.interval_s
                self._timeline.after(delay_s, partial(self._on_answer, step.token, self._question, [part]))
        else:
            self._timeline.after(_ROUND_TRIP_S, partial(self._on_answer, step.token, self._question, parts))

    def _on_answer(self, token: int, question: int, parts: Sequence[Sent | None]) -> None:
        """Batches of an answer, None for its end marker. Answers to an earlier question die with its socket."""
        if question != self._question or not self._stream.is_up:
            return
        self._answer_by_s = self._timeline.now_s + self._config.replay_timeout_s
        for part in parts:
            if part is None:
                self._on_replay_complete()
                self._carry_out(self._tracker.replay_ended(token, complete=True))
            else:
                self._on_received(part.seq)
                self._carry_out(self._tracker.replayed(token, part.seq, part.payload))
        self._report_order()

    def _check_answer(self, token: int) -> None:
        if token != self._tracker.replay_token:
            return
        wait_s = self._answer_by_s - self._timeline.now_s
        if wait_s > 1e-9:
            self._set_timer("answer", wait_s, partial(self._check_answer, token))
            return
        self._carry_out(self._tracker.replay_ended(token, complete=False))
        self._report_order()

    # -- the poll --

    def _arm_probe(self, delay_s: float) -> None:
        """A running timer that fires before is left: it looks again. One that fires later would miss the time."""
        self.next_probe_s = self._timeline.now_s + delay_s
        running = self._timers.get("probe")
        if running is None or running.due_s > self.next_probe_s:
            self._set_timer("probe", delay_s, self._probe_if_quiet)

    def _probe_if_quiet(self) -> None:
        now_s = self._timeline.now_s
        del self._timers["probe"]
        if now_s < self.next_probe_s - 1e-9:
            self._set_timer("probe", self.next_probe_s - now_s, self._probe_if_quiet)
            return
        if self._connected:
            late = self._probed_seq is not None and self._tracker.last_seq > self._probed_seq
            self._late_probes = self._late_probes + 1 if late else 0
            self._probed_seq = self._tracker.last_seq
            self._carry_out(self._tracker.probe())
            self._report_order()
        self._quiet_since_s = now_s
        self._probe_after_s = min(2 * self._probe_after_s, self._config.probe_max_s)
        self._arm_probe(self._probe_after_s)

    # -- what the sink hears --

    def _report_order(self) -> None:
        if self._connected and self._doubt is None:
            if self._late_probes >= _LATE_PROBES:
                self._report("syncing", "batches come by replay only, late")
            elif self._tracker.is_live:
                self._report("live", "caught up with the publisher")
            else:
                self._report_syncing()
        self._on_settled()

    def _report_syncing(self) -> None:
        self._report("syncing", "waiting for what was missed")

    def _report(self, status: StreamStatus, reason: str) -> None:
        if self._status is not None and self._status[0] == status and (status == "live" or self._status[1] == reason):
            return
        self._status = (status, reason)
        self._sink.on_status(status, reason)

    def _set_timer(self, name: str, delay_s: float, call: Callable[[], None]) -> None:
        previous = self._timers.get(name)
        if previous is not None:
            previous.cancel()
        self._timers[name] = self._timeline.after(delay_s, call)
