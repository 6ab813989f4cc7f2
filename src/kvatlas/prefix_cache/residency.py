"""How long blocks live in the cache, how long they idle, how often they are reused: sampled, on an injected clock."""

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from kvatlas.clock import Clock
from kvatlas.errors import ConfigError

__all__ = ["BlockResidency", "ResidencyMetrics"]

REMEMBERED_ACCESSES = 4
"""Uses of a block that are kept, the latest: a block many requests share must not grow without bound."""


@dataclass(frozen=True, slots=True)
class BlockResidency:
    """The life of one block from being handed out until it is handed out again, in seconds.

    Attributes:
        lifetime_s: between the two.
        idle_s: from its last use by a cache hit (or its birth) to its end.
        reuse_gaps_s: between consecutive hits, of the latest few.
    """

    lifetime_s: float
    idle_s: float
    reuse_gaps_s: tuple[float, ...]


@dataclass(slots=True)
class _Life:
    born_s: float
    accesses_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_ACCESSES))

    def end(self, now_s: float) -> BlockResidency:
        last_s = self.accesses_s[-1] if self.accesses_s else self.born_s
        accesses = list(self.accesses_s)
        gaps = tuple(later - earlier for earlier, later in pairwise(accesses))
        return BlockResidency(now_s - self.born_s, now_s - last_s, gaps)


class ResidencyMetrics:
    """Follows a sample of the blocks a pool hands out.

    Args:
        clock: where time comes from.
        sample_rate: fraction of allocations followed, above 0 and at most 1.
        seed: of the sampling.

    Raises:
        ConfigError: a rate outside (0, 1].

    Source: vLLM 0.32.0 kv_cache_metrics.KVCacheMetricsCollector.
    """

    __slots__ = ("_clock", "_ended", "_lives", "_random", "_sample_rate")

    def __init__(self, clock: Clock, sample_rate: float = 0.01, *, seed: int = 0) -> None:
        if not 0 < sample_rate <= 1:
            raise ConfigError(f"sample_rate is a fraction of the allocations in (0, 1], got {sample_rate}")
        self._clock = clock
        self._sample_rate = sample_rate
        self._random = random.Random(seed)
        self._lives: dict[int, _Life] = {}
        self._ended: list[BlockResidency] = []

    def allocated(self, block_id: int) -> None:
        """A block is handed out: its life begins, if it is sampled."""
        if self._random.random() < self._sample_rate:
            self._lives[block_id] = _Life(self._clock.monotonic_s())

    def accessed(self, block_id: int) -> None:
        """A cache hit uses a block."""
        life = self._lives.get(block_id)
        if life is not None:
            life.accesses_s.append(self._clock.monotonic_s())

    def evicted(self, block_id: int) -> None:
        """A block's content is given up: its life ends."""
        life = self._lives.pop(block_id, None)
        if life is not None:
            self._ended.append(life.end(self._clock.monotonic_s()))

    def reset(self) -> None:
        """The cache was reset: forget all lives, ended ones too."""
        self._lives.clear()
        self._ended.clear()

    def take(self) -> list[BlockResidency]:
        """The lives that ended since the last call, in order."""
        ended, self._ended = self._ended, []
        return ended
