"""The writing half of a connector: blocks on their way from the device into a store."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvatlas.prefix_cache.connector import StoreJob
from kvatlas.prefix_cache.connectors.lane import Lane
from kvatlas.prefix_cache.connectors.payload import synthetic_payload
from kvatlas.prefix_cache.connectors.tier import Tier

__all__ = ["Storer"]


@dataclass(frozen=True, slots=True)
class _Running:
    ready_s: float
    job: StoreJob


@dataclass(slots=True)
class Storer:
    """Stores, planned and running. A block can be read from the store when its job has ended.

    Args:
        tier: written to.
        lane: the link to the store.
        block_bytes: size of a block on the link.
        payload_bytes: bytes kept for a block.
        on_dropped: told the key of each block that is not stored after all.

    Attributes:
        blocks_stored, blocks_dropped: so far.
    """

    tier: Tier
    lane: Lane
    block_bytes: int
    payload_bytes: int
    on_dropped: Callable[[bytes], None]
    blocks_stored: int = 0
    blocks_dropped: int = 0
    _planned: list[StoreJob] = field(default_factory=list)
    _running: deque[_Running] = field(default_factory=deque)
    _keys: set[bytes] = field(default_factory=set)
    _jobs: dict[str, int] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)
    _cancelled: set[bytes] = field(default_factory=set)

    def is_storing(self, key: bytes) -> bool:
        """Whether a block is on its way."""
        return key in self._keys

    def has_jobs(self, request_id: str) -> bool:
        """Whether blocks of a request are on their way."""
        return request_id in self._jobs

    @property
    def next_ready_s(self) -> float | None:
        """When the next running store ends."""
        return self._running[0].ready_s if self._running else None

    def plan(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Decide to store blocks with the step being planned, or the next one."""
        self._planned.append(StoreJob(request_id, tuple(keys)))
        self._keys.update(keys)
        self._jobs[request_id] = self._jobs.get(request_id, 0) + 1

    def take_planned(self) -> tuple[StoreJob, ...]:
        """The stores decided since the last call."""
        planned, self._planned = tuple(self._planned), []
        return planned

    def request_ended(self, request_id: str) -> bool:
        """Whether the request's blocks must be kept; if so, `step` will name it."""
        if request_id not in self._jobs:
            return False
        self._ended.add(request_id)
        return True

    def cancel_all(self) -> None:
        """Let no block that is on its way arrive. The jobs still end, in their time."""
        self._cancelled |= self._keys

    def step(self, jobs: Iterable[StoreJob], now_s: float, is_spoilt: Callable[[str], bool]) -> frozenset[str]:
        """Start stores, end those whose time has come; return the ended requests whose blocks may go.

        Args:
            is_spoilt: whether what a request computed in this step rests on blocks that were not filled.
        """
        sent: set[str] = set()
        for job in jobs:
            if is_spoilt(job.request_id):
                self._end(job, sent, arrives=False)
            else:
                self._running.append(_Running(self.lane.submit(len(job.keys) * self.block_bytes, now_s), job))
        while self._running and self._running[0].ready_s <= now_s:
            self._end(self._running.popleft().job, sent, arrives=True)
        return frozenset(sent)

    def _end(self, job: StoreJob, sent: set[str], *, arrives: bool) -> None:
        kept: list[bytes] = []
        for key in job.keys:
            wanted = arrives and key not in self._cancelled
            if wanted and self.tier.write(key, synthetic_payload(key, self.payload_bytes)):
                kept.append(key)
            else:
                self.on_dropped(key)
            self._keys.discard(key)
            self._cancelled.discard(key)
        self.blocks_stored += len(kept)
        self.blocks_dropped += len(job.keys) - len(kept)
        # The start of a chain is worth most: it must leave last.
        self.tier.touch(kept[::-1])
        left = self._jobs[job.request_id] - 1
        if left:
            self._jobs[job.request_id] = left
            return
        del self._jobs[job.request_id]
        if job.request_id in self._ended:
            self._ended.discard(job.request_id)
            sent.add(job.request_id)
