"""NVIDIA Dynamo's radix tree as an index under test. Runs only where ai-dynamo-runtime is installed."""

import importlib
import json
from array import array
from typing import Any

from .serve import serve
from .workload import local_hashes
from .works import Works

__all__ = ["DynamoIndex", "main"]


class DynamoIndex:
    """`dynamo._core.RadixTree`: events as JSON bytes, questions as lists of token hashes, a thread of its own."""

    def __init__(self) -> None:
        core: Any = importlib.import_module("dynamo._core")
        self._tree = core.RadixTree()
        self.apply = self._tree.apply_event
        self._id = 0

    def stored(self, parent: int | None, hashes: list[int]) -> bytes:
        """The event of consecutive blocks."""
        pairs = zip(hashes, local_hashes(hashes), strict=True)
        blocks = [{"block_hash": block, "tokens_hash": tokens} for block, tokens in pairs]
        return self._event({"stored": {"parent_hash": parent, "blocks": blocks}})

    def removed(self, hashes: list[int]) -> bytes:
        """The event of blocks that are gone."""
        return self._event({"removed": {"block_hashes": hashes}})

    def flush(self) -> None:
        """The tree's thread takes work in order, so an answer means that all before it is done."""
        self._tree.find_matches([1])

    def question(self, hashes: "array[int]") -> list[int]:
        """Token hashes of a prompt."""
        return local_hashes(hashes)

    def find(self, question: list[int]) -> dict[tuple[int, int], int]:
        """(worker, rank) -> leading blocks."""
        scores: dict[tuple[int, int], int] = self._tree.find_matches(question).scores
        return scores

    def depths(self, found: dict[tuple[int, int], int]) -> dict[int, int]:
        """The same by worker."""
        return {worker: blocks for (worker, _), blocks in found.items() if blocks}

    def purge(self, worker: int) -> None:
        """Forget a worker."""
        self._tree.remove_worker(worker)

    def used_bytes(self) -> int | None:
        """Dynamo does not say."""
        return None

    def _event(self, data: dict[str, Any]) -> bytes:
        self._id += 1
        return json.dumps({"event_id": self._id, "data": data, "dp_rank": 0}, separators=(",", ":")).encode()


def main() -> None:
    """Answer commands on stdin."""
    serve(Works(DynamoIndex).answer)
