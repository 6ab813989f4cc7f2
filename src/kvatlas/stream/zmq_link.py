"""A publisher's live stream over a SUB socket of libzmq: for every endpoint that is not plain TCP to connect to."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvatlas._native import Run, append_batch
from kvatlas.stream.endpoints import bind_or_connect
from kvatlas.stream.link import LinkEvent
from kvatlas.stream.replay_channel import split_frames
from kvatlas.stream.spread import Spread, ms_of
from kvatlas.stream.subscriber_config import SubscriberConfig

__all__ = ["ZmqLink", "receive_frames"]

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

_NOBLOCK = int(zmq.NOBLOCK)  # as a flag of an enumeration each use would cost a look-up
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_READ_BATCHES = 32
_FAILED = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ZmqLink:
    """A `LiveLink` of a SUB socket and the socket that tells of its connection.

    A descriptor of libzmq tells only that a socket's state changed: after it every message is to be read. Events come
    from another thread than messages, so a connection may be told of a moment after what came over it.
    """

    def __init__(self, context: Context, config: SubscriberConfig, spread: Spread) -> None:
        self._context = context
        self._config = config
        self._pauses_ms = spread.pauses_ms(config)
        self._live: Socket | None = None
        self._monitor: Socket | None = None
        self._begins_connected = config.endpoint.startswith("inproc://")  # there is no connection to hear of
        self.bad_messages = 0
        self.is_drained = False

    def open(self, wake: Callable[[], None]) -> None:
        """Start to connect, or to listen.

        Raises:
            ConfigError: the endpoint is malformed, or taken.
        """
        self._loop = asyncio.get_running_loop()
        self._wake = wake
        self._live = live = _open_socket(self._context, self._config, self._pauses_ms)
        self._monitor = live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED)
        bind_or_connect(live, self._config.endpoint, bind=self._config.bind)
        self._loop.add_reader(self._monitor.fileno(), wake)
        self.watch()

    def watch(self) -> None:
        """Tell of data as it comes; what came before no descriptor tells again."""
        if self._live is not None:
            self._loop.add_reader(self._live.fileno(), self._wake)
            self._wake()

    def unwatch(self) -> None:
        """Do not tell of data."""
        if self._live is not None:
            self._loop.remove_reader(self._live.fileno())

    def take_events(self) -> list[LinkEvent]:
        """What happened since the last call."""
        events: list[LinkEvent] = []
        if self._begins_connected:
            self._begins_connected = False
            events.append(LinkEvent("connected"))
        while self._monitor is not None and has_message(self._monitor):
            event = _event_of(receive_frames(self._monitor))
            if event is not None:
                events.append(event)
        return events

    def receive_runs(self) -> list[Run]:
        """Some of the batches that wait. Cost: 5 us a batch."""
        runs: list[Run] = []
        self.is_drained = True
        if self._live is None:
            return runs
        for _ in range(_READ_BATCHES):
            frames = receive_frames(self._live)
            if not frames:
                return runs
            batch = split_frames(frames)
            if batch is None:
                self.bad_messages += 1
            else:
                append_batch(runs, *batch)
        self.is_drained = False
        return runs

    def close(self) -> None:
        """Close both sockets, dropping what they still hold. Idempotent."""
        live, monitor = self._live, self._monitor
        self._live = self._monitor = None
        if live is None or live.closed:
            return
        self._loop.remove_reader(live.fileno())
        if monitor is not None:
            self._loop.remove_reader(monitor.fileno())
            live.disable_monitor()
            monitor.close(linger=0)
        live.close(linger=0)


def _open_socket(context: Context, config: SubscriberConfig, pauses_ms: tuple[int, int]) -> Socket:
    """A SUB socket that is not connected yet."""
    live = context.socket(zmq.SUB)
    for option, value in (
        (zmq.LINGER, 0),
        # Reached only when we cannot even read and drop as fast as it comes; then the publisher drops.
        (zmq.RCVHWM, config.max_queue_batches),
        (zmq.MAXMSGSIZE, config.max_message_bytes),
        (zmq.RECONNECT_IVL, pauses_ms[0]),
        (zmq.RECONNECT_IVL_MAX, pauses_ms[1]),
        (zmq.CONNECT_TIMEOUT, ms_of(config.reconnect_max_s)),
        (zmq.HEARTBEAT_IVL, ms_of(config.heartbeat_s)),
        (zmq.HEARTBEAT_TIMEOUT, ms_of(config.patience_s)),
    ):
        live.setsockopt(option, value)
    live.setsockopt(zmq.SUBSCRIBE, config.topic.encode())
    return live


def _event_of(frames: list[bytes]) -> LinkEvent | None:
    """What a message of the monitor tells; None when it is nothing of interest."""
    event = parse_monitor_message(frames)["event"]
    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        return LinkEvent("connected")
    if event == zmq.EVENT_DISCONNECTED:
        return LinkEvent("gone", "the connection is gone")
    return LinkEvent("failed", "check host and port") if event & _FAILED else None


def receive_frames(socket: Socket) -> list[bytes]:
    """The frames of the next message, none when there is no message. As recv_multipart, in half the time.

    Raises:
        zmq.ZMQError: the socket is closed, or its context is terminated.
    """
    try:
        frame = socket.recv(_NOBLOCK, copy=False)
    except zmq.Again:
        return []
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(copy=False)
        frames.append(frame.bytes)
    return frames


def has_message(socket: Socket) -> bool:
    """Whether a message waits; half the price of an attempt to read one."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)
