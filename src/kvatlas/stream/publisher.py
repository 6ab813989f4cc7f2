"""A publisher of KV events that a consumer of vLLM's or SGLang's stream cannot tell from theirs."""

import contextlib
import queue
import socket as os_socket
import threading
from collections import deque
from types import TracebackType
from typing import Self, TypeAlias

import msgspec
import zmq

from kvatlas.errors import PublisherClosed
from kvatlas.events import EventBatch, encode_batch
from kvatlas.stream.endpoints import bind_or_connect, binds, offset_endpoint

__all__ = ["END_OF_REPLAY", "PublisherConfig", "ZmqEventPublisher"]

END_OF_REPLAY = b"\xff" * 8
"""The sequence number (-1) of the marker that ends a replay. Source: vLLM 0.32.0, distributed/kv_events.py."""

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

# Batches sent in a row before the replay socket is looked at again.
_BURST = 64


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


class ZmqEventPublisher:
    """PUB with three frames (topic, 8-byte big-endian number from 0, msgpack batch), and a ROUTER that replays.

    One thread owns both sockets and waits on both at once. `publish` may be called from any one thread.

    Source: vLLM 0.32.0, distributed/kv_events.py (ZmqEventPublisher); SGLang 0.5.23's publisher behaves alike.

    Raises:
        ConfigError: an endpoint is malformed, taken, or has no room for the rank.
    """

    def __init__(
        self, config: PublisherConfig, data_parallel_rank: int = 0, *, context: "Context | None" = None
    ) -> None:
        self._rank = data_parallel_rank
        self._topic = config.topic.encode()
        self._queue: queue.Queue[bytes] = queue.Queue(maxsize=config.max_queue_size)
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._next_seq = 0
        self._closed = threading.Event()
        self.ignored_requests = 0
        """Replay requests that were not answered because they were not two frames."""
        context = context or zmq.Context.instance()
        self._replay: zmq.Socket[bytes] | None = None
        self.replay_endpoint: str | None = None
        """Where replay is served, with its real port; None when it is not."""
        self._pub = context.socket(zmq.PUB)
        try:
            self._pub.set_hwm(config.hwm)
            endpoint = offset_endpoint(config.endpoint, data_parallel_rank)
            bind = binds(endpoint) if config.bind is None else config.bind
            self.endpoint = bind_or_connect(self._pub, endpoint, bind=bind)
            """Where batches are published, with its real port."""
            if config.replay_endpoint:
                self._replay = context.socket(zmq.ROUTER)
                self._replay.set_hwm(config.replay_hwm)
                replay_endpoint = offset_endpoint(config.replay_endpoint, data_parallel_rank)
                self.replay_endpoint = bind_or_connect(self._replay, replay_endpoint, bind=True)
        except BaseException:
            self._close_sockets()
            raise
        self._wake_reader, self._wake_writer = os_socket.socketpair()
        self._wake_reader.settimeout(0)
        self._wake_writer.settimeout(0)
        self._thread = threading.Thread(target=self._run, name="kvatlas-event-publisher", daemon=True)
        self._thread.start()

    def publish(self, batch: EventBatch) -> None:
        """Queue a batch. A rank of None becomes the publisher's; a full queue blocks the caller, it never drops.

        Raises:
            PublisherClosed: `close` was called.
        """
        if batch.data_parallel_rank is None:
            batch = msgspec.structs.replace(batch, data_parallel_rank=self._rank)
        payload = encode_batch(batch)
        while not self._closed.is_set():
            try:
                self._queue.put(payload, timeout=0.1)
            except queue.Full:
                continue
            self._wake()
            return
        raise PublisherClosed("publish() after close(): make a new publisher, its numbers start again at 0")

    def close(self) -> None:
        """Send what is queued, then close both sockets; takes two seconds at most. What was not fetched is lost."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake()
        self._thread.join(timeout=2.0)
        self._wake_reader.close()
        self._wake_writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wake(self) -> None:
        # A full pipe wakes the thread just as well; a closed one means that it is gone.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_reader, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while not self._closed.is_set() or not self._queue.empty():
                poller.poll()
                with contextlib.suppress(OSError):
                    self._wake_reader.recv(65_536)
                while self._send_queued():
                    self._serve_replays()
                self._serve_replays()
        finally:
            self._closed.set()
            self._close_sockets()

    def _send_queued(self) -> bool:
        """Send up to one burst; whether more may be waiting."""
        for _ in range(_BURST):
            try:
                payload = self._queue.get_nowait()
            except queue.Empty:
                return False
            seq = self._next_seq.to_bytes(8, "big")
            self._next_seq += 1
            self._pub.send_multipart((self._topic, seq, payload))
            self._buffer.append((seq, payload))
        return True

    def _serve_replays(self) -> None:
        if self._replay is None:
            return
        while True:
            try:
                identity, *request = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(request) != 2:
                self.ignored_requests += 1
                continue
            # Who asks after `publish` returned gets that batch.
            for _ in range(self._queue.qsize() // _BURST + 1):
                self._send_queued()
            start_seq = int.from_bytes(request[1], "big")
            for seq, payload in self._buffer:
                if int.from_bytes(seq, "big") >= start_seq:
                    self._replay.send_multipart((identity, b"", self._topic, seq, payload))
            self._replay.send_multipart((identity, b"", b"", END_OF_REPLAY, b""))

    def _close_sockets(self) -> None:
        self._pub.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)
