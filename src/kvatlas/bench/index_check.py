"""The index against a naive model of it: every answer of very many finds compared, while blocks come and go.

What the events do is what makes an index wrong: blocks evicted from the middle of a chain and stored again, alone or
with all that follow, second copies, children announced before their parents, removals of blocks never seen, clears,
purged and replaced workers. The model is dictionaries: copies by worker and block, holders by block.
"""

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvatlas.bench.index_kit import BLOCK_SIZE, token_ids
from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, encode_batch
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex

__all__ = ["CheckResult", "check_index"]

_WORKERS = 12
_PROMPTS = 256
_HEADS = 8
_FINDS_PER_STEP = 10
_SEED = 1


@dataclass(frozen=True, slots=True)
class CheckResult:
    """How many answers were compared, and how many of them were not the model's."""

    finds: int
    wrong: int


@dataclass(frozen=True, slots=True)
class _Prompt:
    hashes: list[int]
    block_keys: "array[int]"


@dataclass(slots=True)
class _Model:
    """What is resident where, as plainly as it can be said. Workers are numbers, holders bits of an integer."""

    copies: list[dict[int, int]] = field(default_factory=lambda: [{} for _ in range(_WORKERS)])
    holders: dict[int, int] = field(default_factory=dict)

    def store(self, worker: int, hashes: Sequence[int]) -> None:
        copies = self.copies[worker]
        for block in hashes:
            copies[block] = copies.get(block, 0) + 1
            self.holders[block] = self.holders.get(block, 0) | 1 << worker

    def remove(self, worker: int, hashes: Sequence[int]) -> None:
        copies = self.copies[worker]
        for block in hashes:
            left = copies.get(block, 0) - 1
            if left > 0:
                copies[block] = left
            elif left == 0:
                del copies[block]
                self.holders[block] &= ~(1 << worker)

    def forget(self, worker: int) -> None:
        for block in self.copies[worker]:
            self.holders[block] &= ~(1 << worker)
        self.copies[worker] = {}

    def find(self, hashes: Sequence[int]) -> dict[str, int]:
        """Worker id -> leading blocks, of those with one at least."""
        found: dict[str, int] = {}
        alive = (1 << _WORKERS) - 1
        depth = 0
        for block in hashes:
            still = alive & self.holders.get(block, 0)
            if still != alive:
                _note(found, alive ^ still, depth)
                alive = still
                if not alive:
                    return found
            depth += 1
        _note(found, alive, depth)
        return found


def _note(found: dict[str, int], workers: int, depth: int) -> None:
    while workers and depth:
        lowest = workers & -workers
        found[_worker_id(lowest.bit_length() - 1)] = depth
        workers ^= lowest


def check_index(finds: int, *, seed: int = 0, index: PrefixIndex | None = None) -> CheckResult:
    """Compare `finds` answers of an index with the model's.

    Args:
        index: an empty one with block keys of seed 1; None makes it.
    """
    check = _Check(index or PrefixIndex(BlockKeyHasher(_SEED)), random.Random(seed))
    wrong = done = 0
    while done < finds:
        check.change()
        for _ in range(min(_FINDS_PER_STEP, finds - done)):
            wrong += not check.find_is_right()
            done += 1
    return CheckResult(done, wrong)


