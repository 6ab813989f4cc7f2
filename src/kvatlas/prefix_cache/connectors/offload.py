"""A connector over a store of blocks: what is common to host memory, disk, and both behind one another."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvatlas.clock import Clock
from kvatlas.errors import PrefixCacheError
from kvatlas.events import Event
from kvatlas.prefix_cache.connector import (
    NO_EXTERNAL_HIT,
    BlockTables,
    ExternalHit,
    LoadJob,
    StepTransfers,
    TransferResults,
)
from kvatlas.prefix_cache.connectors.lane import Lane
from kvatlas.prefix_cache.connectors.loads import Loader
from kvatlas.prefix_cache.connectors.matching import TransferGroup, TransferGroups
from kvatlas.prefix_cache.connectors.offload_config import OffloadConfig, StoreWhen
from kvatlas.prefix_cache.connectors.offload_events import OffloadEvents
from kvatlas.prefix_cache.connectors.stores import Storer
from kvatlas.prefix_cache.connectors.tier import Tier
from kvatlas.prefix_cache.request import Request

__all__ = ["OffloadConnector"]

_GROUP_BYTES = 4
_NULL_BLOCK_ID = 0


@dataclass(slots=True)
class _Known:
    """What is remembered of a live request.

    Args:
        asked_tokens: computed tokens at its last lookup.
        next_blocks: for each group the first block not yet considered for storing.
        sources: where the load that was planned last comes from.
    """

    asked_tokens: int = 0
    next_blocks: list[int] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)


class OffloadConnector:
    """Finds, loads and stores blocks by content. See `KVConnector` for who calls what when.

    The device has no real bytes here: a store writes bytes made from the block's key, a load compares them. Blocks of
    a preempted request that are on their way out need no protection for the same reason.

    Args:
        tier: the store.
        config: how blocks move.
        clock: the time transfers take place in.

    Attributes:
        loads, stores: the two halves, with their counts.

    Raises:
        ConfigError: groups that cannot be stored by block, a link without speed.
    """

    def __init__(self, tier: Tier, config: OffloadConfig, clock: Clock) -> None:
        self.tier = tier
        self.config = config
        self._clock = clock
        self._groups = TransferGroups(config.specs, config.hash_block_size)
        self._events = OffloadEvents(
            self_describing=config.self_describing_events, int_block_hashes=config.int_block_hashes
        )
        self.loads = Loader(tier, Lane(config.load_bytes_per_s), config.block_bytes, len(self._groups) == 1)
        self.stores = Storer(
            tier,
            Lane(config.store_bytes_per_s),
            config.block_bytes,
            config.payload_bytes,
            self._events.forget_unstored,
        )
        self._requests: dict[str, _Known] = {}
        self._pending_events: list[Event] = []
        self._cache: BlockTables | None = None

    def bind(self, cache: BlockTables) -> None:
        """Take the scheduler's cache, to read block tables."""
        self._cache = cache

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalHit:
        """Look up how far the store continues what is computed.

        Not known yet while blocks of the request itself, or the block at which the chain breaks, are on their way to
        the store. The last token is never loaded in a step or with a window: something must be computed to sample
        from. Of a waiting load, the scheduler takes care of that.

        Raises:
            PrefixCacheError: the computed tokens do not end a block.

        Cost: O(blocks) lookups in the store.
        """
        if num_computed_tokens % self._groups.step_tokens:
            raise PrefixCacheError(
                f"{num_computed_tokens} computed tokens of {request.request_id!r} do not end a block of "
                f"{self._groups.step_tokens} tokens: give the block-aligned local hit"
            )
        known = self._known(request)
        known.asked_tokens = num_computed_tokens
        if self.stores.has_jobs(request.request_id):
            return ExternalHit(None)
        whole = self.config.async_loads and all(group.window_tokens is None for group in self._groups.groups)
        limit = request.num_tokens if whole else request.num_tokens - 1
        end, missing = self._groups.longest_hit(request, num_computed_tokens, limit, self.tier.contains)
        if missing is not None and self.stores.is_storing(missing):
            return ExternalHit(None)
        tokens = end - num_computed_tokens
        return ExternalHit(tokens, self.config.async_loads) if tokens > 0 else NO_EXTERNAL_HIT

    def update_state_after_alloc(
        self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        """Plan the load of accepted tokens; count a use of everything the request starts from."""
        known = self._known(request)
        start = known.asked_tokens
        end = start + num_external_tokens
        used = [key for _, _, key in self._groups.needed(request, 0, end - end % self._groups.step_tokens)]
        self.tier.touch(used[::-1])
        if num_external_tokens == 0:
            return
        needed = list(self._groups.needed(request, start, end))
        known.sources = self._sources(needed, start, end)
        for group, index, key in needed:
            self._describe(request, group, index, key)
        blocks = tuple((key, block_ids[group.group_id][index]) for group, index, key in needed)
        self.loads.plan(LoadJob(request.request_id, self.config.async_loads, blocks))

    def external_hit_sources(self, request: Request, num_external_tokens: int) -> Mapping[str, int]:
        """Tokens of the load planned last, by the store each block comes from."""
        known = self._requests.get(request.request_id)
        return known.sources if known is not None and num_external_tokens else {}

    def build_step(self, requests: Sequence[Request]) -> StepTransfers:
        """Close a step's plan; storing filled blocks, it takes those the step completes."""
        if self.config.store_when is StoreWhen.FILLED:
            for request in requests:
                self._plan_store(request, min(request.num_computed_tokens, request.num_tokens), None)
        return StepTransfers(self.loads.take_planned(), self.stores.take_planned())

    def sync_load_s(self, transfers: StepTransfers) -> float:
        """Seconds the synchronous loads of a step take on the link."""
        return sum(self.loads.lane.duration_s(self.loads.num_bytes(job)) for job in transfers.loads if not job.is_async)

    def run_step(self, transfers: StepTransfers) -> TransferResults:
        """Carry out a step's transfers; end those whose time has come.

        What a request computed on top of blocks that were not filled is not stored.
        """
        now_s = self._clock.monotonic_s()
        received = self.loads.step(transfers.loads, now_s)
        bad = received.invalid_block_ids

        def is_spoilt(request_id: str) -> bool:
            return bool(bad) and any(not bad.isdisjoint(table) for table in self._block_ids(request_id))

        for job in transfers.stores:
            if is_spoilt(job.request_id) and job.request_id in self._requests:
                self._requests[job.request_id].next_blocks = [0] * len(self._groups)
        sent = self.stores.step(transfers.stores, now_s, is_spoilt)
        return TransferResults(sent, received.finished_receiving, received.failed_receiving, bad)

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> bool:
        """Forget a request. Storing at the end, plan the store of all its complete blocks.

        The last sampled token's KV is never computed, so its block is not stored.
        """
        request_id = request.request_id
        computed = min(request.num_computed_tokens, max(request.num_prompt_tokens, request.num_tokens - 1))
        if self.config.store_when is StoreWhen.FINISHED and not self.loads.is_loading(request_id):
            self._plan_store(request, computed, block_ids)
        self._requests.pop(request_id, None)
        return self.stores.request_ended(request_id)

    def take_events(self) -> list[Event]:
        """Stores and removals in the tiers since the last call."""
        events, self._pending_events = self._pending_events, []
        events += self._events.of_changes(self.tier.take_changes())
        return events

    def reset_cache(self) -> bool:
        """Drop all blocks, those on their way included. False, and nothing changes, while a load runs."""
        if not self.loads.is_idle:
            return False
        self.stores.cancel_all()
        self._pending_events = self.take_events()
        self.tier.clear()
        for known in self._requests.values():
            known.next_blocks = [0] * len(self._groups)
        if not self.config.announce_reset:
            self.tier.take_changes()
            self._events.forget_all()
        return True

    def next_ready_s(self) -> float | None:
        """When the next running transfer ends."""
        times = [at for at in (self.loads.next_ready_s, self.stores.next_ready_s) if at is not None]
        return min(times, default=None)

    def _known(self, request: Request) -> _Known:
        known = self._requests.get(request.request_id)
        if known is None:
            known = self._requests[request.request_id] = _Known(next_blocks=[0] * len(self._groups))
        return known

    def _block_ids(self, request_id: str) -> tuple[list[int], ...]:
        if self._cache is None:
            raise PrefixCacheError("the connector was not given a cache: call bind before the first step")
        return self._cache.block_ids(request_id)

    def _plan_store(self, request: Request, num_tokens: int, block_ids: tuple[list[int], ...] | None) -> None:
        keys = list(self._keys_to_store(request, num_tokens, block_ids))
        if keys:
            self.stores.plan(request.request_id, keys)

    def _keys_to_store(
        self, request: Request, num_tokens: int, block_ids: tuple[list[int], ...] | None
    ) -> Iterator[bytes]:
        """Keys of complete blocks that are new, in the device (not NULL in its tables), and nowhere else yet."""
        known = self._known(request)
        for position, group in enumerate(self._groups.groups):
            complete = self._groups.num_complete(request, group, num_tokens)
            if complete <= known.next_blocks[position]:
                continue
            if block_ids is None:
                block_ids = self._block_ids(request.request_id)
            table = block_ids[position]
            for index in range(known.next_blocks[position], min(complete, len(table))):
                if table[index] == _NULL_BLOCK_ID:
                    continue
                key = self._groups.key(request, group, index)
                if self.stores.is_storing(key) or self.tier.contains(key):
                    continue
                self._describe(request, group, index, key)
                yield key
            known.next_blocks[position] = complete

    def _describe(self, request: Request, group: TransferGroup, index: int, key: bytes) -> None:
        parent = self._groups.key(request, group, index - 1)[:-_GROUP_BYTES] if index else None
        self._events.describe(request, group, index, key, parent)

    def _sources(self, needed: Sequence[tuple[TransferGroup, int, bytes]], start: int, end: int) -> dict[str, int]:
        """Tokens by source, from a group that sees everything; what no such group covers is unspecified."""
        sources: dict[str, int] = {}
        whole = next((group for group in self._groups.groups if group.window_tokens is None), None)
        for group, _, key in needed:
            if group is whole:
                source = self.tier.source_of(key)
                sources[source] = sources.get(source, 0) + group.block_size
        rest = end - start - sum(sources.values())
        if rest:
            sources["external_unspecified"] = rest
        return sources
