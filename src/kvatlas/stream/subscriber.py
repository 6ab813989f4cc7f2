"""The subscriber: sockets and timers around `SequenceTracker`, on whatever asyncio loop runs.

The sockets' file descriptors are watched directly: no task or future per message, and the same code under uvloop. A
descriptor tells only that a socket's state changed, so every wake-up reads until the socket is empty, in turns of
about a millisecond, and what the tracker tells us to deliver is carried out in the same turns.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Literal, TypeAlias

import zmq

from kvatlas.clock import Clock
from kvatlas.events import Apply, AskReplay, Lost, NewLife, SequenceTracker, Step, TrackerLimits
from kvatlas.stream.context import shared_context
from kvatlas.stream.endpoints import bind_or_connect
from kvatlas.stream.inbox import LiveInbox
from kvatlas.stream.live_channel import Spread, close_live, open_live, read_link_event, receive_frames
from kvatlas.stream.replay_channel import ReplayChannel, is_end_of_replay, split_frames
from kvatlas.stream.sink import EventSink, StreamStatus
from kvatlas.stream.subscriber_config import StreamCounters, SubscriberConfig

__all__ = ["ZmqEventSubscriber"]

Socket: TypeAlias = "zmq.Socket[bytes]"
Channel: TypeAlias = Literal["monitor", "replay", "live"]

_MESSAGES_PER_TURN = 256
_ASK_SPACING_S = 0.05
_LATE_PROBES = 2  # probes in a row that bring what should have come live: one may be a lost tail, two are a wrong topic


class ZmqEventSubscriber:
    """Follows one publisher: live, replayed, through losses, reconnects and restarts, until `close`.

    Exceptions of the sink are counted and told to `on_status`; they never end the stream. `limits` bound what is held.
    """

    def __init__(
        self,
        config: SubscriberConfig,
        sink: EventSink,
        clock: Clock,
        *,
        limits: TrackerLimits | None = None,
        context: "zmq.Context[Socket] | None" = None,
        counters: StreamCounters | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._config = config
        self._sink = sink
        self._clock = clock
        self._context = context or shared_context()
        self._spread = Spread(rng)
        self.counters = counters or StreamCounters()
        """What happened so far."""
        self.last_seq = -1 if config.resume_at is None else config.resume_at.seq
        """Number of the last batch delivered or reported lost; -1 before the first of a life."""
        self._tracker = SequenceTracker(can_replay=config.can_replay, limits=limits, resume_at=config.resume_at)
        self._replay: ReplayChannel | None = None
        self._sockets: dict[Channel, Socket] = {}
        self._ready: set[Channel] = set()
        self._inbox = LiveInbox(max_batches=config.max_queue_batches, max_bytes=config.max_queue_bytes)
        self._must_mend = False  # whether our own queue dropped a batch and no replay was complete since
        self._doubt: str | None = None
        self._steps: deque[Step] = deque()
        self._turn_is_due = False
        self._connected = False
        self._status: tuple[StreamStatus, str] | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._answer_by_s = 0.0
        self._asked_s = 0.0
        self._asked_token = -1
        self._quiet_since_s = 0.0
        self._probe_after_s = config.probe_s
        self._probed_seq: int | None = None
        self._late_probes = 0
        self._closing = asyncio.Event()

    @property
    def tracker(self) -> SequenceTracker:
        """The state of the stream's order, to read."""
        return self._tracker

    async def run(self) -> None:
        """Follow the stream until `close` is called or the task is cancelled. Retries an unreachable endpoint for ever.

        Raises:
            ConfigError: an endpoint is malformed.
        """
        self._loop = asyncio.get_running_loop()
        try:
            self._open()
            await self._closing.wait()
        finally:
            self._shut()

    def close(self) -> None:
        """End `run`. Idempotent, returns at once; nothing is delivered afterwards."""
        self._closing.set()

    def probe_soon(self) -> None:
        """Ask for the tail now, as if the stream had been quiet for long. Nothing happens while a replay runs."""
        if self._connected:
            self._steps.extend(self._tracker.probe())
            self._on_readable("live")

    def distrust(self, reason: str) -> None:
        """Somebody knows better than the sockets that the stream is dead: report it lost until it brings a batch."""
        self._doubt = reason
        self._report("lost", reason)

    # -- sockets and timers --

    def _open(self) -> None:
        config = self._config
        pauses_ms = self._spread.pauses_ms(config)
        live, self._sockets["monitor"] = open_live(self._context, config, pauses_ms)
        self._sockets["live"] = live
        if config.replay_endpoint is not None:
            self._replay = ReplayChannel(
                self._context,
                config.replay_endpoint,
                max_message_bytes=config.max_message_bytes,
                reconnect_ms=pauses_ms,
            )
            self._sockets["replay"] = self._replay.connect()
            self._watch("replay")
        self._report("connecting", f"no connection to {config.endpoint} yet")
        bind_or_connect(live, config.endpoint, bind=config.bind)
        for channel in ("monitor", "live"):
            self._watch(channel)
        if config.endpoint.startswith("inproc://"):
            self._on_connected()  # within one process there is no connection to hear of
        self._quiet_since_s = self._loop.time()
        self._probe_after_s = self._spread.stretch(config.probe_s)
        self._set_timer("probe", self._probe_after_s, self._probe_if_quiet)

    def _watch(self, channel: Channel) -> None:
        self._loop.add_reader(self._sockets[channel].fileno(), self._on_readable, channel)
        self._on_readable(channel)

    def _unwatch(self, channel: Channel) -> None:
        self._ready.discard(channel)
        socket = self._sockets.pop(channel, None)
        if socket is not None and not socket.closed:
            self._loop.remove_reader(socket.fileno())

    def _shut(self) -> None:
        self._closing.set()
        for timer in self._timers.values():
            timer.cancel()
        live, monitor = self._sockets.get("live"), self._sockets.get("monitor")
        for channel in tuple(self._sockets):
            self._unwatch(channel)
        if self._replay is not None:
            self._replay.close()
        if live is not None:
            close_live(live, monitor)

    def _set_timer(self, name: str, delay_s: float, callback: Callable[[], None]) -> None:
        previous = self._timers.get(name)
        if previous is not None:
            previous.cancel()
        self._timers[name] = self._loop.call_later(delay_s, callback)

    # -- turns --

    def _on_readable(self, channel: Channel) -> None:
        self._ready.add(channel)
        if not self._turn_is_due:
            self._turn_is_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Deliver and read for about a millisecond, then let others run."""
        self._turn_is_due = False
        now_s = self._clock.monotonic_s()
        until_s = now_s + self._config.turn_s
        # Half a turn at most goes into reading: the receiver keeps its share however fast the stream is.
        self._read_live(now_s + self._config.turn_s / 2)
        for _ in range(_MESSAGES_PER_TURN):
            if self._closing.is_set():
                return
            if self._steps:
                self._carry_out(self._steps.popleft())
            elif not self._take_one():
                if self._inbox.has_refused and self._tracker.replay_token is None:
                    self._mend()
                    continue
                self._report_order()
                return
            if self._clock.monotonic_s() >= until_s:
                break
        self._turn_is_due = True
        self._loop.call_soon(self._turn)

    def _read_live(self, until_s: float) -> None:
        """Move live batches from ZMQ into our own queue, which refuses what exceeds its bounds."""
        while "live" in self._ready:
            message = self._receive("live")
            if message is not None and not self._inbox.put(*message):
                self.counters.overflowed += 1
                self._must_mend = True
                self._report_syncing()
            if self._clock.monotonic_s() >= until_s:
                return

    def _frames(self, channel: Channel) -> list[bytes]:
        """The next message of a channel, empty when there is none."""
        frames = receive_frames(self._sockets[channel])
        if not frames:
            self._ready.discard(channel)
        return frames

    def _receive(self, channel: Channel) -> tuple[int, bytes] | None:
        """The next batch of a channel; None when there is no message, or when it is not a batch."""
        frames = self._frames(channel)
        message = split_frames(frames)
        if frames and message is None:
            self.counters.bad_messages += 1
        return message

    def _take_one(self) -> bool:
        """Take in one message, if any. Live before replay: a replay must not declare lost what waits to be read."""
        if "monitor" in self._ready and (frames := self._frames("monitor")):
            self._on_connection_event(frames)
            return True
        if not self._inbox:
            self._read_live(0.0)
        if (batch := self._inbox.pop()) is not None:
            self._on_live(*batch)
        elif "live" not in self._ready and "replay" in self._ready and (batch := self._receive("replay")) is not None:
            self._on_replayed(*batch)
        return batch is not None or bool(self._ready)

    def _mend(self) -> None:
        """All that was kept is handed on, and no question is open: ask for what was dropped, or report it lost."""
        self._inbox.has_refused = False
        if not self._config.can_replay:
            self._must_mend = False
            self._steps.append(Lost(self._tracker.last_seq + 1, None))
        else:
            self._steps.extend(self._tracker.probe())

    def _on_live(self, seq: int, payload: bytes) -> None:
        self._quiet_since_s = self._loop.time()
        if self._probe_after_s > self._config.probe_s:  # else a lost tail waits for the timer of a quieter time
            self._set_timer("probe", self._config.probe_s, self._probe_if_quiet)
        self._probe_after_s = self._config.probe_s
        self._late_probes = 0
        self._probed_seq = None
        self._steps.extend(self._tracker.live(seq, payload))

    def _on_replayed(self, seq: int, payload: bytes) -> None:
        if self._replay is None:
            return
        # The token of the question this socket was asked; the tracker may have moved on to one not yet sent.
        token = self._asked_token
        self._answer_by_s = self._loop.time() + self._config.replay_timeout_s
        if is_end_of_replay(seq):
            self._replay.mark_answered()
            self._must_mend = self._inbox.has_refused
            self._steps.extend(self._tracker.replay_ended(token, complete=True))
        else:
            self._steps.extend(self._tracker.replayed(token, seq, payload))

    def _on_connection_event(self, frames: list[bytes]) -> None:
        event = read_link_event(frames)
        endpoint = self._config.endpoint
        if event == "connected":
            self._on_connected()
        elif event == "gone" and self._connected:
            self._connected = False
            self._report("lost", f"the connection to {endpoint} is gone; trying again")
        elif event == "failed" and not self._connected and self._status and self._status[0] == "connecting":
            self._report("connecting", f"{endpoint} cannot be reached; check host and port; trying again for ever")

    def _on_connected(self) -> None:
        """Hand over what the previous connection still brought, then tell the tracker of the new one."""
        self._ready.add("live")
        while self._inbox or "live" in self._ready:
            if (batch := self._inbox.pop() or self._receive("live")) is not None:
                self._on_live(*batch)
        self._connected = True
        self.counters.connections += 1
        self._steps.extend(self._tracker.connected())
        self._report_syncing()

    # -- steps --

    def _carry_out(self, step: Step) -> None:
        if isinstance(step, Apply):
            self.counters.batches += 1
            self.last_seq = step.seq
            self._doubt = None
            self._tell(f"batch {step.seq}", self._sink.on_batch, step.seq, step.payload)
        elif isinstance(step, AskReplay):
            self._set_timer("ask", self._ask_delay_s(step.attempt), lambda: self._ask(step))
        elif isinstance(step, Lost):
            self.counters.gaps += 1
            self.last_seq = self.last_seq if step.last_seq is None else step.last_seq
            self._tell("a gap", self._sink.on_gap, step.first_seq, step.last_seq)
        elif isinstance(step, NewLife):
            self.counters.lives += 1
            self.last_seq = -1
            # Whoever listens must hear "live" again once the new life is caught up with.
            self._report_syncing()
            self._tell("a new life", self._sink.on_life, step.reason)

    def _ask_delay_s(self, attempt: int) -> float:
        """Repeated failures wait ever longer; and never two questions at once, whatever the publisher answers."""
        patience_s = min(self._config.retry_s * 2 ** (attempt - 1), self._config.retry_max_s) if attempt else 0.0
        return max(self._spread.stretch(patience_s), self._asked_s + _ASK_SPACING_S - self._loop.time(), 0.0)

    def _ask(self, step: AskReplay) -> None:
        if self._replay is None or step.token != self._tracker.replay_token:
            return
        self.counters.replays += 1
        self._asked_s = self._loop.time()
        self._asked_token = step.token
        renewed = self._replay.needs_new_socket()
        if renewed:
            self._unwatch("replay")
        self._sockets["replay"] = self._replay.ask(step.from_seq)
        if renewed:
            self._watch("replay")
        self._on_readable("replay")
        self._answer_by_s = self._loop.time() + self._config.replay_timeout_s
        self._set_timer("answer", self._config.replay_timeout_s, lambda: self._check_answer(step.token))

    def _check_answer(self, token: int) -> None:
        """End a replay that went silent; one whose answer we have not read yet has not."""
        if token != self._tracker.replay_token:
            return
        wait_s = self._answer_by_s - self._loop.time()
        if self._steps or "replay" in self._ready:
            wait_s = max(wait_s, 0.05)
        if wait_s > 0:
            self._set_timer("answer", wait_s, lambda: self._check_answer(token))
            return
        self.counters.failed_replays += 1
        self._steps.extend(self._tracker.replay_ended(token, complete=False))
        self._on_readable("live")

    def _probe_if_quiet(self) -> None:
        """Ask for the tail when no batch came for a while: a lost last batch, or a restart, shows in nothing else."""
        quiet_s = self._loop.time() - self._quiet_since_s
        if quiet_s >= self._probe_after_s:
            if self._connected and not self._steps and not self._ready and not self._inbox:
                # New batches since the last probe, none of them live: nobody would notice otherwise, all is in order.
                late = self._probed_seq is not None and self._tracker.last_seq > self._probed_seq
                self._late_probes = self._late_probes + 1 if late else 0
                self._probed_seq = self._tracker.last_seq
                self._steps.extend(self._tracker.probe())
                self._on_readable("live")
            self._quiet_since_s = self._loop.time()
            self._probe_after_s = self._spread.stretch(
                min(2 * self._probe_after_s, self._config.probe_max_s / Spread.MOST)
            )
            quiet_s = 0.0
        self._set_timer("probe", self._probe_after_s - quiet_s, self._probe_if_quiet)

    def _report_order(self) -> None:
        """All was delivered: say whether that is everything."""
        if not self._connected or self._doubt is not None:
            return
        if self._late_probes >= _LATE_PROBES:
            topic = f" and the topic {self._config.topic!r}" if self._config.topic else ""
            self._report("syncing", f"batches come by replay only, late: check {self._config.endpoint}{topic}")
        elif self._tracker.is_live and not self._must_mend:
            self._report("live", "caught up with the publisher")
        else:
            self._report_syncing()

    def _report_syncing(self) -> None:
        if self._must_mend:
            self._report("syncing", "batches came faster than they could be taken, and some were dropped here")
        elif self._config.replay_endpoint is None:
            self._report("syncing", "no replay endpoint: the next batch tells what was missed")
        else:
            self._report("syncing", f"waiting for {self._config.replay_endpoint} to replay what was missed")

    def _report(self, status: StreamStatus, reason: str) -> None:
        if self._status is not None and self._status[0] == status and (status == "live" or self._status[1] == reason):
            return
        self._status = (status, reason)
        self._tell("a status", self._sink.on_status, status, reason)

    def _tell(self, what: str, call: Callable[..., None], *args: object) -> None:
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 - whatever the sink does, the stream goes on
            self.counters.sink_errors += 1
            if what != "a status" and self._status is not None:
                reason = f"the receiver failed on {what}: {error!r}"
                self._tell("a status", self._sink.on_status, self._status[0], reason)
