"""The reading half of a connector: blocks on their way from a store into the device."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvatlas.prefix_cache.connector import LoadJob, TransferResults
from kvatlas.prefix_cache.connectors.lane import Lane
from kvatlas.prefix_cache.connectors.payload import synthetic_payload
from kvatlas.prefix_cache.connectors.tier import Tier

__all__ = ["Loader"]


@dataclass(frozen=True, slots=True)
class _Running:
    """An asynchronous load: when it ends, and the blocks it will have failed to fill."""

    ready_s: float
    job: LoadJob
    bad_block_ids: tuple[int, ...]


@dataclass(slots=True)
class Loader:
    """Loads, planned and running. A block is pinned in its store from the plan to the end of the load.

    Args:
        tier: read from.
        lane: the link from the store.
        block_bytes: size of a block on the link.
        names_blocks: failures are told by block, not by request (possible with one KV cache group).

    Attributes:
        blocks_loaded, blocks_failed: so far.
        blocks_wrong: of the failed ones, those whose bytes were whole but not theirs.
    """

    tier: Tier
    lane: Lane
    block_bytes: int
    names_blocks: bool
    blocks_loaded: int = 0
    blocks_failed: int = 0
    blocks_wrong: int = 0
    _planned: list[LoadJob] = field(default_factory=list)
    _running: deque[_Running] = field(default_factory=deque)
    _requests: set[str] = field(default_factory=set)

    def is_loading(self, request_id: str) -> bool:
        """Whether a load of the request is planned or running."""
        return request_id in self._requests

    @property
    def is_idle(self) -> bool:
        """Whether no load is planned or running."""
        return not self._requests

    @property
    def next_ready_s(self) -> float | None:
        """When the next running load ends."""
        return self._running[0].ready_s if self._running else None

    def plan(self, job: LoadJob) -> None:
        """Decide on a load; it starts with the step being planned."""
        for key, _ in job.blocks:
            self.tier.pin(key)
        self._planned.append(job)
        self._requests.add(job.request_id)

    def take_planned(self) -> tuple[LoadJob, ...]:
        """The loads decided since the last call."""
        planned, self._planned = tuple(self._planned), []
        return planned

    def num_bytes(self, job: LoadJob) -> int:
        """Bytes a load moves over the link."""
        return len(job.blocks) * self.block_bytes

    def step(self, jobs: Iterable[LoadJob], now_s: float) -> TransferResults:
        """Start loads, end those whose time has come."""
        invalid: set[int] = set()
        received: set[str] = set()
        failed: set[str] = set()
        for job in jobs:
            ready_s = self.lane.submit(self.num_bytes(job), now_s)
            bad = tuple(block_id for key, block_id in job.blocks if not self._fetch(key))
            if job.is_async:
                self._running.append(_Running(ready_s, job, bad))
            else:
                invalid.update(bad)
                self._release(job)
        while self._running and self._running[0].ready_s <= now_s:
            done = self._running.popleft()
            received.add(done.job.request_id)
            if done.bad_block_ids and not self.names_blocks:
                failed.add(done.job.request_id)
            else:
                invalid.update(done.bad_block_ids)
            self._release(done.job)
        return TransferResults(
            finished_receiving=frozenset(received),
            failed_receiving=frozenset(failed),
            invalid_block_ids=frozenset(invalid),
        )

    def _fetch(self, key: bytes) -> bool:
        payload = self.tier.read(key)
        if payload is None:
            self.blocks_failed += 1
            return False
        if payload != synthetic_payload(key, len(payload)):
            self.blocks_failed += 1
            self.blocks_wrong += 1
            return False
        self.blocks_loaded += 1
        return True

    def _release(self, job: LoadJob) -> None:
        for key, _ in job.blocks:
            self.tier.unpin(key)
        self._requests.discard(job.request_id)
