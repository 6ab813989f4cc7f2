"""The SUB socket of a subscriber, with the socket that tells of its connection."""

import random
from typing import Literal, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvatlas.stream.subscriber_config import SubscriberConfig

__all__ = ["LinkEvent", "Spread", "close_live", "open_live", "read_link_event", "receive_frames"]

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
LinkEvent: TypeAlias = Literal["connected", "gone", "failed"]

_NOBLOCK = int(zmq.NOBLOCK)  # as a flag of an enumeration each use would cost a look-up
_FAILED = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Spread:
    """Stretches waiting times at random by up to a half, so that many subscribers do not act in step.

    ZMQ itself does not spread its attempts to connect when they back off.
    """

    MOST = 1.5

    def __init__(self, rng: random.Random | None) -> None:
        self._rng = rng or random.Random()

    def stretch(self, seconds: float) -> float:
        """A time from `seconds` to half as much again."""
        return seconds * self._rng.uniform(1.0, self.MOST)

    def pauses_ms(self, config: SubscriberConfig) -> tuple[int, int]:
        """The first and the longest pause between two attempts to connect."""
        return _ms(self.stretch(config.reconnect_s)), _ms(self.stretch(config.reconnect_max_s))


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
        (zmq.CONNECT_TIMEOUT, _ms(config.reconnect_max_s)),
        (zmq.HEARTBEAT_IVL, _ms(config.heartbeat_s)),
        (zmq.HEARTBEAT_TIMEOUT, _ms(3 * config.heartbeat_s)),
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
    """The frames of the next message, none when there is no message. As recv_multipart, in half the time."""
    try:
        frame = socket.recv(_NOBLOCK, copy=False)
    except zmq.Again:
        return []
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(copy=False)
        frames.append(frame.bytes)
    return frames


def read_link_event(frames: list[bytes]) -> LinkEvent | None:
    """What a message of the monitor tells; None when it is nothing of interest."""
    event = parse_monitor_message(frames)["event"]
    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        return "connected"
    if event == zmq.EVENT_DISCONNECTED:
        return "gone"
    return "failed" if event & _FAILED else None


def _ms(seconds: float) -> int:
    return max(int(seconds * 1000), 1)
