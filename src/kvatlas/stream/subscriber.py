"""The subscriber: sockets and timers around `SubscriberCore`, on whatever asyncio loop runs.

The sockets' file descriptors are watched directly: no task or future per message, and the same code under uvloop.
Every wake-up reads until nothing is left, in turns of about a millisecond. A stream that is busy is not watched at all:
it is read every few milliseconds together with all other busy ones, because a wake-up costs more than a batch.
"""

import asyncio
import math
import random
from collections.abc import Callable
from typing import TypeAlias

import zmq

from kvatlas.clock import Clock
from kvatlas.events import AskReplay, SequenceTracker, TrackerLimits
from kvatlas.stream.context import shared_context
from kvatlas.stream.inbox import LiveInbox
from kvatlas.stream.link import LiveLink
from kvatlas.stream.pacer import ReadPacer
from kvatlas.stream.replay_channel import ReplayChannel, is_end_of_replay, split_frames
from kvatlas.stream.sink import EventSink
from kvatlas.stream.spread import Spread
from kvatlas.stream.subscriber_config import StreamCounters, SubscriberConfig
from kvatlas.stream.subscriber_core import SubscriberCore
from kvatlas.stream.tcp_link import TcpLink, tcp_address
from kvatlas.stream.zmq_link import ZmqLink, receive_frames

__all__ = ["ZmqEventSubscriber"]

Socket: TypeAlias = "zmq.Socket[bytes]"

