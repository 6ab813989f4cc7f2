"""The fleet index under the churn of whole engines, against the engines' own books, with all the memory and with little."""

from collections import Counter
from random import Random
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, encode_batch
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex

Prefix = tuple[int, ...]


class Engine:
    """A prefix cache that evicts in any order, holds some blocks twice, and writes down each event it owes.

    Attributes:
        copies: physical copies of each block, by the tokens up to its end.
    """

    def __init__(self, name: str, block_size: int, capacity: int, namespace: str) -> None:
        self.name = name
        self.block_size = block_size
        self.namespace = namespace
        self.copies: Counter[Prefix] = Counter()
        self.events: list[Event] = []
        self._capacity = capacity
        self._order: list[Prefix] = []

    def serve(self, prompt: Prefix, random: Random, *, twice: bool) -> None:
        """Compute what is not held; with `twice` all of it, as two requests side by side do."""
        ends = range(self.block_size, len(prompt) + 1, self.block_size)
        chain = [prompt[:end] for end in ends][: self._capacity]
        pinned = set(chain)
        run: list[Prefix] = []
        for prefix in chain:
            if self.copies[prefix] and not twice:
                self._tell(run)
                run = []
                continue
            while len(self._order) >= self._capacity and self._evict(pinned, random):
                pass
            self._order.append(prefix)
            self.copies[prefix] += 1
            run.append(prefix)
        self._tell(run)

    def _tell(self, run: list[Prefix]) -> None:
        if not run:
            return
        start = len(run[0]) - self.block_size
        self.events.append(
            BlockStored(
                block_hashes=[self.handle(prefix) for prefix in run],
                parent_block_hash=self.handle(run[0][:start]) if start else None,
                token_ids=list(run[-1][start:]),
                block_size=self.block_size,
                medium="GPU",
            )
        )

    def _evict(self, pinned: set[Prefix], random: Random) -> bool:
        free = [i for i, prefix in enumerate(self._order) if prefix not in pinned]
        if not free:
            return False
        # Mostly what is oldest, as engines do; sometimes the middle of a chain.
        victim = self._order.pop(free[0] if random.random() < 0.7 else random.choice(free))
        self.copies[victim] -= 1
        self.events.append(BlockRemoved(block_hashes=[self.handle(victim)], medium="GPU"))
        return True

    def empty(self) -> None:
        """Nothing is held any more; of this no event tells."""
        self.copies.clear()
        self._order.clear()

    def handle(self, prefix: Prefix) -> int:
        """The engine's own hash."""
        return hash((ord(self.name), *prefix)) % 2**64

    def hit_tokens(self, prompt: Prefix) -> int:
        """What the engine would report as cached."""
        held = 0
        while held + self.block_size < len(prompt) and self.copies[prompt[: held + self.block_size]]:
            held += self.block_size
        return held


def fleet() -> list[Engine]:
    """Two alike, one with longer blocks, one with another model."""
    return [Engine("a", 2, 60, "m"), Engine("b", 2, 25, "m"), Engine("c", 4, 40, "m"), Engine("d", 2, 30, "n")]


def new_index(engines: list[Engine], max_bytes: int | None = None) -> PrefixIndex:
    """An index that knows the engines and nothing of their blocks."""
    index = PrefixIndex(BlockKeyHasher(seed=4), max_bytes=max_bytes)
    for engine in engines:
        index.add_worker(engine.name, block_size=engine.block_size, namespace=engine.namespace)
    return index


def prompt_of(random: Random) -> Prefix:
    """Prompts of one tree with few branches, so that they share prefixes, and of some that nobody asked before."""
    length = random.choice((3, 8, 17, 40, 64))
    branch = random.randrange(6)
    at = random.randrange(1, length)
    fresh = random.randrange(10**6) if random.random() < 0.2 else branch
    return tuple(i % 5 if i < at else fresh + i for i in range(length))


def step(engine: Engine, indexes: list[PrefixIndex], random: Random) -> None:
    """One thing that happens to an engine, told to all indexes."""
    what = random.random()
    if what < 0.03:
        engine.empty()
        for index in indexes:
            index.purge(engine.name)
    elif what < 0.05:
        engine.empty()
        engine.events.append(AllBlocksCleared())
    else:
        engine.serve(prompt_of(random), random, twice=random.random() < 0.15)
    payload = encode_batch(EventBatch(ts=1.0, events=engine.events))
    engine.events = []
    for index in indexes:
        index.ingest(engine.name, payload)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 120))
def test_matches_are_what_engines_hold(seed: int, steps: int) -> None:
    """Without a cap every match is exact, and says so."""
    random = Random(seed)
    engines = fleet()
    index = new_index(engines)
    for _ in range(steps):
        step(random.choice(engines), [index], random)
        for prompt in (prompt_of(random), prompt_of(random)):
            found = {worker: (match.hit_tokens, match.exact) for worker, match in index.match(prompt).items()}
            assert found == {engine.name: (engine.hit_tokens(prompt), True) for engine in engines}
    assert {engine.name: index.stats(engine.name).resident_now for engine in engines} == {
        engine.name: sum(count > 0 for count in engine.copies.values()) for engine in engines
    }


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 120), room=st.integers(0, 60_000))
def test_little_memory_never_claims_too_much(seed: int, steps: int, room: int) -> None:
    """Under a cap no match is above what the engine holds, and one below it is not called exact."""
    random = Random(seed)
    engines = fleet()
    with mock.patch("kvatlas.index.memory._LEAST_BLOCKS", 4):
        index = new_index(engines, new_index(engines).memory.used_bytes + room)
        for _ in range(steps):
            step(random.choice(engines), [index], random)
            for prompt in (prompt_of(random), prompt_of(random)):
                for engine in engines:
                    match, truth = index.match(prompt)[engine.name], engine.hit_tokens(prompt)
                    assert match.hit_tokens <= truth
                    assert match.hit_tokens == truth or not match.exact
    if room < 1000 and steps > 50:
        assert index.memory.refused_blocks + index.memory.forgotten_blocks > 0
