"""The seam between a scheduler and KV that lies outside the device: one Protocol, and the values that cross it.

A connector finds blocks in another store, has them loaded into blocks the scheduler allocated, and stores blocks the
device computed. In vLLM it has a scheduler half and a worker half; here one object is both, and `run_step` is where
the worker half works. What the scheduler owes a connector, in the order things happen:

**Once.** `bind(cache)` after the cache manager exists.

**Admission of a waiting request that has computed nothing**:

1. Local lookup first. `tail = hit_tokens % scheduler_block_size`.
2. `found = get_num_new_matched_tokens(request, hit_tokens - tail)`. With `skip_reading_prefix_cache` the answer is
   taken as `NO_EXTERNAL_HIT`. `found.tokens is None`: skip this request in this step, ask again in the next; the
   requests behind it are tried.
3. With a tail: more external tokens than the tail -> drop the tail from the local hit and take them; otherwise no
   external tokens and no asynchronous load.
4. `allocate_slots(new, new_computed_tokens=local, external_tokens=external)`. An asynchronous load asks for 0 new
   tokens and no lookahead, with `AllocationRules(delay_caching=True, reserved_blocks=what in-flight prefills still
   need)`; a synchronous one is cached at once. Failure ends the admissions of this step, as ever.
5. `update_state_after_alloc(request, block_ids, external)`, with 0 too: the blocks are there now. If `num_tokens -
   local` is not 0, record it as queries and `external` as hits of the connector's statistics (apart for preempted
   requests), the hits split by `external_hit_sources`.
6. Asynchronous: the status becomes WAITING_FOR_REMOTE_KVS, `num_computed_tokens = local + external`, the request
   leaves the head of the queue without being scheduled. Otherwise it runs, `local + external` tokens being computed.

A request that comes back from an asynchronous load has computed tokens: it is scheduled without steps 1 to 3, and
`update_state_after_alloc` is called again with 0.

**End of `schedule`.** `transfers = build_step(requests scheduled in this step)`, with `num_computed_tokens` counting
this step's tokens already. Also in a step that computes nothing: loads need steps to go on.

**`update`, before any output is looked at.** `results = run_step(transfers)` for the step that ended, then:

1. `failed_receiving` (loads that failed as a whole) and `invalid_block_ids` (blocks that failed; only with one KV
   cache group, more are an error). An affected request's `num_computed_tokens` becomes `index of its first bad block
   x block size` (0 for a load failed as a whole); its output of this step is dropped.
   Policy FAIL: the running ones' first bad block and all later blocks are evicted (`evict_blocks`), and every affected
   request ends with an error. Policy RECOMPUTE: nothing is evicted and the request goes on from there; a bad block
   that several running requests share is recomputed by the first of them only.
2. Outputs, as without a connector. Ends call `request_finished` **before** blocks are freed; True = keep the blocks
   and the request until its id is in `finished_sending`. The same for aborts; an abort while a load runs keeps them
   until `finished_receiving`.
3. `finished_receiving`: a waiting request is ready: at its next turn `cache_blocks(num_computed_tokens)` (after a
   failure only if that is above 0, otherwise `free` and look up anew), then `num_tokens - 1` computed tokens if all
   were loaded, status WAITING (PREEMPTED if it ever was). An ended one is freed. `finished_sending`: freed.
4. Events: the pool's, then `take_events`.

**Reset.** With `reset_external` also `reset_cache()`: False = failed, None counts as success.

Source: vLLM 0.32.0 KVConnectorBase_V1 and its scheduler.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from kvatlas.events import Event
from kvatlas.prefix_cache.request import Request

__all__ = [
    "CACHE_HIT_SOURCES",
    "NO_EXTERNAL_HIT",
    "NO_TRANSFERS",
    "NO_TRANSFER_RESULTS",
    "BlockTables",
    "ConnectorStats",
    "ExternalHit",
    "KVConnector",
    "LoadFailurePolicy",
    "LoadJob",
    "StepTransfers",
    "StoreJob",
    "TransferResults",
]

CACHE_HIT_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")
"""Values of the label `source` of `vllm:prompt_tokens_cached_by_source`; "device" is the local hit."""


class LoadFailurePolicy(Enum):
    """What becomes of requests whose load failed. Value = `kv_load_failure_policy` of vLLM; its default is FAIL."""

    FAIL = "fail"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class ExternalHit:
    """Answer of a lookup outside the device.

    Args:
        tokens: loadable tokens after the computed ones; None = not known yet, ask again in the next step.
        is_async: they will be loaded between steps, while the request waits. False when `tokens` is 0 or None.
    """

    tokens: int | None
    is_async: bool = False


NO_EXTERNAL_HIT = ExternalHit(0)


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Blocks to bring into the device for one request: (key, device block id), in chain order within a group.

    A key is the block's digest followed by its KV cache group as 4 bytes (`kvatlas.hashing.key_with_group`).
    """

    request_id: str
    is_async: bool
    blocks: tuple[tuple[bytes, int], ...]


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Blocks of one request to write out, by key. They are in the device once the step that carries the job ended."""

    request_id: str
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class StepTransfers:
    """What a connector moves with one step: `build_step` makes it, `run_step` of the same step carries it out."""

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()


NO_TRANSFERS = StepTransfers()


@dataclass(frozen=True, slots=True)
class TransferResults:
    """What became of transfers by the end of a step.

    Args:
        finished_sending: requests for which `request_finished` said True and whose blocks may be freed now.
        finished_receiving: requests whose asynchronous load ended, well or badly; each is named once.
        failed_receiving: those of them whose load failed as a whole (connectors over several groups say this).
        invalid_block_ids: device blocks that were not filled. Synchronous loads: in the step that needed them.
            Asynchronous: no later than the step that names the request in `finished_receiving`.
    """

    finished_sending: frozenset[str] = frozenset()
    finished_receiving: frozenset[str] = frozenset()
    failed_receiving: frozenset[str] = frozenset()
    invalid_block_ids: frozenset[int] = frozenset()


NO_TRANSFER_RESULTS = TransferResults()


@dataclass(slots=True)
class ConnectorStats:
    """Lookups outside the device since the last snapshot, in tokens: `external_prefix_cache_queries` and `_hits`.

    Kept by the scheduler, which alone knows what was admitted. Requests resumed after preemption are counted apart.

    Source: vLLM 0.32.0 PrefixCacheStats of the connector.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    hits_by_source: dict[str, int] = field(default_factory=dict)
    """First admissions' hits by `CACHE_HIT_SOURCES`, without "device"; sums to `hits`."""
    reset: bool = False

    def record(self, num_tokens: int, num_hits: int, sources: Mapping[str, int], *, preempted: bool) -> None:
        """Count one admission; call it when `num_tokens` (what the local cache lacked) is not 0.

        Sources that do not sum to the hits are counted as "external_unspecified".
        """
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
            return
        self.requests += 1
        self.queries += num_tokens
        self.hits += num_hits
        if num_hits and sum(sources.values()) != num_hits:
            sources = {"external_unspecified": num_hits}
        for source, tokens in sources.items():
            if tokens:
                self.hits_by_source[source] = self.hits_by_source.get(source, 0) + tokens


