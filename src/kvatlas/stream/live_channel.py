"""The SUB socket of a subscriber, with the socket that tells of its connection."""

from typing import Literal, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvatlas._native import receive_runs
from kvatlas.stream.libzmq import libzmq_calls
from kvatlas.stream.replay_channel import split_frames
from kvatlas.stream.runs import Run, append_batch
from kvatlas.stream.spread import ms_of
from kvatlas.stream.subscriber_config import SubscriberConfig

__all__ = ["LinkEvent", "LiveReader", "close_live", "has_message", "open_live", "read_link_event", "receive_frames"]

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
LinkEvent: TypeAlias = Literal["connected", "gone", "failed"]

_NOBLOCK = int(zmq.NOBLOCK)  # as a flag of an enumeration each use would cost a look-up
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_FAILED = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def open_live(context: Context, config: SubscriberConfig, pauses_ms: tuple[int, int]) -> tuple[Socket, Socket]:
    """A SUB socket, not connected yet, and the monitor that tells what becomes of its connection."""
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
        (zmq.HEARTBEAT_TIMEOUT, ms_of(3 * config.heartbeat_s)),
    ):
        live.setsockopt(option, value)
    live.setsockopt(zmq.SUBSCRIBE, config.topic.encode())
    return live, live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED)


def close_live(live: Socket, monitor: "Socket | None") -> None:
    """Close both, dropping what they still hold."""
    if monitor is not None:
        live.disable_monitor()
        monitor.close(linger=0)
    live.close(linger=0)


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


class LiveReader:
    """Reads batches from a SUB socket: natively through libzmq's own calls, else through pyzmq's."""

    __slots__ = ("_calls", "_socket", "bad_messages", "is_drained")

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._calls = libzmq_calls()
        self.bad_messages = 0
        """Messages that were no batch, so far."""
        self.is_drained = False
        """Whether the last call found nothing more to read."""

    def receive_runs(self, most: int, most_bytes: int) -> list[Run]:
        """The next batches in the order they came: from `most` messages, and one more than `most_bytes` of payload.

        There may be none of them a batch: `is_drained` tells whether more is to be read. Cost: natively 0.5 us a batch.

        Raises:
            zmq.ZMQError: the socket is closed, or its context is terminated.
        """
        if self._calls is None or receive_runs is None or self._socket.closed:
            return self._receive_slowly(most, most_bytes)
        runs, bad, error = receive_runs(self._calls, self._socket.underlying, most, most_bytes)
        self.bad_messages += bad
        self.is_drained = error == zmq.EAGAIN
        if error and not self.is_drained:
            raise zmq.ZMQError(error)
        return runs

    def _receive_slowly(self, most: int, most_bytes: int) -> list[Run]:
        runs: list[Run] = []
        self.is_drained = False
        while most > 0 and most_bytes > 0:
            frames = receive_frames(self._socket)
            if not frames:
                self.is_drained = True
                break
            most -= 1
            batch = split_frames(frames)
            if batch is None:
                self.bad_messages += 1
                continue
            append_batch(runs, *batch)
            most_bytes -= len(batch[1])
        return runs


def read_link_event(frames: list[bytes]) -> LinkEvent | None:
    """What a message of the monitor tells; None when it is nothing of interest."""
    event = parse_monitor_message(frames)["event"]
    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        return "connected"
    if event == zmq.EVENT_DISCONNECTED:
        return "gone"
    return "failed" if event & _FAILED else None
