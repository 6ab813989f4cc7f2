"""The subscriber: sockets and timers around `SequenceTracker`, on whatever asyncio loop runs.

The sockets' file descriptors are watched directly: no task or future per message, and the same code under uvloop. A
descriptor tells only that a socket's state changed, so every wake-up reads until the socket is empty, in turns of
about a millisecond, and what the tracker tells us to deliver is carried out in the same turns.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Literal, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvatlas.clock import Clock
from kvatlas.events import Apply, AskReplay, Lost, NewLife, SequenceTracker, Step, TrackerLimits
from kvatlas.stream.endpoints import bind_or_connect
from kvatlas.stream.replay_channel import ReplayChannel, is_end_of_replay, split_frames
from kvatlas.stream.sink import EventSink, StreamStatus
from kvatlas.stream.subscriber_config import StreamCounters, SubscriberConfig

__all__ = ["ZmqEventSubscriber"]

Socket: TypeAlias = "zmq.Socket[bytes]"
Channel: TypeAlias = Literal["monitor", "replay", "live"]

# The order in which ready channels are read. Live before replay: a replay must not declare lost what waits to be read.
_CHANNELS: tuple[Channel, ...] = ("monitor", "live", "replay")
_MESSAGES_PER_TURN = 256
_ASK_SPACING_S = 0.05
# Probes in a row that bring batches which should have come live: one may be a lost last batch, two are a wrong topic.
_LATE_PROBES = 2
_FAILED = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


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
    ) -> None:
        self._config = config
        self._sink = sink
        self._clock = clock
        self._context = context or zmq.Context.instance()
        self.counters = StreamCounters()
        """What happened so far."""
        self.last_seq = -1
        """Number of the last batch delivered or reported lost; -1 before the first of a life."""
        self._tracker = SequenceTracker(can_replay=config.replay_endpoint is not None, limits=limits)
        self._replay: ReplayChannel | None = None
        self._sockets: dict[Channel, Socket] = {}
        self._ready: set[Channel] = set()
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

    # -- sockets and timers --

    def _open(self) -> None:
        config = self._config
        live = self._context.socket(zmq.SUB)
        self._sockets["live"] = live
        live.set_hwm(0)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, config.max_message_bytes),
            (zmq.RECONNECT_IVL, _ms(config.reconnect_s)),
            (zmq.RECONNECT_IVL_MAX, _ms(config.reconnect_max_s)),
            (zmq.CONNECT_TIMEOUT, _ms(config.reconnect_max_s)),
            (zmq.HEARTBEAT_IVL, _ms(config.heartbeat_s)),
            (zmq.HEARTBEAT_TIMEOUT, _ms(3 * config.heartbeat_s)),
        ):
            live.setsockopt(option, value)
        live.setsockopt(zmq.SUBSCRIBE, config.topic.encode())
        self._sockets["monitor"] = live.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED
        )
        if config.replay_endpoint is not None:
            self._replay = ReplayChannel(
                self._context, config.replay_endpoint, max_message_bytes=config.max_message_bytes
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
        for channel in _CHANNELS:
            self._unwatch(channel)
        if self._replay is not None:
            self._replay.close()
        if live is not None:
            if monitor is not None:
                live.disable_monitor()
                monitor.close(linger=0)
            live.close(linger=0)

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
        until_s = self._clock.monotonic_s() + self._config.turn_s
        for _ in range(_MESSAGES_PER_TURN):
            if self._closing.is_set():
                return
            if self._steps:
                self._carry_out(self._steps.popleft())
            elif not self._read_one():
                self._report_order()
                return
            if self._clock.monotonic_s() >= until_s:
                break
        self._turn_is_due = True
        self._loop.call_soon(self._turn)

    def _read_one(self) -> bool:
        """Read one message of the first channel that has one; False when all are empty."""
        for channel in _CHANNELS:
            if channel not in self._ready:
                continue
            try:
                frames = self._sockets[channel].recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._ready.discard(channel)
                continue
            if channel == "monitor":
                self._on_connection_event(frames)
            elif (message := split_frames(frames)) is None:
                self.counters.bad_messages += 1
            elif channel == "live":
                self._on_live(*message)
            else:
                self._on_replayed(*message)
            return True
        return False

    def _on_live(self, seq: int, payload: bytes) -> None:
        self._quiet_since_s = self._loop.time()
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
            self._steps.extend(self._tracker.replay_ended(token, complete=True))
        else:
            self._steps.extend(self._tracker.replayed(token, seq, payload))

    def _on_connection_event(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        endpoint = self._config.endpoint
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._on_connected()
        elif event == zmq.EVENT_DISCONNECTED and self._connected:
            self._connected = False
            self._report("lost", f"the connection to {endpoint} is gone; trying again")
        elif event & _FAILED and not self._connected and self._status and self._status[0] == "connecting":
            self._report("connecting", f"{endpoint} cannot be reached; check host and port; trying again for ever")

    def _on_connected(self) -> None:
        """Hand over what the previous connection still brought, then tell the tracker of the new one."""
        with contextlib.suppress(zmq.Again):
            while True:
                message = split_frames(self._sockets["live"].recv_multipart(zmq.NOBLOCK))
                if message is None:
                    self.counters.bad_messages += 1
                else:
                    self._on_live(*message)
        self._connected = True
        self.counters.connections += 1
        self._steps.extend(self._tracker.connected())
        self._report_syncing()

    # -- steps --

    def _carry_out(self, step: Step) -> None:
        if isinstance(step, Apply):
            self.counters.batches += 1
            self.last_seq = step.seq
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
        return max(patience_s, self._asked_s + _ASK_SPACING_S - self._loop.time(), 0.0)

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
            if self._connected and not self._steps and not self._ready:
                # New batches since the last probe, none of them live: nobody would notice otherwise, all is in order.
                late = self._probed_seq is not None and self._tracker.last_seq > self._probed_seq
                self._late_probes = self._late_probes + 1 if late else 0
                self._probed_seq = self._tracker.last_seq
                self._steps.extend(self._tracker.probe())
                self._on_readable("live")
            self._quiet_since_s = self._loop.time()
            self._probe_after_s = min(2 * self._probe_after_s, self._config.probe_max_s)
            quiet_s = 0.0
        self._set_timer("probe", self._probe_after_s - quiet_s, self._probe_if_quiet)

    def _report_order(self) -> None:
        """All was delivered: say whether that is everything."""
        if not self._connected:
            return
        if self._late_probes >= _LATE_PROBES:
            topic = f" and the topic {self._config.topic!r}" if self._config.topic else ""
            self._report("syncing", f"batches come by replay only, late: check {self._config.endpoint}{topic}")
        elif self._tracker.is_live:
            self._report("live", "caught up with the publisher")
        else:
            self._report_syncing()

    def _report_syncing(self) -> None:
        if self._config.replay_endpoint is None:
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


def _ms(seconds: float) -> int:
    return max(int(seconds * 1000), 1)