class BlockTables(Protocol):
    """What a connector may read of the cache: a `KVCacheManager` is one."""

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The request's block table of each group, empty for an unknown request."""
        ...


class KVConnector(Protocol):
    """KV outside the device, as a scheduler uses it. The module's text says who calls what when.

    No method raises for what a store does (full, slow, corrupt, gone): a lookup finds less, a load fails and is
    reported, a store is skipped and counted.
    """

    def bind(self, cache: BlockTables) -> None:
        """Take the scheduler's cache, to read block tables. Called once, before anything else."""
        ...

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalHit:
        """Say how many tokens after the computed ones could be loaded now, and how.

        Changes nothing: it is called in every step a request waits at the head. `num_computed_tokens` ends a block.
        """
        ...

    def update_state_after_alloc(
        self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        """Learn that the request has blocks, and that `num_external_tokens` of the last answer are to be loaded.

        Args:
            block_ids: the request's whole table of each group, the blocks to fill included.
            num_external_tokens: 0 = load nothing.
        """
        ...

    def external_hit_sources(self, request: Request, num_external_tokens: int) -> Mapping[str, int]:
        """Split the accepted hit by the store it comes from: `CACHE_HIT_SOURCES` name -> tokens, without zeros.

        Called right after `update_state_after_alloc`.
        """
        ...

    def build_step(self, requests: Sequence[Request]) -> StepTransfers:
        """Close a step's plan: the loads decided in it, and the stores of blocks that `requests` complete in it.

        Args:
            requests: scheduled in this step, `num_computed_tokens` counting its tokens.
        """
        ...

    def sync_load_s(self, transfers: StepTransfers) -> float:
        """Seconds the step lasts longer because its synchronous loads must end before the model runs."""
        ...

    def run_step(self, transfers: StepTransfers) -> TransferResults:
        """Do what the step carried, let running transfers go on, and tell what has ended since the last call.

        Called once for every step, in order, with what `build_step` returned for it.
        """
        ...

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> bool:
        """Learn that a request ended, by itself or not, before its blocks are freed. Called exactly once a request.

        Returns:
            True: the blocks are still being read; keep them until `finished_sending` names the request.
        """
        ...

    def take_events(self) -> list[Event]:
        """Events of the stores since the last call, in order; their medium is not "GPU"."""
        ...

    def reset_cache(self) -> bool | None:
        """Forget everything stored. False = it could not; None and True = done."""
        ...

    def next_ready_s(self) -> float | None:
        """When, on the connector's clock, the next running transfer ends; None when none runs.

        For a driver with nothing to compute: it may take its next step then, and not earlier.
        """
        ...
