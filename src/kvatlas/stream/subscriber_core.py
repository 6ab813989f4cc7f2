"""What a subscriber does apart from sockets and timers: judge what arrives, tell the sink, say what is to be asked.

The owner brings what came and carries the questions; time is given to every call that needs it. So the same rules run
over ZMQ and in virtual time (`kvatlas.chaos`).
"""

from collections import deque
from collections.abc import Callable

from kvatlas.events import Apply, AskReplay, Lost, NewLife, SequenceTracker, Step, TrackerLimits
from kvatlas.stream.sink import EventSink, RunSink, StreamStatus
from kvatlas.stream.spread import Spread
from kvatlas.stream.subscriber_config import StreamCounters, SubscriberConfig

__all__ = ["SubscriberCore"]

_ASK_SPACING_S = 0.05
_LATE_PROBES = 2  # without a live batch between: one that brings something may be a lost tail, two are a wrong topic


class SubscriberCore:
    """`SequenceTracker` between arrivals and an `EventSink`. Exceptions of the sink are counted and told to it.

    Args:
        counters: what is counted; the owner counts what it sees itself.
        ask: told of every question as it becomes due; the owner sends it after `ask_delay_s`.
        spread: stretches waiting times.
        now_s: the time of the first probe counts from here.
    """

    def __init__(
        self,
        config: SubscriberConfig,
        sink: EventSink,
        *,
        counters: StreamCounters,
        ask: Callable[[AskReplay], None],
        spread: Spread,
        limits: TrackerLimits | None = None,
        now_s: float = 0.0,
    ) -> None:
        self._config = config
        self._sink = sink
        self._run_sink = sink if isinstance(sink, RunSink) else None
        self._ask = ask
        self._spread = spread
        self.counters = counters
        """What happened so far."""
        self.tracker = SequenceTracker(can_replay=config.can_replay, limits=limits, resume_at=config.resume_at)
        """The state of the stream's order."""
        self.steps: deque[Step] = deque()
        """What is to be carried out, oldest first."""
        self.last_seq = -1 if config.resume_at is None else config.resume_at.seq
        """Number of the last batch delivered or reported lost; -1 before the first of a life."""
        self.is_connected = False
        """Whether the live connection stands."""
        self.must_mend = False
        """Whether the owner dropped a batch and no replay was complete since."""
        self.probe_due_s = 0.0
        """When the tail is asked for, if no batch comes until then."""
        self._status: tuple[StreamStatus, str] | None = None
        self._doubt: str | None = None
        self._asked_s = -_ASK_SPACING_S
        self._asked_token = -1
        self._probed_seq: int | None = None
        self._late_probes = 0
        self._has_ended = False
        self.start_probing(now_s)

    # -- the connection --

    def connecting(self, reason: str) -> None:
        """There is no connection yet."""
        if not self.is_connected and (self._status is None or self._status[0] == "connecting"):
            self._report("connecting", reason)

    def connected(self) -> None:
        """The connection stands, for the first time or again; what comes from now on may be of another life."""
        self.is_connected = True
        self._doubt = None  # it was about the connection before
        self._late_probes, self._probed_seq = 0, None
        self.counters.connections += 1
        self.steps.extend(self.tracker.connected())
        self.report_syncing()

    def gone(self, reason: str) -> None:
        """The connection broke."""
        if self.is_connected:
            self.is_connected = False
            self._report("lost", reason)

    def distrust(self, reason: str) -> None:
        """Somebody knows better than the connection that the stream is dead: it is lost until it brings a batch."""
        self._doubt = reason
        self._report("lost", reason)

    def end(self) -> None:
        """Batches not delivered yet are not delivered any more, not even the rest of a run."""
        self._has_ended = True

    # -- batches --

    def take(self, seq: int, payload: bytes) -> None:
        """A live batch. One that simply follows is delivered at once; else `steps` say what to do."""
        self.take_run(seq, [payload])

    def take_run(self, first_seq: int, payloads: list[bytes]) -> None:
        """Live batches numbered without a hole: `take` for each, in one call of a `RunSink` where they can be."""
        at, count = 0, len(payloads)
        while at < count:
            if not self.steps and (accepted := self.tracker.accept_run(first_seq + at, payloads[at:])):
                self._deliver_run(payloads[at : at + accepted])
                at += accepted
            else:
                self.take_later(first_seq + at, payloads[at])
                at += 1

    def take_later(self, seq: int, payload: bytes) -> None:
        """The same, and nothing is delivered yet."""
        self.steps.extend(self.tracker.live(seq, payload))

    def take_replayed(self, seq: int, payload: bytes) -> None:
        """A batch that answers the question sent last."""
        self.steps.extend(self.tracker.replayed(self._asked_token, seq, payload))

    def end_replay(self, token: int | None = None, *, complete: bool) -> None:
        """The answer to a question (None: the one sent last) is over: by its end marker, or given up."""
        if not complete:
            self.counters.failed_replays += 1
        token = self._asked_token if token is None else token
        self.steps.extend(self.tracker.replay_ended(token, complete=complete))

    def mend(self) -> None:
        """All that was kept is delivered, and no question is open: ask for what was dropped, or report it lost."""
        if self._config.can_replay:
            self.steps.extend(self.tracker.probe())
        else:
            self.must_mend = False
            self.steps.append(Lost(self.tracker.last_seq + 1, None))

    # -- steps --

    def carry_out_all(self) -> None:
        """Carry out what is to be done, and what follows from it."""
        while self.steps:
            self.carry_out(self.steps.popleft())

    def carry_out(self, step: Step) -> None:
        """Tell the sink, or ask."""
        if isinstance(step, Apply):
            self._deliver(step.seq, step.payload)
        elif isinstance(step, AskReplay):
            self._ask(step)
        elif isinstance(step, Lost):
            self.counters.gaps += 1
            self.last_seq = self.last_seq if step.last_seq is None else step.last_seq
            self._tell("a gap", self._sink.on_gap, step.first_seq, step.last_seq)
        elif isinstance(step, NewLife):
            self.counters.lives += 1
            self.last_seq = -1
            # Whoever listens must hear "live" again once the new life is caught up with; or still "lost", if it is.
            self.report_syncing()
            self._tell("a new life", self._sink.on_life, step.reason)
            if self._is_lost() and self._status is not None:
                self._tell("a status", self._sink.on_status, *self._status)

    def _deliver(self, seq: int, payload: bytes) -> None:
        self.counters.batches += 1
        self.last_seq = seq
        self._doubt = None
        try:
            self._sink.on_batch(seq, payload)
        except Exception as error:  # noqa: BLE001 - whatever the sink does, the stream goes on
            self._blame(f"batch {seq}", error)

    def _deliver_run(self, payloads: list[bytes]) -> None:
        """Batches that the tracker accepted last, up to the newest of all."""
        first_seq = self.tracker.last_seq + 1 - len(payloads)
        if self._run_sink is None or len(payloads) < 2:
            for seq, payload in enumerate(payloads, first_seq):
                if self._has_ended:
                    return
                self._deliver(seq, payload)
            return
        if self._has_ended:
            return
        self.counters.batches += len(payloads)
        self.last_seq = self.tracker.last_seq
        self._doubt = None
        try:
            self._run_sink.on_batches(first_seq, payloads)
        except Exception as error:  # noqa: BLE001 - whatever the sink does, the stream goes on
            self._blame(f"batches {first_seq} to {self.last_seq}", error)

    # -- questions --

    def ask_delay_s(self, attempt: int, now_s: float) -> float:
        """How long to wait before a question: ever longer after failures, and never two at once."""
        config = self._config
        patience_s = min(config.retry_s * 2 ** (attempt - 1), config.retry_max_s) if attempt else 0.0
        return max(self._spread.stretch(patience_s), self._asked_s + _ASK_SPACING_S - now_s, 0.0)

    def is_wanted(self, step: AskReplay) -> bool:
        """Whether the tracker still waits for that question's answer."""
        return step.token == self.tracker.replay_token

    def asked(self, step: AskReplay, now_s: float) -> None:
        """The question is on its way."""
        self.counters.replays += 1
        self._asked_s = now_s
        # The tracker may move on to a question not yet sent; what comes until then answers this one.
        self._asked_token = step.token

    # -- the tail --

    def start_probing(self, now_s: float) -> None:
        """The stream is quiet from now on."""
        self._probe_after_s = self._spread.stretch(self._config.probe_s)
        self.probe_due_s = now_s + self._probe_after_s

    def heard(self, now_s: float) -> None:
        """Live batches have come. `probe_due_s` may be earlier than before."""
        self._probe_after_s = self._config.probe_s
        self.probe_due_s = now_s + self._probe_after_s
        self._late_probes, self._probed_seq = 0, None

    def probe(self) -> None:
        """Ask for the tail now. Nothing happens while a replay runs or there is no connection."""
        if self.is_connected:
            self.steps.extend(self.tracker.probe())

    def probe_quiet_stream(self, now_s: float, *, idle: bool) -> None:
        """The probe is due: a lost last batch, or a restart, shows in nothing else. `idle`: no arrival waits."""
        if self.is_connected and idle and self.tracker.replay_token is None:
            # New batches since the last probe, none of them live: nobody would notice otherwise, all is in order.
            late = self._probed_seq is not None and self.tracker.last_seq > self._probed_seq
            self._late_probes += late
            self._probed_seq = self.tracker.last_seq
            self.probe()
        longest_s = self._config.probe_max_s / self._spread.most
        self._probe_after_s = self._spread.stretch(min(2 * self._probe_after_s, longest_s))
        self.probe_due_s = now_s + self._probe_after_s

    # -- what the sink hears --

    def report_order(self) -> None:
        """All was delivered: say whether that is everything."""
        if self._is_lost():
            return
        if self._late_probes >= _LATE_PROBES:
            topic = f" and the topic {self._config.topic!r}" if self._config.topic else ""
            self._report("syncing", f"batches come by replay only, late: check {self._config.endpoint}{topic}")
        elif self.tracker.is_live and not self.must_mend:
            self._report("live", "caught up with the publisher")
        else:
            self.report_syncing()

    def report_syncing(self) -> None:
        """Something may be missing: say what is waited for. Nothing while the stream is lost."""
        if self._is_lost():
            return
        if self.must_mend:
            self._report("syncing", "batches came faster than they could be taken, and some were dropped here")
        elif not self._config.can_replay:
            self._report("syncing", "no replay endpoint: the next batch tells what was missed")
        else:
            self._report("syncing", f"waiting for {self._config.replay_endpoint} to replay what was missed")

    def _is_lost(self) -> bool:
        return not self.is_connected or self._doubt is not None

    def _report(self, status: StreamStatus, reason: str) -> None:
        if self._status is not None and self._status[0] == status and (status == "live" or self._status[1] == reason):
            return
        self._status = (status, reason)
        self._tell("a status", self._sink.on_status, status, reason)

    def _tell(self, what: str, call: Callable[..., None], *args: object) -> None:
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 - whatever the sink does, the stream goes on
            self._blame(what, error)

    def _blame(self, what: str, error: Exception) -> None:
        self.counters.sink_errors += 1
        if what != "a status" and self._status is not None:
            reason = f"the receiver failed on {what}: {error!r}"
            self._tell("a status", self._sink.on_status, self._status[0], reason)
