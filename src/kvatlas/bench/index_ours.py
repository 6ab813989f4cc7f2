"""Our side of the index benchmark: `PrefixIndex` under the works of `index_kit`, in a process of its own."""

from array import array
from functools import partial
from typing import Any

from kvatlas.bench.index_kit import BLOCK_SIZE, Works, serve, token_ids
from kvatlas.events import BlockRemoved, BlockStored, Event, EventBatch, encode_batch
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex

__all__ = ["CAP_BYTES", "OurIndex", "answer"]

CAP_BYTES = 16 << 20
"""The cap of the index that is filled far beyond it."""

_SEED = 1


class OurIndex:
    """A `PrefixIndex` with numbered workers.

    Args:
        decoded: events are applied one by one, decoded beforehand; else each is a batch in bytes, as it arrives.
        tokens: questions are token ids, hashed while they are looked up; else they are hashed beforehand.
        max_bytes: the index's cap.
    """

    def __init__(self, *, decoded: bool = False, tokens: bool = False, max_bytes: int | None = None) -> None:
        self.index = PrefixIndex(BlockKeyHasher(_SEED), max_bytes=max_bytes)
        self._hasher = BlockKeyHasher(_SEED)
        self._decoded = decoded
        self._tokens = tokens
        self._ids: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self.find = partial(self.index.find_tokens, block_size=BLOCK_SIZE) if tokens else self.index.find

    def stored(self, parent: int | None, hashes: list[int]) -> bytes | Event:
        """The event of consecutive blocks."""
        return self._event(BlockStored(hashes, parent, token_ids(hashes), BLOCK_SIZE, medium="GPU"))

    def removed(self, hashes: list[int]) -> bytes | Event:
        """The event of blocks that are gone."""
        return self._event(BlockRemoved(hashes, medium="GPU"))

    def apply(self, worker: int, event: Any) -> None:
        """Apply an event of a worker, which is added when it is new."""
        worker_id = self._ids.get(worker)
        if worker_id is None:
            worker_id = self._ids[worker] = f"w{worker}"
            self._numbers[worker_id] = worker
            self.index.add_worker(worker_id, block_size=BLOCK_SIZE)
        if self._decoded:
            self.index.apply(worker_id, event)
        else:
            self.index.ingest(worker_id, event)

    def flush(self) -> None:
        """All is visible at once."""

    def question(self, hashes: "array[int]") -> "array[int]":
        """Block keys of a prompt, or its token ids."""
        ids = array("i", token_ids(hashes))
        return ids if self._tokens else array("Q", self._hasher.chain(ids, BLOCK_SIZE))

    def depths(self, found: dict[str, int]) -> dict[int, int]:
        """The same by worker number."""
        return {self._numbers[worker_id]: blocks for worker_id, blocks in found.items() if blocks}

    def purge(self, worker: int) -> None:
        """Forget what a worker holds, if it is known."""
        if worker in self._ids:
            self.index.purge(self._ids[worker])

    def used_bytes(self) -> int | None:
        """What the index says it takes."""
        return self.index.memory.used_bytes

    def _event(self, event: Event) -> bytes | Event:
        return event if self._decoded else encode_batch(EventBatch(0.0, [event]))


def answer(works: dict[str, Works], command: dict[str, Any]) -> dict[str, float]:
    """Do a command's work; `form` says by which of our calls: `bytes`, `decoded`, `tokens`, or `capped`."""
    command = dict(command)
    return works[command.pop("form", "bytes")].answer(command)


def main() -> None:
    """Answer commands on stdin."""
    forms = {
        "bytes": Works(OurIndex),
        "decoded": Works(partial(OurIndex, decoded=True)),
        "tokens": Works(partial(OurIndex, tokens=True)),
        "capped": Works(partial(OurIndex, max_bytes=CAP_BYTES)),
    }
    serve(partial(answer, forms))


if __name__ == "__main__":
    main()
