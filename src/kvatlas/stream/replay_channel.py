"""One question at a time to a publisher's replay socket, and its answer."""

from typing import TypeAlias

import zmq

from kvatlas.stream.endpoints import bind_or_connect
from kvatlas.stream.publisher_sockets import END_OF_REPLAY

__all__ = ["ReplayChannel", "is_end_of_replay", "split_frames"]

Socket: TypeAlias = "zmq.Socket[bytes]"


def split_frames(frames: list[bytes]) -> tuple[int, bytes] | None:
    """Number and payload of a message, live or replayed; None when it is not one.

    Counted from the end, because older engines leave out the topic frame of replayed messages. The end marker has
    number 2**64 - 1.

    Source: vLLM 0.32.0, distributed/kv_events.py (ZmqEventPublisher); older SGLang leaves the topic frame out.
    """
    if len(frames) < 2 or len(frames[-2]) != 8:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]


class ReplayChannel:
    """A DEALER that asks for batches. A question not answered to its end costs the socket: late answers die with it.

    `reconnect_ms` is the first and the longest pause between two attempts to connect.

    Raises:
        ConfigError: the endpoint is malformed (from `connect`).
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        *,
        max_message_bytes: int,
        reconnect_ms: tuple[int, int] = (100, 5_000),
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._max_message_bytes = max_message_bytes
        self._reconnect_ms = reconnect_ms
        self._socket: Socket | None = None
        self._answered = True

    def needs_new_socket(self) -> bool:
        """Whether the next `ask` replaces the socket."""
        return self._socket is None or not self._answered

    def connect(self) -> Socket:
        """Open the socket ahead of the first question, so that a malformed endpoint shows at once."""
        socket = self._context.socket(zmq.DEALER)
        # With a bounded queue here the publisher's own queue fills and drops batches in the middle of the answer.
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        # Without a maximum ZMQ knocks ten times a second for ever at an engine that is gone.
        socket.setsockopt(zmq.RECONNECT_IVL, self._reconnect_ms[0])
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, self._reconnect_ms[1])
        try:
            bind_or_connect(socket, self._endpoint, bind=False)
        except BaseException:
            socket.close(linger=0)
            raise
        self._socket = socket
        return socket

    def ask(self, from_seq: int) -> Socket:
        """Ask for every batch from `from_seq` on and return the socket on which the answer comes."""
        if self.needs_new_socket():
            self.close()
        socket = self._socket or self.connect()
        self._answered = False
        # A DEALER sends the empty frame itself; without it the publisher does not answer.
        socket.send_multipart((b"", from_seq.to_bytes(8, "big")))
        return socket

    def mark_answered(self) -> None:
        """The end marker came: the socket is clean and serves the next question too."""
        self._answered = True

    def close(self) -> None:
        """Close the socket, dropping what it still holds."""
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None


def is_end_of_replay(seq: int) -> bool:
    """Whether a replayed message is the end marker."""
    return seq == int.from_bytes(END_OF_REPLAY, "big")
