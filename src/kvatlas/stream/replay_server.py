"""A publisher whose past is longer than memory: PUB, and a ROUTER that answers from a source read bit by bit.

An engine's ROUTER silently drops what a slow reader does not fetch in time. This one waits for the reader: an answer
goes on when the reader took what was sent, so it is complete or ends without its marker, and costs no more memory than
one reader's queue. Everything runs on the asyncio loop.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from typing import Protocol, TypeAlias

import msgspec
import zmq

from kvatlas.errors import ConfigError
from kvatlas.stream.endpoints import bind_or_connect
from kvatlas.stream.outlet import Sent
from kvatlas.stream.publisher_sockets import END_OF_REPLAY

__all__ = ["ReplayServer", "ReplayServerConfig", "ReplaySource", "ServerCounters"]

_log = logging.getLogger(__name__)

Socket: TypeAlias = "zmq.Socket[bytes]"

_TURN_S = 0.002
_WAIT_S = 0.005
_REOPEN_S = 0.02
_COMPLAIN_EVERY = 250
_MESSAGES_PER_READER = 32
_QUESTIONS_PER_TURN = 256


class ReplaySource(Protocol):
    """Where the past is."""

    def batches_from(self, seq: int) -> Iterator[Sent]:
        """Every batch numbered `seq` or above, up to the newest there is when the iterator gets there."""
        ...


class ReplayServerConfig(msgspec.Struct, frozen=True):
    """Where to serve, and how much may wait.

    `hwm` live batches may wait for a subscriber before it loses some, `replay_hwm` replayed ones before its answer
    pauses. An answer nobody takes anything of for `stalled_s` ends, and a question is not answered while `max_answers`
    are being given: the reader asks again.
    """

    endpoint: str
    replay_endpoint: str
    topic: str = ""
    hwm: int = 100_000
    replay_hwm: int = 1_000
    stalled_s: float = 60.0
    max_answers: int = 256


class ServerCounters(msgspec.Struct):
    """What was served since the start. Counters only grow; `answers_now` is a level."""

    published: int = 0
    questions: int = 0
    replayed: int = 0
    answers: int = 0
    broken_answers: int = 0
    ignored_requests: int = 0
    answers_now: int = 0


class _Answer:
    """What is left of an answer to one reader."""

    __slots__ = ("batches", "identity", "moved_s", "next")

    def __init__(self, identity: bytes, batches: Iterator[Sent], now_s: float) -> None:
        self.identity = identity
        self.batches = batches
        self.next: Sent | None = None
        self.moved_s = now_s


class ReplayServer:
    """Publishes what it is given and replays what the source has. Used on one event loop.

    Source: vLLM 0.32.0, distributed/kv_events.py (frames, question and answer).

    Raises:
        ConfigError: an endpoint is malformed or taken (from `open`).
    """

    def __init__(
        self, config: ReplayServerConfig, source: ReplaySource, *, context: "zmq.Context[Socket] | None" = None
    ) -> None:
        self._config = config
        self._source = source
        self._context = context or zmq.Context.instance()
        self._topic = config.topic.encode()
        self._pub: Socket | None = None
        self._router: Socket | None = None
        self._answers: dict[bytes, deque[_Answer]] = {}  # by reader; its first one is being given
        self._reopen_failures = 0
        self._timer: asyncio.Handle | None = None
        self._reopening: asyncio.TimerHandle | None = None
        self.endpoint = config.endpoint
        """Where batches are published, with its real port once it was open."""
        self.replay_endpoint = config.replay_endpoint
        """Where replay is served, likewise."""
        self.counters = ServerCounters()

    @property
    def is_open(self) -> bool:
        """Whether readers can connect."""
        return self._pub is not None

    def open(self) -> None:
        """Be reachable. Does nothing when it is already.

        Raises:
            ConfigError: an endpoint is malformed or taken.
        """
        if self._pub is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._pub.set_hwm(self._config.hwm)
            self._router.set_hwm(self._config.replay_hwm)
            # A full queue is then an error that can be waited for, not a silent loss.
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.endpoint = bind_or_connect(self._pub, self.endpoint, bind=True)
            self.replay_endpoint = bind_or_connect(self._router, self.replay_endpoint, bind=True)
        except BaseException:
            self.close()
            raise
        self._loop.add_reader(self._router.fileno(), self._turn)
        self._turn_soon()

    def close(self) -> None:
        """Break all connections: readers see what they see of a publisher that ends. Idempotent."""
        for handle in (self._timer, self._reopening):
            if handle is not None:
                handle.cancel()
        self._timer = self._reopening = None
        self.counters.broken_answers += self.counters.answers_now
        self._answers.clear()
        self.counters.answers_now = 0
        if self._router is not None and self._pub is not None:
            with contextlib.suppress(ValueError, OSError, zmq.ZMQError):
                self._loop.remove_reader(self._router.fileno())
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger=0)
        self._pub = self._router = None

    def reopen(self) -> None:
        """Be reachable again on the same ports, now or as soon as they are free."""
        self._reopening = None
        try:
            self.open()
            self._reopen_failures = 0
        except ConfigError as error:
            # ZMQ gives a port back a moment after the socket on it was closed.
            self._reopen_failures += 1
            if self._reopen_failures % _COMPLAIN_EVERY == 0:
                _log.error("still not serving: %s", error.message)
            self._reopening = asyncio.get_running_loop().call_later(_REOPEN_S, self.reopen)

    def send(self, seq: int, payload: bytes) -> None:
        """Publish one batch to whoever is connected. Never waits."""
        if self._pub is not None:
            self.counters.published += 1
            self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload))

    # -- answers --

    def _turn_soon(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_soon(self._timed_turn)

    def _timed_turn(self) -> None:
        self._timer = None
        self._turn()

    def _turn(self) -> None:
        """Take questions and go on with answers, for about two milliseconds."""
        asked = self._take_questions()
        until_s = self._loop.time() + _TURN_S
        moved = True
        while moved and self._answers and self._loop.time() < until_s:
            moved = False
            for answers in list(self._answers.values()):
                moved = self._go_on(answers[0]) or moved
        if self._timer is not None or self._router is None:
            return
        if moved and (self._answers or asked == _QUESTIONS_PER_TURN):
            self._turn_soon()
        elif self._answers:
            self._timer = self._loop.call_later(_WAIT_S, self._timed_turn)
        elif self._router.poll(0):  # the descriptor tells only of changes
            self._turn_soon()

    def _take_questions(self) -> int:
        for taken in range(_QUESTIONS_PER_TURN):
            if self._router is None:
                return taken
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return taken
            identity, request = frames[0], frames[1:]
            is_question = len(request) == 2 and not request[0]
            if not is_question or self.counters.answers_now >= self._config.max_answers:
                self.counters.ignored_requests += 1
                continue
            self.counters.questions += 1
            self.counters.answers_now += 1
            batches = self._source.batches_from(int.from_bytes(request[1], "big"))
            self._answers.setdefault(identity, deque()).append(_Answer(identity, batches, self._loop.time()))
        return _QUESTIONS_PER_TURN

    def _go_on(self, answer: _Answer) -> bool:
        """Send the next batches of an answer; whether any could be."""
        for sent in range(_MESSAGES_PER_READER):
            if answer.next is None:
                answer.next = next(answer.batches, None)
            batch = answer.next
            try:
                self._send(answer.identity, batch)
            except zmq.Again:
                if not sent and self._loop.time() - answer.moved_s > self._config.stalled_s:
                    self._end(answer, whole=False)
                return sent > 0
            except zmq.ZMQError:  # the reader is gone
                self._end(answer, whole=False)
                return True
            answer.moved_s = self._loop.time()
            if batch is None:
                self._end(answer, whole=True)
                return True
            answer.next = None
            self.counters.replayed += 1
        return True

    def _send(self, identity: bytes, batch: Sent | None) -> None:
        if self._router is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if batch is None:
            frames: tuple[bytes, ...] = (identity, b"", b"", END_OF_REPLAY, b"")
        else:
            frames = (identity, b"", self._topic, batch.seq.to_bytes(8, "big"), batch.payload)
        self._router.send_multipart(frames, zmq.NOBLOCK)

    def _end(self, answer: _Answer, *, whole: bool) -> None:
        answers = self._answers[answer.identity]
        answers.popleft()
        if not answers:
            del self._answers[answer.identity]
        self.counters.answers_now -= 1
        if whole:
            self.counters.answers += 1
        else:
            self.counters.broken_answers += 1
