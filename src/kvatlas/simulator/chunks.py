"""Where a chunk of a prefill must end, beside the token budget: what kinds of layers and draft models ask for."""

from kvatlas.simulator.request import EngineRequest
from kvatlas.simulator.scheduler_state import SchedulerState

__all__ = ["next_tokens"]


def next_tokens(state: SchedulerState, request: EngineRequest, num_computed: int, num_tokens: int) -> int:
    """Return how many of `num_tokens` tokens after the computed ones may be computed in one step; 0 = none.

    Args:
        state: the scheduler's.
        request: whose.
        num_computed: tokens computed or hit before the chunk.
        num_tokens: what the budget leaves.
    """
    del state, request, num_computed
    return max(num_tokens, 0)
