"""Live batches that were read and not handed on yet: a queue of our own, bounded, so that ZMQ's needs no room.

When the receiver is slower than the stream, something has to go. It goes here, where it is counted, and not in the
engine's queue: a publisher must never wait for us, nor hold for us what we cannot take.
"""

from collections import deque
from itertools import accumulate

from kvatlas._native import Run

__all__ = ["LiveInbox"]


class LiveInbox:
    """A queue of runs that refuses the batches which exceed its bounds.

    Args:
        max_batches: how many it holds.
        max_bytes: how many bytes of payload it holds.
    """

    __slots__ = ("_at", "_batches", "_bytes", "_max_batches", "_max_bytes", "_runs", "has_refused")

    def __init__(self, *, max_batches: int, max_bytes: int) -> None:
        self._runs: deque[Run] = deque()
        self._at = 0  # where in the oldest run the oldest batch is
        self._batches = 0
        self._bytes = 0
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self.has_refused = False
        """Whether a batch was refused since somebody last set this to False."""

    def __len__(self) -> int:
        return self._batches

    def put(self, first_seq: int, payloads: list[bytes]) -> int:
        """Take a run, or as much of its head as there is room for. An empty queue takes any batch.

        Returns:
            How many batches were refused. Cost: O(batches), 30 ns each.
        """
        size = sum(map(len, payloads))
        refused = 0
        if self._batches + len(payloads) > self._max_batches or self._bytes + size > self._max_bytes:
            fitting = self._count_fitting(payloads)
            refused = len(payloads) - fitting
            self.has_refused = self.has_refused or refused > 0
            payloads = payloads[:fitting]
            size = sum(map(len, payloads))
        if payloads:
            self._runs.append((first_seq, payloads))
            self._batches += len(payloads)
            self._bytes += size
        return refused

    def _count_fitting(self, payloads: list[bytes]) -> int:
        free_bytes = self._max_bytes - self._bytes
        heads = accumulate(map(len, payloads[: self._max_batches - self._batches]))
        return max(sum(length <= free_bytes for length in heads), 0 if self._batches else 1)

    def pop_run(self, max_batches: int, max_bytes: int) -> Run:
        """The oldest batches that follow one another, none when there are none. O(batches), 30 ns each.

        Args:
            max_batches: how many at most, above 0.
            max_bytes: of payload; the batch that reaches it is the last.
        """
        if not self._runs:
            return 0, []
        first_seq, payloads = self._runs[0]
        at = self._at
        run = payloads[at : at + max_batches]
        size = sum(map(len, run))
        if size > max_bytes:
            heads = accumulate(map(len, run[:-1]))
            run = run[: 1 + sum(length < max_bytes for length in heads)]
            size = sum(map(len, run))
        self._at = at + len(run)
        if self._at == len(payloads):
            self._runs.popleft()
            self._at = 0
        self._batches -= len(run)
        self._bytes -= size
        return first_seq + at, run
