"""The fleet index against a naive model: for every worker, which token prefixes are resident, and how often."""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex

BLOCK = 2
WORKERS = ("a", "b", "c")
Prefix = tuple[int, ...]


def handle(prefix: Prefix) -> int:
    """An engine hash: any injective number will do."""
    number = 1
    for token in prefix:
        number = number * 7 + token + 1
    return number


class IndexMachine(RuleBasedStateMachine):
    """Stores, removals and clears as engines emit them, on three workers; after each, every known prompt is matched."""

    prefixes = Bundle("prefixes")
    late = Bundle("late")

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(BlockKeyHasher(seed=3))
        for worker in WORKERS:
            self.index.add_worker(worker, block_size=BLOCK)
        self.resident: dict[str, Counter[Prefix]] = {worker: Counter() for worker in WORKERS}
        self.waiting: list[tuple[str, Prefix]] = []
        self.known: set[Prefix] = {()}

    def event(self, parent: Prefix, tokens: Prefix) -> BlockStored:
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        return BlockStored(
            block_hashes=[handle(parent + tokens[:end]) for end in ends],
            parent_block_hash=handle(parent) if parent else None,
            token_ids=list(tokens),
            block_size=BLOCK,
            medium="GPU",
        )

    @rule(
        target=prefixes,
        worker=st.sampled_from(WORKERS),
        parent=st.one_of(st.just(()), prefixes),
        blocks=st.lists(st.tuples(*[st.integers(0, 2)] * BLOCK), min_size=1, max_size=3),
    )
    def store(self, worker: str, parent: Prefix, blocks: list[Prefix]) -> object:
        """A run of blocks after a parent that the worker holds; repeated content is one more copy."""
        if parent and not self.resident[worker][parent]:
            return multiple()
        tokens = tuple(token for block in blocks for token in block)
        self.index.apply(worker, self.event(parent, tokens))
        stored = [parent + tokens[:end] for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        self.resident[worker].update(stored)
        self.known.update(stored)
        return multiple(*stored)

    @rule(worker=st.sampled_from(WORKERS), prefix=prefixes)
    def remove(self, worker: str, prefix: Prefix) -> None:
        """One copy less; of a block that is not held, nothing changes."""
        self.index.apply(worker, BlockRemoved(block_hashes=[handle(prefix)], medium="GPU"))
        if self.resident[worker][prefix]:
            self.resident[worker][prefix] -= 1

    @rule(target=late, worker=st.sampled_from(WORKERS), parent=prefixes, block=st.tuples(*[st.integers(3, 4)] * BLOCK))
    def store_before_its_parent(self, worker: str, parent: Prefix, block: Prefix) -> object:
        """A child whose parent is not held here: it waits, and counts for nothing yet."""
        child = parent + block
        if self.resident[worker][parent] or self.resident[worker][child] or (worker, child) in self.waiting:
            return multiple()
        self.index.apply(worker, self.event(parent, block))
        self.waiting.append((worker, child))
        self.known.add(child)
        return (worker, child)

    @rule(item=consumes(late))
    def parent_arrives(self, item: tuple[str, Prefix]) -> None:
        """The whole chain down to the waiting child's parent is stored: the child counts from now on."""
        worker, child = item
        if item not in self.waiting:
            return
        parent = child[:-BLOCK]
        self.index.apply(worker, self.event((), parent))
        self.resident[worker].update(parent[:end] for end in range(BLOCK, len(parent) + 1, BLOCK))
        self.settle()

    def settle(self) -> None:
        """In the model: waiting children of held parents become held themselves."""
        for worker, child in list(self.waiting):
            if self.resident[worker][child[:-BLOCK]]:
                self.waiting.remove((worker, child))
                self.resident[worker][child] += 1

    @rule(worker=st.sampled_from(WORKERS))
    def clear(self, worker: str) -> None:
        """AllBlocksCleared of one worker."""
        self.index.apply(worker, AllBlocksCleared())
        self.forget(worker)

    @rule(worker=st.sampled_from(WORKERS))
    def replace_worker(self, worker: str) -> None:
        """A worker leaves and another comes under its name."""
        self.index.remove_worker(worker)
        self.index.add_worker(worker, block_size=BLOCK)
        self.forget(worker)

    def forget(self, worker: str) -> None:
        self.resident[worker].clear()
        self.waiting = [item for item in self.waiting if item[0] != worker]

    @invariant()
    def matches_agree(self) -> None:
        """For every prompt ever seen, each worker's hit is its leading run of held blocks."""
        self.settle()
        for prefix in self.known:
            prompt = [*prefix, 9]
            found = {worker: match.hit_tokens for worker, match in self.index.match(prompt).items()}
            assert found == {worker: self.expected(worker, prefix) for worker in WORKERS}

    def expected(self, worker: str, prefix: Prefix) -> int:
        held = 0
        while held < len(prefix) and self.resident[worker][prefix[: held + BLOCK]]:
            held += BLOCK
        return held


TestIndexMachine = IndexMachine.TestCase