class _Check:
    """One index, one model, and the draws that change both."""

    def __init__(self, index: PrefixIndex, rng: random.Random) -> None:
        self._index = index
        self._rng = rng
        self._model = _Model()
        self._prompts = list(_prompts(rng))
        for worker in range(_WORKERS):
            self._index.add_worker(_worker_id(worker), block_size=BLOCK_SIZE)

    def change(self) -> None:
        """One batch of one worker, or the end of what it held."""
        rng = self._rng
        worker = rng.randrange(_WORKERS)
        draw = rng.random()
        if draw < 0.004:
            self._model.forget(worker)
            self._index.purge(_worker_id(worker))
        elif draw < 0.008:
            self._model.forget(worker)
            self._index.remove_worker(_worker_id(worker))
            self._index.add_worker(_worker_id(worker), block_size=BLOCK_SIZE)
        else:
            events = [event for _ in range(rng.randint(1, 3)) for event in self._events(worker)]
            self._index.ingest(_worker_id(worker), encode_batch(EventBatch(0.0, events)))

    def find_is_right(self) -> bool:
        """Whether one drawn prompt, or its beginning, is found where the model has it, by one of the ways to ask."""
        rng = self._rng
        prompt = rng.choice(self._prompts)
        length = len(prompt.hashes) if rng.random() < 0.5 else rng.randint(0, len(prompt.hashes))
        expected = self._model.find(prompt.hashes[:length])
        way = rng.random()
        if way < 0.02:
            return self._index.find_tokens(token_ids(prompt.hashes[:length]), BLOCK_SIZE) == expected
        if way < 0.03:
            matches = self._index.match([*token_ids(prompt.hashes[:length]), 0])
            return {worker_id: match.hit_blocks for worker_id, match in matches.items() if match.hit_blocks} == expected
        if way < 0.05:
            asked = [_worker_id(worker) for worker in rng.sample(range(_WORKERS), 3)]
            found = self._index.find(prompt.block_keys[:length], worker_ids=asked)
            return found == {worker_id: expected[worker_id] for worker_id in asked if worker_id in expected}
        return self._index.find(prompt.block_keys[:length]) == expected

    def _events(self, worker: int) -> Iterator[Event]:
        rng = self._rng
        prompt = rng.choice(self._prompts)
        draw = rng.random()
        if draw < 0.002:
            self._model.forget(worker)
            yield AllBlocksCleared()
        elif draw < 0.7:
            yield from self._stores(worker, prompt.hashes)
        else:
            yield self._removal(worker, prompt.hashes)

    def _stores(self, worker: int, hashes: list[int]) -> Iterator[BlockStored]:
        """What is missing and all that follows, the missing block alone, or any part whether its parent is there."""
        rng = self._rng
        held = self._model.copies[worker]
        first = next((at for at, block in enumerate(hashes) if block not in held), 0)
        end = rng.randint(first + 1, len(hashes))
        draw = rng.random()
        if draw < 0.2:
            end = first + 1
        elif draw < 0.3:
            first = rng.randrange(end)
        step = rng.choice((1, 16, len(hashes)))
        for start in range(first, end, step):
            run = hashes[start : min(start + step, end)]
            self._model.store(worker, run)
            parent = hashes[start - 1] if start else None
            yield BlockStored(run, parent, token_ids(run), BLOCK_SIZE, medium="GPU")

    def _removal(self, worker: int, hashes: list[int]) -> BlockRemoved:
        """Blocks here and there, or a tail; some of them may never have been there."""
        rng = self._rng
        if rng.random() < 0.5:
            gone = [block for block in hashes if rng.random() < 0.2]
        else:
            gone = hashes[rng.randrange(len(hashes)) :][::-1]
        self._model.remove(worker, gone)
        return BlockRemoved(gone, medium="GPU")


def _prompts(rng: random.Random) -> Iterator[_Prompt]:
    """Prompts that grow out of each other: any may begin with a part of an earlier one."""
    hasher = BlockKeyHasher(_SEED)
    known: list[list[int]] = [[rng.getrandbits(64) for _ in range(32)] for _ in range(_HEADS)]
    for _ in range(_PROMPTS):
        stem = rng.choice(known)
        hashes = stem[: rng.randint(1, len(stem))] + [rng.getrandbits(64) for _ in range(rng.randint(1, 48))]
        hashes = hashes[:128]
        known.append(hashes)
        yield _Prompt(hashes, array("Q", hasher.chain(token_ids(hashes), BLOCK_SIZE)))


def _worker_id(worker: int) -> str:
    return f"w{worker}"
