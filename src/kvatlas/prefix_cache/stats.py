"""What a metrics page says about prefix hits."""

from dataclasses import dataclass

__all__ = ["PrefixCacheStats"]


@dataclass(slots=True)
class PrefixCacheStats:
    """Lookups of admitted requests since the last snapshot, in tokens.

    Requests resumed after preemption are counted apart: engines export the others only.

    Source: vLLM 0.32.0 PrefixCacheStats.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    reset: bool = False
    """The cache was reset in this period."""

    def record(self, num_tokens: int, num_hits: int, *, preempted: bool) -> None:
        """Count one admission that looked `num_tokens` up and found `num_hits` of them."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits
