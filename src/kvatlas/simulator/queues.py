"""Where requests wait: in order of arrival or of priority, those that hold blocks before those that do not."""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from kvatlas.simulator.limits import SchedulingPolicy
from kvatlas.simulator.request import EngineRequest

__all__ = ["FcfsQueue", "PriorityQueue", "WaitingQueue", "WaitingRoom"]


class WaitingQueue(Protocol):
    """Requests in the order they may be admitted."""

    def add(self, request: EngineRequest) -> None:
        """Let a request wait that has just come."""
        ...

    def put_back(self, requests: Sequence[EngineRequest]) -> None:
        """Let requests wait that were taken out before: in their order, before the others if the policy allows."""
        ...

    def head(self) -> EngineRequest:
        """The next one."""
        ...

    def pop(self) -> EngineRequest:
        """Take the next one out."""
        ...

    def remove(self, request: EngineRequest) -> bool:
        """Take a request out wherever it is; False when it is not here."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[EngineRequest]: ...


class FcfsQueue:
    """First come, first served; who is put back goes to the front."""

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: deque[EngineRequest] = deque()

    def add(self, request: EngineRequest) -> None:
        """See `WaitingQueue`."""
        self._requests.append(request)

    def put_back(self, requests: Sequence[EngineRequest]) -> None:
        """See `WaitingQueue`."""
        self._requests.extendleft(reversed(requests))

    def head(self) -> EngineRequest:
        """See `WaitingQueue`."""
        return self._requests[0]

    def pop(self) -> EngineRequest:
        """See `WaitingQueue`."""
        return self._requests.popleft()

    def remove(self, request: EngineRequest) -> bool:
        """See `WaitingQueue`."""
        try:
            self._requests.remove(request)
        except ValueError:
            return False
        return True

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(self._requests)


class PriorityQueue:
    """Lower priority value first, then earlier arrival, then the id; being put back changes nothing about that."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, str, EngineRequest]] = []

    def add(self, request: EngineRequest) -> None:
        """See `WaitingQueue`."""
        inner = request.request
        heapq.heappush(self._heap, (inner.priority, inner.arrival_s, inner.request_id, request))

    def put_back(self, requests: Sequence[EngineRequest]) -> None:
        """See `WaitingQueue`."""
        for request in requests:
            self.add(request)

    def head(self) -> EngineRequest:
        """See `WaitingQueue`."""
        return self._heap[0][-1]

    def pop(self) -> EngineRequest:
        """See `WaitingQueue`."""
        return heapq.heappop(self._heap)[-1]

    def remove(self, request: EngineRequest) -> bool:
        """See `WaitingQueue`. O(waiting)."""
        kept = [entry for entry in self._heap if entry[-1] is not request]
        if len(kept) == len(self._heap):
            return False
        heapq.heapify(kept)
        self._heap = kept
        return True

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[EngineRequest]:
        return (entry[-1] for entry in sorted(self._heap))


class WaitingRoom:
    """Both queues of waiting requests.

    Who holds blocks (it loads KV from outside, or has just done so) goes first: it must never stand behind one whose
    failed allocation ends the admissions of every step, or its own blocks would never come free.

    Attributes:
        holding: requests that hold blocks.
        queued: the others.
        deferred: requests of both that something else than capacity holds back.
    """

    __slots__ = ("deferred", "holding", "queued")

    def __init__(self, policy: SchedulingPolicy) -> None:
        make = PriorityQueue if policy is SchedulingPolicy.PRIORITY else FcfsQueue
        self.holding: WaitingQueue = make()
        self.queued: WaitingQueue = make()
        self.deferred: set[EngineRequest] = set()

    def add(self, request: EngineRequest) -> None:
        """Let a new request wait."""
        if request.blocked is not None:
            self.deferred.add(request)
        self.queued.add(request)

    def put_back(self, requests: Sequence[EngineRequest]) -> None:
        """Return requests that were skipped in this step to the front of their queues, in their order."""
        self.holding.put_back([request for request in requests if request.holds_blocks])
        self.queued.put_back([request for request in requests if not request.holds_blocks])

    def remove(self, request: EngineRequest) -> None:
        """Take a request out: it ended."""
        self.deferred.discard(request)
        if not self.queued.remove(request):
            self.holding.remove(request)

    def __len__(self) -> int:
        return len(self.queued) + len(self.holding)

    def __iter__(self) -> Iterator[EngineRequest]:
        yield from self.holding
        yield from self.queued
