"""What this router has sent to one worker and not seen finished: load that no scrape can show yet.

An engine prefills in order of arrival, so the queue ahead of a new request is the uncached tokens of every request
whose first token has not come. Streams tell when it comes; other responses do not, so a request also leaves the queue
when the queue ahead of it must have drained at the worker's measured prefill speed.
"""

from dataclasses import dataclass

from kvatlas.clock import Clock

__all__ = ["LoadLedger", "Ticket"]

_SPEED_WEIGHT = 0.2
"""Weight of one measured prefill in the moving average."""
_MIN_MEASURED_TOKENS = 256
"""Shorter prefills measure round trips, not prefill."""


@dataclass(slots=True)
class Ticket:
    """One request in flight on one worker."""

    number: int
    uncached_tokens: int
    sent_s: float
    prefill_done_s: float
    """When its prefill is reckoned to end, monotonic seconds."""
    queued_before_tokens: int
    decoding: bool = False


class LoadLedger:
    """In-flight requests of one worker.

    Args:
        prefill_tokens_per_s: first guess; measured prefills replace it.
        decode_step_s: guess of one decode step.
    """

    __slots__ = (
        "_busy_until_s",
        "_clock",
        "_tickets",
        "decode_step_s",
        "prefill_tokens_per_s",
        "requests_total",
        "uncached_tokens_total",
    )

    def __init__(self, clock: Clock, *, prefill_tokens_per_s: float, decode_step_s: float) -> None:
        self._clock = clock
        self._tickets: set[int] = set()
        self._busy_until_s = 0.0
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.decode_step_s = decode_step_s
        self.requests_total = 0
        self.uncached_tokens_total = 0

    @property
    def in_flight(self) -> int:
        """Requests sent and not finished."""
        return len(self._tickets)

    @property
    def queued_prefill_tokens(self) -> int:
        """Uncached prompt tokens reckoned to be still ahead of a request that is sent now."""
        return max(0, round((self._busy_until_s - self._clock.monotonic_s()) * self.prefill_tokens_per_s))

    def dispatch(self, uncached_tokens: int) -> Ticket:
        """Count a request at the moment it is sent. Pair every ticket with one `finish`."""
        now = self._clock.monotonic_s()
        queued = self.queued_prefill_tokens
        self._busy_until_s = max(now, self._busy_until_s) + uncached_tokens / self.prefill_tokens_per_s
        self.requests_total += 1
        ticket = Ticket(self.requests_total, uncached_tokens, now, self._busy_until_s, queued)
        self._tickets.add(ticket.number)
        self.uncached_tokens_total += uncached_tokens
        return ticket

    def first_token(self, ticket: Ticket) -> None:
        """A stream's first bytes came: its prefill, and all before it, is done. Also measures the prefill speed."""
        if ticket.decoding:
            return
        ticket.decoding = True
        now = self._clock.monotonic_s()
        self._measure(ticket, now)
        self._busy_until_s -= max(0.0, ticket.prefill_done_s - now)

    def finish(self, ticket: Ticket) -> None:
        """A request ended, in whatever way. Repeating it changes nothing."""
        if ticket.number not in self._tickets:
            return
        self._tickets.discard(ticket.number)
        now = self._clock.monotonic_s()
        if not ticket.decoding and ticket.prefill_done_s > now:
            self._busy_until_s -= min(ticket.prefill_done_s - now, ticket.uncached_tokens / self.prefill_tokens_per_s)
        if not self._tickets:
            self._busy_until_s = 0.0

    def _measure(self, ticket: Ticket, now_s: float) -> None:
        tokens = ticket.uncached_tokens + ticket.queued_before_tokens
        elapsed_s = now_s - ticket.sent_s
        if tokens < _MIN_MEASURED_TOKENS or elapsed_s <= 0:
            return
        self.prefill_tokens_per_s += _SPEED_WEIGHT * (tokens / elapsed_s - self.prefill_tokens_per_s)
