"""Events of several tensor-parallel workers, reduced to those that all of them reported.

A block counts as stored in an external tier only when every worker has stored its shard of it.
"""

from collections.abc import Iterable

from kvatlas.errors import EventDecodeError
from kvatlas.events.codec import encode_event
from kvatlas.events.model import AllBlocksCleared, BlockRemoved, BlockStored, Event

__all__ = ["EventAggregator"]


class EventAggregator:
    """Counts equal events over workers.

    Args:
        num_workers: how many workers report (>= 1).

    It counts occurrences, not workers, as vLLM's does: an event that one of two workers reports twice passes for
    common. Unlike vLLM's it also takes AllBlocksCleared, on which vLLM's raises TypeError.

    Source: vLLM 0.32.0, distributed/kv_events.py (KVEventAggregator).

    Raises:
        EventDecodeError: fewer than one worker.
    """

    __slots__ = ("_counts", "_events", "_num_workers")

    def __init__(self, num_workers: int) -> None:
        self._num_workers = _at_least_one(num_workers)
        self._counts: dict[bytes, int] = {}
        self._events: dict[bytes, Event] = {}

    @property
    def num_workers(self) -> int:
        """How many reports make an event common."""
        return self._num_workers

    def add_events(self, events: Iterable[Event]) -> None:
        """Count one worker's events.

        Raises:
            EventDecodeError: something in it is not an event; nothing of the call is counted then.
        """
        added = list(events)
        for event in added:
            if not isinstance(event, BlockStored | BlockRemoved | AllBlocksCleared):
                raise EventDecodeError(f"cannot aggregate {type(event).__name__}: expected events of kvatlas.events")
        for event in added:
            key = encode_event(event)
            self._events.setdefault(key, event)
            self._counts[key] = self._counts.get(key, 0) + 1

    def common_events(self) -> list[Event]:
        """Events counted exactly once per worker, in order of their first appearance."""
        return [self._events[key] for key, count in self._counts.items() if count == self._num_workers]

    def all_events(self) -> list[Event]:
        """Every event as often as it was counted, equal ones together, in order of their first appearance."""
        return [self._events[key] for key, count in self._counts.items() for _ in range(count)]

    def increment_workers(self, count: int = 1) -> None:
        """More workers report from now on.

        Raises:
            EventDecodeError: `count` is below 1.
        """
        self._num_workers += _at_least_one(count)

    def reset_workers(self) -> None:
        """Back to one worker."""
        self._num_workers = 1

    def clear_events(self) -> None:
        """Forget all counts."""
        self._counts.clear()
        self._events.clear()


def _at_least_one(workers: int) -> int:
    if workers < 1:
        raise EventDecodeError(f"{workers} workers were given; expected 1 or more")
    return workers
