"""Live batches that were read and not handed on yet: a queue of our own, bounded, so that ZMQ's needs no room.

When the receiver is slower than the stream, something has to go. It goes here, where it is counted, and not in the
engine's queue: a publisher must never wait for us, nor hold for us what we cannot take.
"""

from collections import deque

__all__ = ["LiveInbox"]


class LiveInbox:
    """A queue of (number, payload) that refuses what exceeds its bounds.

    Args:
        max_batches: how many it holds.
        max_bytes: how many bytes of payload it holds.
    """

    __slots__ = ("_batches", "_bytes", "_max_batches", "_max_bytes", "has_refused")

    def __init__(self, *, max_batches: int, max_bytes: int) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self.has_refused = False
        """Whether a batch was refused since somebody last set this to False."""

    def __len__(self) -> int:
        return len(self._batches)

    def put(self, seq: int, payload: bytes) -> bool:
        """Take a batch; False when there is no room. An empty queue takes any batch. Cost: O(1)."""
        if self._batches and (len(self._batches) >= self._max_batches or self._bytes + len(payload) > self._max_bytes):
            self.has_refused = True
            return False
        self._batches.append((seq, payload))
        self._bytes += len(payload)
        return True

    def pop_run(self, max_batches: int, max_bytes: int) -> list[tuple[int, bytes]]:
        """The oldest batches, one more than `max_bytes` of payload at most; none when there are none. O(batches)."""
        run: list[tuple[int, bytes]] = []
        batches = self._batches
        left = max_bytes
        while batches and left > 0 and len(run) < max_batches:
            batch = batches.popleft()
            left -= len(batch[1])
            run.append(batch)
        self._bytes -= max_bytes - left
        return run
