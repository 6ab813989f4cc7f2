"""What a scheduler is told once: how much fits in a step, who goes first, and how far ahead it works."""

import enum
from dataclasses import dataclass

from kvatlas.prefix_cache.connector import LoadFailurePolicy

__all__ = ["SchedulerLimits", "SchedulingPolicy"]


class SchedulingPolicy(enum.Enum):
    """Who is admitted first and preempted last. The values are vLLM's `--scheduling-policy`."""

    FCFS = "fcfs"
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds and rules of a scheduler. Defaults are vLLM's, asynchronous scheduling aside.

    Args:
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: most requests running at once.
        max_model_len: most tokens of one request.
        eos_token_id: the token that ends a reply, None = none does.
        policy: order of admission and choice of the preempted.
        async_scheduling: the next step is planned before the tokens of the running one are known.
        num_speculative_tokens: draft tokens checked with every decoded one.
        lookahead_tokens: slots reserved behind a step's tokens, for a draft model that writes KV.
        max_loras: most different adapters in one step, None = any number.
        reserve_full_sequence: start a prompt only when all of it would fit (`scheduler_reserve_full_isl`).
        enable_chunked_prefill: a prompt over the step's budget is cut; otherwise it waits for a step of its own.
        long_prefill_tokens: most tokens a prompt takes of a step it shares; 0 = no such bound
            (`long_prefill_token_threshold`).
        load_failure_policy: what becomes of requests whose external KV did not arrive.
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    max_model_len: int = 16_384
    eos_token_id: int | None = None
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    async_scheduling: bool = False
    num_speculative_tokens: int = 0
    lookahead_tokens: int = 0
    max_loras: int | None = None
    reserve_full_sequence: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_tokens: int = 0
    load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.FAIL
