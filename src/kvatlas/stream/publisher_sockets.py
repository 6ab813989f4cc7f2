"""The two sockets of a publisher: opened, closed, opened again on the same ports; and answers that take their time."""

import contextlib
import time
from collections import deque
from typing import TypeAlias

import msgspec
import zmq

from kvatlas.errors import ConfigError
from kvatlas.stream.context import shared_context
from kvatlas.stream.endpoints import bind_or_connect, binds, offset_endpoint
from kvatlas.stream.outlet import ReplayAnswer, Sent

__all__ = ["END_OF_REPLAY", "PublisherConfig", "PublisherSockets"]

END_OF_REPLAY = b"\xff" * 8
"""The sequence number (-1) of the marker that ends a replay. Source: vLLM 0.32.0, distributed/kv_events.py."""

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

_Frames: TypeAlias = tuple[bytes, ...]

# ZMQ gives a port back a moment after the socket on it was closed.
_REOPEN_S = 0.01


class PublisherConfig(msgspec.Struct, frozen=True):
    """Where and how to publish; names and defaults are vLLM's `--kv-events-config`.

    `buffer_steps` batches are kept for replay, `max_queue_size` wait to be sent, `hwm` may wait for each subscriber
    before its batches are dropped. `bind` None takes the engines' rule from the endpoint's text; True or False
    decides. `replay_hwm` is how many replayed batches may wait for a slow reader; above it they are dropped silently,
    as engines do.

    Source: vLLM 0.32.0, distributed/kv_events.py.
    """

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    bind: bool | None = None
    replay_hwm: int = 1_000


class _SlowAnswer:
    """What is left of an answer whose messages are sent one by one."""

    __slots__ = ("due_s", "interval_s", "messages")

    def __init__(self, messages: list[_Frames], interval_s: float) -> None:
        self.messages = deque(messages)
        self.interval_s = interval_s
        self.due_s = time.monotonic() + interval_s


class PublisherSockets:
    """PUB and ROUTER of one rank. Used by one thread at a time.

    Raises:
        ConfigError: an endpoint is malformed, taken, or has no room for the rank.
    """

    def __init__(self, config: PublisherConfig, rank: int, context: "Context | None" = None) -> None:
        self._config = config
        self._context = context or shared_context()
        self._topic = config.topic.encode()
        self._pub: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self._wanted = True
        self._slow_answers: list[_SlowAnswer] = []
        self.poller = zmq.Poller()
        """Wakes when somebody asks for a replay."""
        self.endpoint = offset_endpoint(config.endpoint, rank)
        self.replay_endpoint = offset_endpoint(config.replay_endpoint, rank) if config.replay_endpoint else None
        self._bind = binds(self.endpoint) if config.bind is None else config.bind
        self._open()

    def send(self, sent: Sent) -> None:
        """Send a batch to whoever is connected."""
        if self._pub is not None:
            self._pub.send_multipart((self._topic, sent.seq.to_bytes(8, "big"), sent.payload))

    def next_question(self) -> list[bytes] | None:
        """Who asks (first frame) and what (the rest); None when nobody does."""
        if self._replay is not None:
            with contextlib.suppress(zmq.Again):
                return self._replay.recv_multipart(zmq.NOBLOCK)
        return None

    def answer(self, identity: bytes, answer: ReplayAnswer) -> None:
        """Send an answer, or begin to."""
        messages: list[_Frames] = [
            (identity, b"", self._topic, sent.seq.to_bytes(8, "big"), sent.payload) for sent in answer.batches
        ]
        if answer.has_marker:
            messages.append((identity, b"", b"", END_OF_REPLAY, b""))
        if answer.interval_s > 0:
            self._slow_answers.append(_SlowAnswer(messages, answer.interval_s))
        elif self._replay is not None:
            for message in messages:
                self._replay.send_multipart(message)

    def go_on(self) -> None:
        """Send what is due of slow answers; open what is to be opened and could not be yet."""
        if self._wanted and self._pub is None:
            with contextlib.suppress(ConfigError):
                self._open()
        now_s = time.monotonic()
        for slow in self._slow_answers:
            while slow.messages and slow.due_s <= now_s and self._replay is not None:
                self._replay.send_multipart(slow.messages.popleft())
                slow.due_s += slow.interval_s
        self._slow_answers = [slow for slow in self._slow_answers if slow.messages]

    def next_due_s(self) -> float | None:
        """Seconds until `go_on` has something to do."""
        waits = [slow.due_s - time.monotonic() for slow in self._slow_answers]
        if self._wanted and self._pub is None:
            waits.append(_REOPEN_S)
        return max(0.0, min(waits)) if waits else None

    def reopen(self) -> None:
        """Be reachable on the same ports again, now or as soon as they are free."""
        self._wanted = True
        self.go_on()

    def close(self) -> None:
        """Break all connections; what was not fetched is lost."""
        self._wanted = False
        self._slow_answers.clear()
        if self._replay is not None:
            self.poller.unregister(self._replay)
        for socket in (self._pub, self._replay):
            if socket is not None:
                socket.close(linger=0)
        self._pub = self._replay = None

    def _open(self) -> None:
        self._pub = self._context.socket(zmq.PUB)
        try:
            self._pub.set_hwm(self._config.hwm)
            self.endpoint = bind_or_connect(self._pub, self.endpoint, bind=self._bind)
            if self.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self.poller.register(self._replay, zmq.POLLIN)
                self._replay.set_hwm(self._config.replay_hwm)
                self.replay_endpoint = bind_or_connect(self._replay, self.replay_endpoint, bind=True)
        except BaseException:
            self.close()
            self._wanted = True
            raise
