"""The SUB socket of a subscriber, with the socket that tells of its connection."""

from typing import Literal, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvatlas.stream.replay_channel import split_frames
from kvatlas.stream.spread import ms_of
from kvatlas.stream.subscriber_config import SubscriberConfig

__all__ = ["LinkEvent", "LiveReader", "close_live", "open_live", "read_link_event", "receive_frames"]

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
LinkEvent: TypeAlias = Literal["connected", "gone", "failed"]

_NOBLOCK = int(zmq.NOBLOCK)  # as a flag of an enumeration each use would cost a look-up
_PAYLOAD_HEADS = frozenset(bytes([head]) for head in range(0x90, 0xA0))  # a short msgpack array, as all batches are
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


class LiveReader:
    """Reads batches from a SUB socket.

    Asking for each frame whether another one follows is most of the cost of a message. So after a row of messages of
    three frames (topic, number, payload) the next ones are taken to be such, unasked: frames that are out of step show
    by a number that has not eight bytes or a payload that does not begin as one. Then the way back to a message's
    start is found by asking; a message of fewer frames may take its neighbour with it, which then shows as a gap.
    """

    __slots__ = ("_socket", "_usual", "bad_messages", "is_drained")

    _PROOF = 8

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._usual = 0
        self.bad_messages = 0
        """Messages that were no batch, so far."""
        self.is_drained = False
        """Whether the last call found nothing more to read."""

    def receive_run(self, most: int, most_bytes: int) -> list[tuple[int, bytes]]:
        """Numbers and payloads of the next batches: up to `most`, and one more than `most_bytes` of payload.

        An empty run may be a message that was no batch: `is_drained` tells. Cost: 2 us a batch.
        """
        run: list[tuple[int, bytes]] = []
        self.is_drained = False
        while len(run) < most and self._usual < self._PROOF:
            message = self._receive_any()
            if message is None:
                self.is_drained = True
                return run
            if not message:
                self.bad_messages += 1
                return run
            run.append(message)
        receive, heads = self._socket.recv, _PAYLOAD_HEADS
        whole = True
        try:
            while len(run) < most and most_bytes > 0:
                receive(_NOBLOCK)  # the topic
                whole = False
                number, payload = receive(_NOBLOCK), receive(_NOBLOCK)
                whole = True
                if len(number) != 8 or payload[:1] not in heads:
                    run += self._find_step(number, payload)
                    break
                run.append((int.from_bytes(number, "big"), payload))
                most_bytes -= len(payload)
        except zmq.Again:
            self.is_drained = whole
            if not whole:
                self._lose_step()
        return run

    def _find_step(self, number: bytes, payload: bytes) -> list[tuple[int, bytes]]:
        """Go to the start of the next message. Returns the batch, if these frames are one after all."""
        self._usual = 0
        in_step = not self._socket.getsockopt(zmq.RCVMORE)
        while self._socket.getsockopt(zmq.RCVMORE):
            self._socket.recv()
        if in_step and len(number) == 8:
            return [(int.from_bytes(number, "big"), payload)]
        self.bad_messages += 1
        return []

    def _lose_step(self) -> None:
        self._usual = 0
        self.bad_messages += 1

    def _receive_any(self) -> tuple[int, bytes] | tuple[()] | None:
        frames = receive_frames(self._socket)
        if not frames:
            return None
        message = split_frames(frames)
        self._usual = self._usual + 1 if len(frames) == 3 and message is not None else 0
        return message or ()


def read_link_event(frames: list[bytes]) -> LinkEvent | None:
    """What a message of the monitor tells; None when it is nothing of interest."""
    event = parse_monitor_message(frames)["event"]
    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        return "connected"
    if event == zmq.EVENT_DISCONNECTED:
        return "gone"
    return "failed" if event & _FAILED else None
