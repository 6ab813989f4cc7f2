"""Which resident block is removed next: several ways to guess, each scored by the area under its ROC curve.

At every step that removes blocks, each removed one is compared with a sample of those that stayed. The area is the
share of such pairs in which the guess gave the removed block the higher score, ties counting half: 1 is knowing, 0.5 is
not knowing.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvatlas.events import AllBlocksCleared, BlockHandle, BlockRemoved, BlockStored, Event
from kvatlas.index import BLOCKS_PER_STAMP, PrefixIndex

__all__ = ["GUESSES", "RemovalScore", "ScoredWorker"]

GUESSES = ("requests", "stamp", "own use", "birth", "random")
"""requests: age by the worker's own clock, of the nearest block up the chain that has a time (see
`kvatlas.index.PromptUses`); where there is none, the stamp's. stamp: age in the fleet's stamps, as the index keeps it.
own use: exact age since a request that was sent to this very worker used the block, which would cost memory for each
block and worker. birth: age since the block was stored. random: a drawn number."""
_SAMPLE = 64


@dataclass(slots=True)
class RemovalScore:
    """Pairs of a removed and a resident block, and how often each guess ranked them rightly."""

    pairs: int = 0
    removed: int = 0
    won: dict[str, float] = field(default_factory=lambda: dict.fromkeys(GUESSES, 0.0))

    def area(self, guess: str) -> float:
        """Area under the ROC curve; 0.5 without any pair."""
        return self.won[guess] / self.pairs if self.pairs else 0.5

    def compare(self, removed: Sequence[tuple[float, ...]], stayed: Sequence[tuple[float, ...]]) -> None:
        """Count every pair. Each block has one score per guess, in the order of `GUESSES`."""
        self.removed += len(removed)
        for gone in removed:
            for left in stayed:
                self.pairs += 1
                for guess, high, low in zip(GUESSES, gone, left, strict=True):
                    self.won[guess] += (high > low) + 0.5 * (high == low)


@dataclass(slots=True)
class _Block:
    parent: BlockHandle | None
    born: int
    used: int
    copies: int = 1


class ScoredWorker:
    """One worker's blocks as its events tell, scored just before the index hears of a removal.

    Args:
        index: has the worker; the caller applies the events to it after `before_step`.
        score: where pairs are counted; several workers may share it.
        counting: whether a repeated store is one more copy.
    """

    def __init__(
        self, index: PrefixIndex, worker_id: str, score: RemovalScore, rng: random.Random, *, counting: bool = True
    ) -> None:
        self._index = index
        self._worker_id = worker_id
        self._score = score
        self._rng = rng
        self._blocks: dict[BlockHandle, _Block] = {}
        self._children: dict[tuple[BlockHandle | None, tuple[int, ...]], BlockHandle] = {}
        self._block_size = 0
        self._births = 0
        self._counting = counting

    def used(self, token_ids: Sequence[int]) -> None:
        """A request of these tokens is sent to this worker, or ends there: its blocks are of use now."""
        size, parent = self._block_size, None
        now = self._now
        for start in range(0, len(token_ids) - size, size) if size else ():
            child = self._children.get((parent, tuple(token_ids[start : start + size])))
            block = None if child is None else self._blocks.get(child)
            if block is None:
                return
            block.used = now
            parent = child

    def before_step(self, events: Iterable[Event]) -> None:
        """Score the removals among a step's events, then take the events into these books."""
        events = list(events)
        hashes = [h for event in events if isinstance(event, BlockRemoved) for h in event.block_hashes]
        going = {h for h in hashes if h in self._blocks and self._blocks[h].copies == 1}
        if going:
            staying = [h for h in self._blocks if h not in going]
            sample = self._rng.sample(staying, min(_SAMPLE, len(staying)))
            self._score.compare(self._scores(list(going)), self._scores(sample))
        for event in events:
            self._take(event)

    def _scores(self, hashes: list[BlockHandle]) -> list[tuple[float, ...]]:
        ages = self._index.recency(self._worker_id).ages(hashes)
        now = self._now
        uses = self._index.uses.counts(self._worker_id, 0)
        clock_per_stamp = BLOCKS_PER_STAMP * uses.clock / max(1, now)
        known: dict[BlockHandle, int | None] = {}
        scores: list[tuple[float, ...]] = []
        for age, block_hash in zip(ages, hashes, strict=True):
            if age is None:
                continue
            block = self._blocks[block_hash]
            by_requests = self._use_age(block_hash, known)
            modelled = age * clock_per_stamp if by_requests is None else by_requests
            scores.append((modelled, age, now - block.used, self._births - block.born, self._rng.random()))
        return scores

    def _use_age(self, block_hash: BlockHandle, known: dict[BlockHandle, int | None]) -> int | None:
        """The age by the worker's own clock that a hit which ends with this block has there."""
        climbed: list[BlockHandle] = []
        age, at = None, block_hash
        while at in self._blocks:
            climbed.append(at)
            age = known[at] if at in known else self._index.uses.age(self._worker_id, at)
            parent = self._blocks[at].parent
            if age is not None or at in known or parent is None:
                break
            at = parent
        known.update(dict.fromkeys(climbed, age))
        return age

    @property
    def _now(self) -> int:
        return self._index.recency(self._worker_id).counts(0).fleet_blocks

    def _take(self, event: Event) -> None:
        match event:
            case BlockStored():
                self._store(event)
            case BlockRemoved():
                for block_hash in event.block_hashes:
                    block = self._blocks.get(block_hash)
                    if block is not None and block.copies == 1:
                        del self._blocks[block_hash]
                    elif block is not None:
                        block.copies -= 1
            case AllBlocksCleared():
                self._blocks.clear()

    def _store(self, event: BlockStored) -> None:
        size = self._block_size = event.block_size
        token_ids = [token for token in event.token_ids if isinstance(token, int)]
        parent, now = event.parent_block_hash, self._now
        for i, block_hash in enumerate(event.block_hashes):
            self._births += 1
            block = self._blocks.get(block_hash)
            if block is None:
                self._blocks[block_hash] = _Block(parent, self._births, now)
            elif self._counting:
                block.copies += 1
            self._children[parent, tuple(token_ids[i * size : (i + 1) * size])] = block_hash
            parent = block_hash
