"""What a policy knows: one request and the workers that may take it.

These are made anew for every request and worker, so they are msgspec structs: 0.2 us to make.
"""

import msgspec

__all__ = ["Candidate", "RoutingRequest"]


class RoutingRequest(msgspec.Struct, frozen=True, gc=False):
    """The request to place. `prompt_tokens` is its length as the engine sees it; 0 when it could not be rendered."""

    request_id: str
    prompt_tokens: int
    max_tokens: int | None = None


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One eligible worker, as it stands for this request. Unhealthy workers never become candidates.

    Attributes:
        worker_id: stable name; ties are broken and history is kept by it.
        hit_tokens: prompt tokens expected in the worker's cache.
        confidence: 0..1, how much of that claim to believe.
        queued_prefill_tokens: prompt tokens accepted by the worker and not computed yet, our own dispatches included.
        running_requests: requests it is decoding.
        waiting_requests: requests it has not started.
        kv_usage: 0..1 of its block pool in use.
        prefill_tokens_per_s: its measured or assumed speed (> 0).
        decode_step_s: duration of one decode step.
        promised_tokens: cached tokens that the engine will report if it gets the request; None if that is unknown.
        trust: the state of its event stream ("synced", "stale", ...), for the record only: `confidence` is what counts.
    """

    worker_id: str
    hit_tokens: int
    confidence: float
    queued_prefill_tokens: int
    running_requests: int
    waiting_requests: int
    kv_usage: float
    prefill_tokens_per_s: float
    decode_step_s: float
    trust: str
    promised_tokens: int | None = None

    @property
    def believed_tokens(self) -> float:
        """Hit tokens times confidence."""
        return self.hit_tokens * self.confidence

    @property
    def requests_held(self) -> int:
        """Requests running and waiting."""
        return self.running_requests + self.waiting_requests
