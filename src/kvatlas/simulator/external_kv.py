"""What the scheduler does with KV outside the device: lookups, loads that end, loads that fail.

Without a connector the lookup is the local one and nothing else here is called. The order of the calls is the
contract written down in `kvatlas.prefix_cache.connector`.

Source: vLLM 0.32.0 Scheduler.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvatlas.errors import PrefixCacheError
from kvatlas.prefix_cache import ComputedBlocks, RequestStatus
from kvatlas.prefix_cache.connector import LoadFailurePolicy, TransferResults
from kvatlas.simulator.request import Blocked, EngineRequest
from kvatlas.simulator.scheduler_state import SchedulerState, release_blocks
from kvatlas.simulator.step import StepPlan

__all__ = [
    "Lookup",
    "finish_transfers",
    "look_up",
    "mark_failed_loads",
    "record_external",
    "remaining_blocks",
    "take_up_load",
]


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a waiting request can start from.

    Args:
        hit: the local hit, None when no lookup was made: the request's load has just ended.
        local_tokens: tokens of the local hit.
        external_tokens: tokens to load after them.
        is_async: they are loaded while the request waits.
        num_computed: tokens that need no computing.
    """

    hit: ComputedBlocks | None
    local_tokens: int
    external_tokens: int
    is_async: bool
    num_computed: int

    @property
    def was_made(self) -> bool:
        """Whether the caches were asked."""
        return self.hit is not None


def look_up(state: SchedulerState, request: EngineRequest) -> Lookup | None:
    """Ask the local cache, then the connector. None: the connector does not know yet, ask again in the next step."""
    inner = request.request
    if inner.num_computed_tokens > 0:
        return Lookup(None, 0, 0, is_async=False, num_computed=inner.num_computed_tokens)
    hit = state.cache.get_computed_blocks(inner)
    inner.shared_prefix_boundary = hit.shared_prefix_boundary
    external, is_async = 0, False
    if state.connector is not None:
        block_size = state.cache.config.scheduler_block_size
        tail = hit.hit_tokens % block_size
        found = state.connector.get_num_new_matched_tokens(inner, hit.hit_tokens - tail)
        if not inner.skip_reading_prefix_cache:
            if found.tokens is None:
                return None
            external, is_async = found.tokens, found.is_async
        if tail and external > tail:
            hit = state.cache.truncate(hit, hit.hit_tokens - tail)  # the load covers the block it ends in
        elif tail:
            external, is_async = 0, False  # a local tail is at least as long
    computed = hit.hit_tokens + external
    if inner.num_preemptions == 0:
        request.cached_tokens = computed
        request.external_tokens = external
    return Lookup(hit, hit.hit_tokens, external, is_async, computed)


def record_external(state: SchedulerState, request: EngineRequest, lookup: Lookup) -> None:
    """Count an admitted request's lookup outside the device, in tokens the local cache lacked."""
    if state.connector is None:
        return
    inner = request.request
    queries = inner.num_tokens - lookup.local_tokens
    if queries:
        sources = state.connector.external_hit_sources(inner, lookup.external_tokens) if lookup.external_tokens else {}
        preempted = inner.num_preemptions > 0
        state.connector_stats.record(queries, lookup.external_tokens, sources, preempted=preempted)