_RUN_BATCHES, _RUN_BYTES = 64, 96 * 1024
"""The most that is delivered without a look at the clock."""


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
        self._clock = clock
        self._context = context or shared_context()
        self._spread = Spread(rng)
        self._core = SubscriberCore(
            config, sink, counters=counters or StreamCounters(), ask=self._ask_later, spread=self._spread, limits=limits
        )
        self._replay: ReplayChannel | None = None
        self._replay_socket: Socket | None = None
        self._link = _link_of(config, self._context, self._spread)
        self._live_is_ready = self._replay_is_ready = False
        self._inbox = LiveInbox(max_batches=config.max_queue_batches, max_bytes=config.max_queue_bytes)
        self._run_batches = 1
        self._turn_is_due = False
        self._is_behind = False  # whether the last turn ended with work left
        self._bad_messages = 0  # those of the link that are counted
        self._is_paced = False  # whether the link is read by the clock, and not watched
        self._heard_s = (-math.inf, -math.inf)  # when live batches were found, the last time and the one before
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._answer_by_s = 0.0
        self._closing = asyncio.Event()

    @property
    def counters(self) -> StreamCounters:
        """What happened so far."""
        return self._core.counters

    @property
    def last_seq(self) -> int:
        """Number of the last batch delivered or reported lost; -1 before the first of a life."""
        return self._core.last_seq

    @property
    def tracker(self) -> SequenceTracker:
        """The state of the stream's order, to read."""
        return self._core.tracker

    async def run(self) -> None:
        """Follow the stream until `close` is called or the task is cancelled. Retries an unreachable endpoint for ever.

        Raises:
            ConfigError: an endpoint is malformed.
        """
        self._loop = asyncio.get_running_loop()
        self._pacer = ReadPacer.of(self._loop)
        try:
            self._open()
            await self._closing.wait()
        finally:
            self._shut()

    def close(self) -> None:
        """End `run`. Idempotent, returns at once; nothing is delivered afterwards."""
        self._closing.set()
        self._core.end()

    def probe_soon(self) -> None:
        """Ask for the tail now, as if the stream had been quiet for long. Nothing happens while a replay runs."""
        if self._core.is_connected:
            self._core.probe()
            self._on_live()

    def distrust(self, reason: str) -> None:
        """Somebody knows better than the sockets that the stream is dead: report it lost until it brings a batch."""
        self._core.distrust(reason)

    # -- sockets and timers --

    def _open(self) -> None:
        config = self._config
        self._core.connecting(f"no connection to {config.endpoint} yet")
        if config.replay_endpoint is not None:
            self._replay = ReplayChannel(
                self._context,
                config.replay_endpoint,
                max_message_bytes=config.max_message_bytes,
                reconnect_ms=self._spread.pauses_ms(config),
            )
            self._use_replay_socket(self._replay.connect())
        self._link.open(self._on_live)
        self._core.start_probing(self._loop.time())
        self._arm_probe()

    def _use_replay_socket(self, socket: "Socket | None") -> None:
        """Watch this socket for answers and no other."""
        if socket is self._replay_socket:
            return
        if self._replay_socket is not None and not self._replay_socket.closed:
            self._loop.remove_reader(self._replay_socket.fileno())
        self._replay_socket = socket
        self._replay_is_ready = False
        if socket is not None:
            self._loop.add_reader(socket.fileno(), self._on_answer)

    def _shut(self) -> None:
        self.close()
        self._pacer.discard(self._read_again)
        for timer in self._timers.values():
            timer.cancel()
        self._use_replay_socket(None)
        if self._replay is not None:
            self._replay.close()
        self._link.close()

    def _set_timer(self, name: str, delay_s: float, callback: Callable[[], None]) -> None:
        previous = self._timers.get(name)
        if previous is not None:
            previous.cancel()
        self._timers[name] = self._loop.call_later(delay_s, callback)

    # -- turns --

    def _on_live(self) -> None:
        self._live_is_ready = True
        self._call_turn()

    def _on_answer(self) -> None:
        self._replay_is_ready = True
        self._call_turn()

    def _call_turn(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Read and deliver for about a millisecond, then let others run."""
        self._turn_is_due = False
        if self._closing.is_set():
            return
        if self._is_paced:
            self._live_is_ready = True  # nobody tells: a long delivery must not leave it unread
        self._take_events()
        core, inbox, now = self._core, self._inbox, self._clock.monotonic_s
        turn_s = self._config.turn_s
        start_s = before_s = now()
        if self._is_behind:
            # Half a turn at most goes into reading ahead: the receiver keeps its share however fast the stream is.
            self._read_ahead(start_s + turn_s / 2)
            before_s = now()
        while before_s < start_s + turn_s:
            if self._closing.is_set():
                return
            if core.steps:
                core.carry_out(core.steps.popleft())
            elif inbox or self._live_is_ready:
                if not inbox:
                    self._read_live()
                core.take_run(*inbox.pop_run(self._run_batches, _RUN_BYTES))
                self._size_runs(now() - before_s)
            elif not self._take_answer() and not self._must_ask_again():
                self._is_behind = False
                core.report_order()
                self._rest()
                return
            before_s = now()
        self._is_behind = True
        self._call_turn()

    def _size_runs(self, took_s: float) -> None:
        """Runs take a quarter to half of a turn, however slow the receiver is."""
        if took_s > self._config.turn_s / 2:
            self._run_batches = max(1, self._run_batches // 2)
        elif took_s < self._config.turn_s / 4:
            self._run_batches = min(_RUN_BATCHES, 2 * self._run_batches)

    def _must_ask_again(self) -> bool:
        """Whether our own queue refused batches, and now, empty and with no question open, they are asked for."""
        if not self._inbox.has_refused or self.tracker.replay_token is not None:
            return False
        self._inbox.has_refused = False
        self._core.mend()
        return True

    def _read_live(self) -> None:
        """Move some live batches from the link into our own queue, which refuses what exceeds its bounds."""
        link = self._link
        runs = link.receive_runs()
        self._live_is_ready = not link.is_drained
        self.counters.bad_messages += link.bad_messages - self._bad_messages
        self._bad_messages = link.bad_messages
        if not runs:
            return
        if not self._core.is_connected:
            self._take_events()  # a connection is told of before what comes over it
        self._heard()
        for run in runs:
            if refused := self._inbox.put(*run):
                self.counters.overflowed += refused
                self._core.must_mend = True
                self._core.report_syncing()

    def _read_ahead(self, until_s: float) -> None:
        while self._live_is_ready:
            self._read_live()
            if self._clock.monotonic_s() >= until_s:
                return

    def _take_answer(self) -> bool:
        """Take in one replayed message, if any; a replay must not declare lost what waits to be read."""
        if not self._replay_is_ready or self._replay_socket is None:
            return False
        frames = receive_frames(self._replay_socket)
        if frames:
            self._on_replayed(frames)
        else:
            self._replay_is_ready = False
        return True

    # -- busy streams --

    def _rest(self) -> None:
        """All is taken: watch the link, or read it by the clock while batches come thick and fast."""
        if self._loop.time() - self._heard_s[0] < 2 * self._pacer.interval_s:
            if not self._is_paced:
                self._is_paced = True
                self._link.unwatch()
            self._pacer.call_next(self._loop, self._read_again)
        elif self._is_paced:
            self._is_paced = False
            self._link.watch()

    def _read_again(self) -> None:
        if not self._closing.is_set():
            self._on_live()

    # -- what came --

    def _heard(self) -> None:
        now_s = self._loop.time()
        self._heard_s = (self._heard_s[1], now_s)
        self._core.heard(now_s)
        timer = self._timers.get("probe")
        if timer is not None and timer.when() > self._core.probe_due_s:
            self._arm_probe()

    def _on_replayed(self, frames: list[bytes]) -> None:
        message = split_frames(frames)
        if message is None:
            self.counters.bad_messages += 1
        elif self._replay is not None:
            self._answer_by_s = self._loop.time() + self._config.replay_timeout_s
            if is_end_of_replay(message[0]):
                self._replay.mark_answered()
                self._core.must_mend = self._inbox.has_refused
                self._core.end_replay(complete=True)
            else:
                self._core.take_replayed(*message)

    def _take_events(self) -> None:
        endpoint = self._config.endpoint
        for event in self._link.take_events():
            if event.kind == "connected":
                self._on_connected()
            elif event.kind == "gone":
                self._core.gone(f"{endpoint}: {event.reason}; trying again")
            else:
                self._core.connecting(f"{endpoint} cannot be reached: {event.reason}; trying again for ever")

    def _on_connected(self) -> None:
        """Hand over what was read before, then tell the tracker; what the link still holds may be of another life."""
        while self._inbox:
            first_seq, payloads = self._inbox.pop_run(_RUN_BATCHES, _RUN_BYTES)
            for seq, payload in enumerate(payloads, first_seq):
                self._core.take_later(seq, payload)
        self._core.connected()
        self._live_is_ready = True

    # -- questions --

    def _ask_later(self, step: AskReplay) -> None:
        delay_s = self._core.ask_delay_s(step.attempt, self._loop.time())
        self._set_timer("ask", delay_s, lambda: self._ask(step))

    def _ask(self, step: AskReplay) -> None:
        if self._replay is None or not self._core.is_wanted(step):
            return
        now_s = self._loop.time()
        if self._replay.needs_new_socket():
            self._use_replay_socket(None)
        self._use_replay_socket(self._replay.ask(step.from_seq))
        self._core.asked(step, now_s)
        self._on_answer()
        self._answer_by_s = now_s + self._config.replay_timeout_s
        self._set_timer("answer", self._config.replay_timeout_s, lambda: self._check_answer(step))

    def _check_answer(self, step: AskReplay) -> None:
        """End a replay that went silent; one whose answer we have not read yet has not."""
        if not self._core.is_wanted(step):
            return
        wait_s = self._answer_by_s - self._loop.time()
        if self._core.steps or self._replay_is_ready:
            wait_s = max(wait_s, 0.05)
        if wait_s > 0:
            self._set_timer("answer", wait_s, lambda: self._check_answer(step))
            return
        self._core.end_replay(step.token, complete=False)
        self._on_live()

    def _arm_probe(self) -> None:
        self._set_timer("probe", self._core.probe_due_s - self._loop.time(), self._probe_if_quiet)

    def _probe_if_quiet(self) -> None:
        now_s = self._loop.time()
        if now_s >= self._core.probe_due_s:
            busy = self._core.steps or self._inbox or self._live_is_ready or self._replay_is_ready
            self._core.probe_quiet_stream(now_s, idle=not busy)
            self._on_live()
        self._arm_probe()


def _link_of(config: SubscriberConfig, context: "zmq.Context[Socket]", spread: Spread) -> LiveLink:
    address = None if config.bind else tcp_address(config.endpoint)
    return ZmqLink(context, config, spread) if address is None else TcpLink(address, config, spread)
