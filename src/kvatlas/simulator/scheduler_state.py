"""What the parts of the scheduler share: the queues, the cache, the connector, and how requests leave."""

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvatlas.prefix_cache import KVCacheManager, RequestStatus
from kvatlas.prefix_cache.connector import ConnectorStats, KVConnector
from kvatlas.simulator.chunks import ChunkRule
from kvatlas.simulator.limits import SchedulerLimits
from kvatlas.simulator.queues import WaitingRoom
from kvatlas.simulator.request import Blocked, EngineRequest
from kvatlas.simulator.sampling import FinishReason

__all__ = ["PauseState", "SchedulerState", "end_request", "preempt", "release_blocks"]


class PauseState(enum.Enum):
    """How much of the scheduler rests."""

    RUNNING = "running"
    NO_NEW = "no_new"
    """Nobody is admitted; who holds blocks goes on to its end."""
    ALL = "all"
    """Nothing is scheduled."""


@dataclass(slots=True)
class SchedulerState:
    """Every request is in exactly one of `running`, `room` and `lingering`.

    Attributes:
        running: admitted requests, first admitted first.
        room: waiting requests.
        lingering: requests that ended while something still reads or writes their blocks, by id.
        chunk_rule: where prefills must be cut, None = anywhere.
        prefilling: requests whose prompt is not all computed or loaded; new loads leave room for the rest of them.
        received: ids of requests whose asynchronous load ended; they are taken up at their next turn.
        failed: those of them whose load failed.
        deferred_frees: what to call when a step's output was taken: frees blocks that the step may still write.
        num_preempted: preemptions since somebody asked, forced ones included.
        step: number of the last planned step, `processed_step` of the last one whose output was taken.
    """

    cache: KVCacheManager
    limits: SchedulerLimits
    room: WaitingRoom
    connector: KVConnector | None = None
    chunk_rule: ChunkRule | None = None
    pause: PauseState = PauseState.RUNNING
    running: list[EngineRequest] = field(default_factory=list)
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    lingering: dict[str, EngineRequest] = field(default_factory=dict)
    prefilling: set[EngineRequest] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    deferred_frees: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)
    connector_stats: ConnectorStats = field(default_factory=ConnectorStats)
    num_preempted: int = 0
    step: int = 0
    processed_step: int = 0

    @property
    def draft_tokens(self) -> int:
        """Slots a decoding request needs at most in one step when drafts are checked; 0 without drafts."""
        limits = self.limits
        return 1 + limits.num_speculative_tokens + limits.lookahead_tokens if limits.num_speculative_tokens else 0

    @property
    def draft_blocks(self) -> int:
        """Blocks that many slots take."""
        return sum(-(-self.draft_tokens // block_size) for block_size in self.cache.config.block_sizes)

    @property
    def defers_frees(self) -> bool:
        """Whether blocks that a running step may write must not be freed before it has ended.

        So it is with overlapping steps and a connector: a load into such a block is not ordered after the step.
        """
        return self.limits.async_scheduling and self.connector is not None

    def blocks_can_be_freed(self, request: EngineRequest) -> bool:
        """Whether a request's blocks may be freed now."""
        return not self.defers_frees or request.last_step <= self.processed_step


def preempt(state: SchedulerState, request: EngineRequest, *, drop_output: bool = False) -> None:
    """Free a request's blocks (their hashes stay cached) and let it wait first. The caller took it out of `running`.

    Output of steps that run is still its output when it comes, unless `drop_output`, for a request that may be
    resumed at once: it would then be computed twice.

    Source: vLLM 0.32.0 Scheduler._preempt_request.
    """
    inner = request.request
    _free(state, request)
    state.prefilling.discard(request)
    request.drop_stale = drop_output or (request.drop_stale and request.num_stale_tokens > 0)
    request.num_stale_tokens = inner.num_in_flight_tokens
    request.num_placeholders = 0
    request.num_drafts = 0
    inner.status = RequestStatus.PREEMPTED
    inner.num_computed_tokens = 0
    inner.num_preemptions += 1
    state.num_preempted += 1
    state.room.queued.put_back([request])


def end_request(state: SchedulerState, request: EngineRequest, reason: FinishReason) -> None:
    """End a request, which the caller took out of its queue, and free its blocks, or as soon as nothing uses them.

    Source: vLLM 0.32.0 Scheduler._free_request.
    """
    inner = request.request
    loads = request.blocked is Blocked.REMOTE_KV and request.request_id not in state.received
    state.received.discard(request.request_id)
    state.failed.discard(request.request_id)
    state.prefilling.discard(request)
    del state.requests[request.request_id]
    request.finish_reason = reason
    inner.status = RequestStatus.FINISHED
    sends = False
    if state.connector is not None:
        state.cache.remove_skipped(inner, max(0, inner.num_computed_tokens - inner.num_in_flight_tokens))
        sends = state.connector.request_finished(inner, state.cache.block_ids(request.request_id))
    if loads or sends:
        state.lingering[request.request_id] = request
    else:
        _free(state, request)


def release_blocks(state: SchedulerState, request: EngineRequest) -> None:
    """Let a request that lingered go: nothing reads or writes its blocks any more, running steps aside."""
    del state.lingering[request.request_id]
    _free(state, request)


def _free(state: SchedulerState, request: EngineRequest) -> None:
    """Free a request's blocks, after the running steps if those may write them."""
    if state.blocks_can_be_freed(request):
        state.cache.free(request.request)
        return
    blocks = state.cache.pop_blocks(request.request)
    if blocks:
        state.deferred_frees.append((state.step, partial(state.cache.free_popped, blocks)))
