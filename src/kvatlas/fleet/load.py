"""What this router has sent to one worker and not seen finished: load that no scrape can show yet.

An engine prefills in order of arrival, so the queue ahead of a new request is the uncached tokens of every request
whose first token has not come. Streams tell when it comes, and so that all before it are done; other answers come
whole, so the queue is also reckoned to drain at the worker's measured prefill speed.
"""

from dataclasses import dataclass

from kvatlas.clock import Clock
from kvatlas.fleet.speed import PrefillSpeed

__all__ = ["LoadLedger", "Ticket"]


@dataclass(frozen=True, slots=True)
class Ticket:
    """One request in flight on one worker."""

    number: int
    uncached_tokens: int
    queued_before_tokens: int
    sent_s: float
    measurable: bool


class LoadLedger:
    """In-flight requests of one worker.

    Args:
        speed: how fast this worker prefills; first tokens of streams measure it.
        decode_step_s: guess of one decode step.
    """

    __slots__ = (
        "_clock",
        "_draining_since_s",
        "_in_flight",
        "_prefills",
        "_speed",
        "decode_step_s",
        "requests_total",
        "uncached_tokens_total",
    )

    def __init__(self, clock: Clock, speed: PrefillSpeed, *, decode_step_s: float) -> None:
        self._clock = clock
        self._speed = speed
        self._in_flight: set[int] = set()
        self._prefills: dict[int, int] = {}
        """Ticket number -> tokens, of prefills not known to be done; in order of arrival."""
        self._draining_since_s = 0.0
        self.decode_step_s = decode_step_s
        self.requests_total = 0
        self.uncached_tokens_total = 0

    @property
    def prefill_tokens_per_s(self) -> float:
        """The worker's prefill speed as it is known now."""
        return self._speed.tokens_per_s

    @property
    def in_flight(self) -> int:
        """Requests sent and not finished."""
        return len(self._in_flight)

    @property
    def queued_prefill_tokens(self) -> int:
        """Uncached prompt tokens reckoned to be still ahead of a request that is sent now. Cost: O(prefills)."""
        if not self._prefills:
            return 0
        drained = (self._clock.monotonic_s() - self._draining_since_s) * self._speed.tokens_per_s
        return max(0, round(sum(self._prefills.values()) - drained))

    def dispatch(self, uncached_tokens: int, *, measurable: bool = True) -> Ticket:
        """Count a request at the moment it is sent. Pair every ticket with one `finish`.

        Args:
            uncached_tokens: prompt tokens to compute.
            measurable: whether that number is known well enough to measure the prefill speed with it.
        """
        now_s = self._clock.monotonic_s()
        queued = self.queued_prefill_tokens
        if not queued:
            self._prefills.clear()
            self._draining_since_s = now_s
        self.requests_total += 1
        self.uncached_tokens_total += uncached_tokens
        ticket = Ticket(self.requests_total, uncached_tokens, queued, now_s, measurable)
        self._in_flight.add(ticket.number)
        self._prefills[ticket.number] = uncached_tokens
        return ticket

    def first_token(self, ticket: Ticket) -> None:
        """A stream's first token came: its prefill, and all before it, are done. Also measures the prefill speed."""
        now_s = self._clock.monotonic_s()
        if ticket.measurable:
            self._speed.measure(ticket.uncached_tokens + ticket.queued_before_tokens, now_s - ticket.sent_s)
        done = [number for number in self._prefills if number <= ticket.number]
        for number in done:
            del self._prefills[number]
        if done:
            self._draining_since_s = now_s

    def finish(self, ticket: Ticket) -> None:
        """A request ended, in whatever way. Repeating it changes nothing."""
        self._in_flight.discard(ticket.number)
        tokens = self._prefills.pop(ticket.number, None)
        if tokens is None:
            return
        # What has drained so far was partly this request's: it must not be taken off the others once more.
        now_s = self._clock.monotonic_s()
        speed = self._speed.tokens_per_s
        drained = (now_s - self._draining_since_s) * speed
        before = sum(other for number, other in self._prefills.items() if number < ticket.number)
        consumed = min(float(tokens), max(0.0, drained - before))
        self._draining_since_s = min(now_s, self._draining_since_s + consumed / speed)
