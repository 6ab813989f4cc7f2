"""A publisher of KV events that a consumer of vLLM's or SGLang's stream cannot tell from theirs."""

import contextlib
import math
import queue
import socket as os_socket
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

import msgspec
import zmq

from kvatlas.errors import PublisherClosed
from kvatlas.events import EventBatch, encode_batch
from kvatlas.stream.outlet import LinkDown, LiveStep, Outlet, PlainOutlet, Sent
from kvatlas.stream.publisher_sockets import Context, PublisherConfig, PublisherSockets

__all__ = ["ZmqEventPublisher"]

# Batches sent in a row before the replay socket is looked at again.
_BURST = 64


class ZmqEventPublisher:
    """PUB with three frames (topic, 8-byte big-endian number from 0, msgpack batch), and a ROUTER that replays.

    One thread owns both sockets and waits on both at once. `publish` may be called from any one thread. `outlet`
    decides what is sent and answered; without one the publisher does what engines do.

    Source: vLLM 0.32.0, distributed/kv_events.py (ZmqEventPublisher); SGLang 0.5.23's publisher behaves alike.

    Raises:
        ConfigError: an endpoint is malformed, taken, or has no room for the rank.
    """

    def __init__(
        self,
        config: PublisherConfig,
        data_parallel_rank: int = 0,
        *,
        context: "Context | None" = None,
        outlet: Outlet | None = None,
    ) -> None:
        self._rank = data_parallel_rank
        self._queue: queue.Queue[bytes | Callable[[], Sequence[LiveStep]]] = queue.Queue(config.max_queue_size)
        self._outlet = outlet or PlainOutlet(config.buffer_steps)
        self._closed = threading.Event()
        self.ignored_requests = 0
        """Replay requests that were not answered because they were not two frames."""
        self._sockets = PublisherSockets(config, data_parallel_rank, context or zmq.Context.instance())
        self.endpoint = self._sockets.endpoint
        """Where batches are published, with its real port."""
        self.replay_endpoint = self._sockets.replay_endpoint
        """Where replay is served, with its real port; None when it is not."""
        self._wake_reader, self._wake_writer = os_socket.socketpair()
        self._wake_reader.settimeout(0)
        self._wake_writer.settimeout(0)
        self._sockets.poller.register(self._wake_reader, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kvatlas-event-publisher", daemon=True)
        self._thread.start()

    def publish(self, batch: EventBatch) -> None:
        """Queue a batch. A rank of None becomes the publisher's; a full queue blocks the caller, it never drops.

        Raises:
            PublisherClosed: `close` was called.
        """
        if batch.data_parallel_rank is None:
            batch = msgspec.structs.replace(batch, data_parallel_rank=self._rank)
        self._enqueue(encode_batch(batch))

    def at_outlet(self, action: Callable[[], Sequence[LiveStep]]) -> None:
        """Queue something to do with the outlet, between the batches before and after; what it returns is carried out.

        Raises:
            PublisherClosed: `close` was called.
        """
        self._enqueue(action)

    def _enqueue(self, item: bytes | Callable[[], Sequence[LiveStep]]) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
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

    # -- the thread --

    def _run(self) -> None:
        try:
            while not self._closed.is_set() or not self._queue.empty():
                self._wait()
                with contextlib.suppress(OSError):
                    self._wake_reader.recv(65_536)
                self._sockets.go_on()
                self._carry_out(self._outlet.due())
                while self._send_queued():
                    self._serve_replays()
                self._serve_replays()
        finally:
            self._closed.set()
            self._sockets.close()

    def _wait(self) -> None:
        """Until there is something to send or to answer, or it is time to."""
        waits = (self._outlet.next_due_s(), self._sockets.next_due_s())
        wait_s = min((wait_s for wait_s in waits if wait_s is not None), default=None)
        self._sockets.poller.poll(None if wait_s is None else math.ceil(wait_s * 1000))

    def _send_queued(self) -> bool:
        """Send up to one burst; whether more may be waiting."""
        for _ in range(_BURST):
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return False
            self._carry_out(self._outlet.publish(item) if isinstance(item, bytes) else item())
        return True

    def _carry_out(self, steps: Iterable[LiveStep]) -> None:
        for step in steps:
            if isinstance(step, Sent):
                self._sockets.send(step)
            elif isinstance(step, LinkDown):
                self._sockets.close()
            else:
                self._sockets.reopen()

    def _serve_replays(self) -> None:
        while (question := self._sockets.next_question()) is not None:
            identity, *request = question
            if len(request) != 2:
                self.ignored_requests += 1
                continue
            # Who asks after `publish` returned gets that batch.
            for _ in range(self._queue.qsize() // _BURST + 1):
                self._send_queued()
            answer = self._outlet.replay(int.from_bytes(request[1], "big"))
            if answer is not None:
                self._sockets.answer(identity, answer)
