"""What the log says about failed attempts and error answers: one line each, and under a storm one a second.

A line names worker, code, request id and reason, and nothing of a request's or an answer's body.
"""

import logging
from dataclasses import dataclass

from kvatlas.clock import Clock
from kvatlas.errors import KvAtlasError
from kvatlas.gateway.values import OutcomeKind

__all__ = ["FailureLog"]

_log = logging.getLogger(__name__)
_SPACING_S = 1.0
_LOGGED_STATUSES = frozenset((502, 503, 504))


@dataclass(slots=True)
class _Repeated:
    """A line that was written, and how many of its kind were not since."""

    quiet_until_s: float
    suppressed: int = 0


class FailureLog:
    """Writes WARNING lines, at most one a second of each (kind of line, worker, code).

    What was left out is counted: in the next line of that kind, or by `flush`, which is called about once a second.
    Memory: one small entry per worker and code that failed within the last second.
    """

    __slots__ = ("_clock", "_recent")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._recent: dict[tuple[str, str, str], _Repeated] = {}

    def attempt_failed(
        self, request_id: str, worker_id: str, kind: OutcomeKind, error: KvAtlasError, *, head_sent: bool
    ) -> None:
        """An attempt at a worker failed; `head_sent`: the client had the head of its answer and was cut."""
        key = ("attempts failed", worker_id, error.code)
        if self._may_write(key):
            where = "after the head of its answer, client cut" if head_sent else "before any answer"
            self._write(key, f"{kind} {error.code} {where}, request {request_id}: {error.message}")

    def answered(self, request_id: str, worker_id: str | None, error: Exception) -> None:
        """The client got an error answer from the gateway; only 502, 503 and 504 are worth a line."""
        if not isinstance(error, KvAtlasError) or error.http_status not in _LOGGED_STATUSES:
            return
        key = (f"requests answered {error.http_status}", worker_id or "-", error.code)
        if self._may_write(key):
            self._write(key, f"answered {error.http_status} {error.code}, request {request_id}: {error.message}")

    def flush(self, *, final: bool = False) -> None:
        """Tell what was left out in seconds that are over; `final`: in the running ones too. Cost: O(entries)."""
        now_s = self._clock.monotonic_s()
        for key, entry in list(self._recent.items()):
            if now_s < entry.quiet_until_s and not final:
                continue
            del self._recent[key]
            if entry.suppressed:
                what, worker_id, code = key
                _log.warning("worker %s: %d more %s with %s, not shown", worker_id, entry.suppressed, what, code)

    def _may_write(self, key: tuple[str, str, str]) -> bool:
        entry = self._recent.get(key)
        if entry is None or self._clock.monotonic_s() >= entry.quiet_until_s:
            return True
        entry.suppressed += 1
        return False

    def _write(self, key: tuple[str, str, str], text: str) -> None:
        before = self._recent.get(key)
        left_out = f" ({before.suppressed} more since the last such line)" if before and before.suppressed else ""
        self._recent[key] = _Repeated(self._clock.monotonic_s() + _SPACING_S)
        _log.warning("worker %s: %s%s", key[1], text, left_out)
