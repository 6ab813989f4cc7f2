"""One timer for all streams of an event loop that are too busy to be woken for every batch."""

import asyncio
from collections.abc import Callable
from weakref import WeakKeyDictionary

__all__ = ["ReadPacer"]

_INTERVAL_S = 0.002
"""A batch of a busy stream waits that long at most; a token takes an engine five times as long."""


class ReadPacer:
    """Calls back all who asked, together, a little later.

    Waking an event loop costs more than reading and applying a batch does, and ZMQ wakes it for every batch of a stream
    that is not read meanwhile. Read together, batches share that cost.
    """

    def __init__(self, interval_s: float = _INTERVAL_S) -> None:
        self._waiting: dict[Callable[[], None], None] = {}
        self.interval_s = interval_s
        """How long anybody waits, at most."""

    @staticmethod
    def of(loop: asyncio.AbstractEventLoop) -> "ReadPacer":
        """The one of a loop."""
        pacer = _PACERS.get(loop)
        if pacer is None:
            pacer = _PACERS[loop] = ReadPacer()
        return pacer

    def call_next(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """Call this once, with all others, however often it was asked for. O(1), a timer for the first of them."""
        if not self._waiting:
            loop.call_later(self.interval_s, self._call_all)
        self._waiting[call] = None

    def discard(self, call: Callable[[], None]) -> None:
        """Do not call this. Whoever ends says so: what waits here keeps a closed loop in memory. O(1)."""
        self._waiting.pop(call, None)

    def _call_all(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for call in waiting:
            call()


_PACERS: "WeakKeyDictionary[asyncio.AbstractEventLoop, ReadPacer]" = WeakKeyDictionary()
