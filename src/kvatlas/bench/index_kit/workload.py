"""Seeded prompts, and which worker holds how much of each: the same in every process for the same arguments.

A block is its engine hash, 64 random bits. All else follows from that number: its token ids, and the position-free hash
by which Dynamo knows the same tokens. Workers are numbers from 0.
"""

import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = [
    "BLOCK_SIZE",
    "PATTERNS",
    "Prompt",
    "Run",
    "laddered",
    "last_prompts",
    "local_hashes",
    "sessions",
    "stores",
    "token_ids",
]

BLOCK_SIZE = 16
"""Tokens in a block, everywhere in this benchmark."""
PATTERNS = ("ladder", "full", "single")
"""Who holds a prompt; see `laddered`."""

_TOKEN_BITS = 17
_LOCAL = 0xA5A5_5A5A_C3C3_3C3C
_FACTORS = tuple(random.Random(16).getrandbits(64) | 1 for _ in range(BLOCK_SIZE))
_SYSTEM_PROMPTS = 16
_SYSTEM_BLOCKS = 64
_SESSION_BLOCKS = 128


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and its holders.

    Attributes:
        hashes: engine hash of every block, u64[num_blocks].
        held: worker -> leading blocks it holds.
        num_shared: leading blocks that other prompts start with, too.
    """

    hashes: "array[int]"
    held: dict[int, int]
    num_shared: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks that one worker announces in one event; `parent` None starts a prompt."""

    worker: int
    parent: int | None
    hashes: list[int]


def token_ids(hashes: Iterable[int]) -> list[int]:
    """The token ids of blocks, 16 each, below 2**17: half of them take five bytes in msgpack, as real ones do."""
    return [(block * factor >> 40) & ((1 << _TOKEN_BITS) - 1) for block in hashes for factor in _FACTORS]


def local_hashes(hashes: Iterable[int]) -> list[int]:
    """What Dynamo knows the tokens of a block by, whatever stands before it."""
    return [block ^ _LOCAL for block in hashes]


def laddered(num_workers: int, num_blocks: int, pattern: str, *, count: int, seed: int = 1) -> list[Prompt]:
    """Return `count` prompts without a common block, each held by all workers.

    Args:
        pattern: `full`: to its end. `ladder`: the first half, then fewer and fewer down to one, a step at a time, which
            is hardest for an index that pays for every change of holders. `single`: one to its end, all the first
            sixteenth.
    """
    rng = random.Random(seed)
    prompts = []
    for _ in range(count):
        workers = rng.sample(range(num_workers), num_workers)
        held = {worker: _depth(rank, num_workers, num_blocks, pattern) for rank, worker in enumerate(workers)}
        prompts.append(Prompt(_drawn(rng, num_blocks), held))
    return prompts


def _depth(rank: int, num_workers: int, num_blocks: int, pattern: str) -> int:
    if pattern == "full" or rank == 0:
        return num_blocks
    if pattern == "single":
        return max(num_blocks // 16, 1)
    half = num_blocks // 2
    return max(half + (num_blocks - half) * (num_workers - 1 - rank) // num_workers, 1)


def sessions(num_workers: int, num_entries: int, *, copies: int, seed: int = 2) -> Iterator[Prompt]:
    """Yield conversations of 128 blocks behind one of 16 system prompts of 64, each held whole by `copies` workers.

    Args:
        num_entries: (block, worker) pairs after which it ends; the last conversation may go beyond.
    """
    rng = random.Random(seed)
    heads = [_drawn(rng, _SYSTEM_BLOCKS) for _ in range(_SYSTEM_PROMPTS)]
    seen: set[tuple[int, int]] = set()
    entries = 0
    while entries < num_entries:
        head = rng.randrange(_SYSTEM_PROMPTS)
        workers = rng.sample(range(num_workers), min(copies, num_workers))
        new = {(head, worker) for worker in workers} - seen
        seen |= new
        entries += len(workers) * _SESSION_BLOCKS + len(new) * _SYSTEM_BLOCKS
        hashes = heads[head] + _drawn(rng, _SESSION_BLOCKS)
        yield Prompt(hashes, dict.fromkeys(workers, len(hashes)), _SYSTEM_BLOCKS)


def stores(prompts: Iterable[Prompt], blocks_per_event: int) -> Iterator[Run]:
    """Yield what workers announce: each block once, parents before children."""
    announced: set[tuple[int, int]] = set()
    for prompt in prompts:
        for worker, depth in prompt.held.items():
            start = 0
            if prompt.num_shared:
                mark = (worker, prompt.hashes[prompt.num_shared - 1])
                start = prompt.num_shared if mark in announced else 0
                announced.add(mark)
            for first in range(start, depth, blocks_per_event):
                parent = prompt.hashes[first - 1] if first else None
                yield Run(worker, parent, prompt.hashes[first : min(first + blocks_per_event, depth)].tolist())


def last_prompts(num_workers: int, num_entries: int) -> dict[int, Prompt]:
    """Return the prompt that each worker announces last in `sessions` of one copy: once it is found, all is."""
    return {worker: prompt for prompt in sessions(num_workers, num_entries, copies=1) for worker in prompt.held}


def _drawn(rng: random.Random, count: int) -> "array[int]":
    return array("Q", rng.randbytes(8 * count))
