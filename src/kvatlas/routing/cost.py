"""The expected time to the first token of a request on a worker, in seconds, term by term.

A request waits for the prompts ahead of it, then for the part of its own prompt that is not cached, while the
requests that are already decoding take their share of every step. A prefix hit counts as the computing time it saves,
so a hit on a busy worker and an idle worker without one are compared in the same unit; no threshold is needed.
"""

from collections.abc import Sequence

import msgspec

from kvatlas.routing.candidate import Candidate

__all__ = ["CostInputs", "CostTerms", "cost_terms", "uncached_tokens"]

_LEAST_TOKENS = 1.0
"""An engine always computes the last token."""


class CostTerms(msgspec.Struct, frozen=True, gc=False):
    """What an expected time is made of, in seconds.

    Attributes:
        queue_s: prompts ahead.
        prefill_s: this prompt's tokens that are not cached.
        decode_s: steps given to requests that decode or wait.
        crowding_s: what this prompt's computing costs the requests behind it.
        balance_s: surcharge of a worker that took more than its share of recent work.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    balance_s: float = 0.0
    crowding_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The sum, which is the score."""
        return self.queue_s + self.prefill_s + self.decode_s + self.balance_s + self.crowding_s


def uncached_tokens(prompt_tokens: int, candidate: Candidate) -> float:
    """Prompt tokens to compute, at least 1."""
    tokens = prompt_tokens - candidate.hit_tokens * candidate.confidence
    return max(_LEAST_TOKENS, tokens)


def cost_terms(
    prompt_tokens: int, candidate: Candidate, *, decode_share: float, surplus: float = 0.0, crowding: float = 0.0
) -> CostTerms:
    """The terms for one candidate.

    Args:
        prompt_tokens: length of the prompt.
        candidate: the worker.
        decode_share: what one running request adds to a step, as a share of a decode step.
        surplus: weighted excess of the worker's recent work over the mean; 0 for at or below the mean.
        crowding: how many requests are reckoned to wait behind this one's computing.

    Returns:
        The terms. Every one grows with the load figure it is made of and shrinks with the hit.
    """
    tokens_per_s = candidate.prefill_tokens_per_s
    queue_s = candidate.queued_prefill_tokens / tokens_per_s
    prefill_s = uncached_tokens(prompt_tokens, candidate) / tokens_per_s
    steps = candidate.waiting_requests + decode_share * candidate.running_requests
    balance_s = surplus * (queue_s + prefill_s)
    return CostTerms(queue_s, prefill_s, steps * candidate.decode_step_s, balance_s, crowding * prefill_s)


class CostInputs(msgspec.Struct, frozen=True, gc=False):
    """What else than the candidates the costs of a request are made of; arguments of `cost_terms`.

    Attributes:
        surpluses: one for each candidate.
    """

    prompt_tokens: int
    surpluses: tuple[float, ...]
    decode_share: float
    crowding: float

    def terms(self, candidates: Sequence[Candidate]) -> tuple[CostTerms, ...]:
        """What each candidate's total is made of."""
        return tuple(
            cost_terms(
                self.prompt_tokens,
                candidate,
                decode_share=self.decode_share,
                surplus=surplus,
                crowding=self.crowding,
            )
            for candidate, surplus in zip(candidates, self.surpluses, strict=True)
        )

    def totals_s(self, candidates: Sequence[Candidate]) -> tuple[float, ...]:
        """`total_s` of each of the `terms`, to the last bit and at a third of their cost: 0.5 us per candidate."""
        prompt_tokens, decode_share, crowding = self.prompt_tokens, self.decode_share, self.crowding
        totals_s = []
        for candidate, surplus in zip(candidates, self.surpluses, strict=True):
            tokens_per_s = candidate.prefill_tokens_per_s
            queue_s = candidate.queued_prefill_tokens / tokens_per_s
            tokens = prompt_tokens - candidate.hit_tokens * candidate.confidence
            tokens = max(tokens, _LEAST_TOKENS)
            prefill_s = tokens / tokens_per_s
            decode_s = (
                candidate.waiting_requests + decode_share * candidate.running_requests
            ) * candidate.decode_step_s
            totals_s.append(queue_s + prefill_s + decode_s + surplus * (queue_s + prefill_s) + crowding * prefill_s)
        return tuple(totals_s)