def remaining_blocks(state: SchedulerState, request: EngineRequest) -> int:
    """Blocks a request whose prompt is under way still needs for all of it."""
    config = state.cache.config
    num_tokens = min(request.request.num_tokens, state.limits.max_model_len) + state.draft_tokens
    tables = state.cache.block_ids(request.request_id)
    need = 0
    for group, block_size, table in zip(config.groups, config.block_sizes, tables, strict=True):
        whole = -(-num_tokens // block_size)
        most = group.spec.max_admission_blocks(config.max_in_flight_tokens, config.max_model_len)
        need += max(0, (whole if most is None else min(whole, most)) - len(table))
    return need


def take_up_load(state: SchedulerState, request: EngineRequest) -> None:
    """A load has ended and the request has its turn: make what was loaded findable, and let it wait like others.

    After a failure only the part before the first bad block counts; when nothing is left of it, the request looks
    itself up anew. A prompt loaded as a whole computes its last token again, to sample from.
    """
    inner = request.request
    state.received.discard(request.request_id)
    failed = request.request_id in state.failed
    state.failed.discard(request.request_id)
    if failed and inner.num_computed_tokens == 0:
        state.cache.free(inner)
    else:
        state.cache.cache_blocks(inner, inner.num_computed_tokens)
    if inner.num_computed_tokens == inner.num_tokens:
        inner.num_computed_tokens -= 1
    request.blocked = None
    inner.status = RequestStatus.PREEMPTED if inner.num_preemptions else RequestStatus.WAITING


def mark_failed_loads(state: SchedulerState, plan: StepPlan, results: TransferResults) -> frozenset[EngineRequest]:
    """Set affected requests back to what they have, before the step's output is looked at.

    Returns:
        Requests whose output of this step is void. With the policy "fail" they must be ended.

    Raises:
        PrefixCacheError: bad blocks were named although ids cannot be traced back to requests (several groups).
    """
    fails = state.limits.load_failure_policy is LoadFailurePolicy.FAIL
    loading = [request for request in state.room.holding if request.blocked is Blocked.REMOTE_KV]
    lost = {request for request in loading if request.request_id in results.failed_receiving}
    for request in lost:
        request.request.num_computed_tokens = 0
    running: set[EngineRequest] = set()
    if results.invalid_block_ids:
        if len(state.cache.config.groups) > 1:
            raise PrefixCacheError(
                "the connector named bad blocks, but with several KV cache groups a block does not tell its request: "
                "it must name the requests (failed_receiving)"
            )
        lost |= set(_cut_at_bad_blocks(state, loading, results.invalid_block_ids, {}))
        shares = {share.request: share.num_tokens for share in plan.scheduled}
        cut = _cut_at_bad_blocks(state, state.running, results.invalid_block_ids, shares)
        running = set(cut)
        if fails:
            state.cache.evict_blocks([block_id for block_ids in cut.values() for block_id in block_ids])
    if fails:
        return frozenset(lost | running)
    state.failed.update(request.request_id for request in lost)
    for request in running:
        request.discard_running_output()
    return frozenset(running)


def _cut_at_bad_blocks(
    state: SchedulerState,
    requests: Iterable[EngineRequest],
    invalid_block_ids: frozenset[int],
    shares: dict[EngineRequest, int],
) -> dict[EngineRequest, list[int]]:
    """Cut each request's computed tokens at its first bad block; return the affected ones with that and later blocks.

    A bad block that requests share is computed again by the first of them; the others count it as computed.
    """
    (block_size,) = state.cache.config.block_sizes
    taken: set[int] = set()
    affected: dict[EngineRequest, list[int]] = {}
    for request in requests:
        inner = request.request
        (table,) = state.cache.block_ids(request.request_id)
        computed = inner.num_computed_tokens - shares.get(request, 0)
        bad = [
            index for index in range(min(-(-computed // block_size), len(table))) if table[index] in invalid_block_ids
        ]
        if not bad:
            continue
        own = [index for index in bad if table[index] not in taken]
        taken.update(table[index] for index in own)
        inner.num_computed_tokens = own[0] * block_size if own else computed
        affected[request] = table[own[0] :] if own else []
    return affected


def finish_transfers(state: SchedulerState, results: TransferResults) -> None:
    """After the step's output: who was received may be taken up, who ended meanwhile lets its blocks go."""
    for request_id in sorted(results.finished_receiving):
        if request_id in state.requests:
            state.received.add(request_id)
        elif request_id in state.lingering:
            release_blocks(state, state.lingering[request_id])
    for request_id in sorted(results.finished_sending):
        if request_id in state.lingering:
            release_blocks(state, state.lingering[request_id])
