"""Adapter of the index for benchmark harnesses that bring plain operations of their own.

    PYTHONPATH=benchmarks python dynamo_bench.py all --adapter index_adapter:Kvatlas

Operations name a block by a hash of its whole prefix and a hash of its tokens alone. The engine's hash here is the
former; token ids are made from the latter, so that equal tokens stay equal and a chain of them is the same prefix.
Events go in as the engine's bytes, questions as block keys; both are made in `prepare`, which is not timed.
"""

from array import array

from kvatlas.bench.index_kit import BLOCK_SIZE, token_ids
from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, encode_batch
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex


class Kvatlas:
    """A `PrefixIndex` whose workers are (worker, rank) pairs."""

    name = "kvatlas.PrefixIndex"

    def __init__(self, **_):
        self._hasher = BlockKeyHasher(1)
        self._index = PrefixIndex(self._hasher)
        self._ingest = self._index.ingest
        self._ids = {}
        self._pairs = {}

    def prepare(self, op):
        """A plain operation as (worker id, bytes), or block keys for a find."""
        match op:
            case ("find", local_hashes, *_):
                return array("Q", self._hasher.chain(array("i", token_ids(local_hashes)), BLOCK_SIZE))
            case ("store", worker, rank, parent, blocks):
                engine_hashes = [block for block, _ in blocks]
                tokens = token_ids(local for _, local in blocks)
                event = BlockStored(engine_hashes, parent, tokens, BLOCK_SIZE, medium="GPU")
            case ("remove", worker, rank, engine_hashes):
                event = BlockRemoved(engine_hashes, medium="GPU")
            case ("clear", worker, rank):
                event = AllBlocksCleared()
            case _:
                raise ValueError(f"operations are find, store, remove and clear, got {op[0]!r}")
        return self._worker_id(worker, rank), encode_batch(EventBatch(0.0, [event]))

    def apply(self, payload):
        self._ingest(payload[0], payload[1])

    def flush(self):
        """All that was applied is visible at once."""

    def find(self, payload):
        return self._index.find(payload)

    def scores(self, result):
        pairs = self._pairs
        return {pairs[worker_id]: blocks for worker_id, blocks in result.items()}

    def remove_worker(self, worker):
        for pair in [pair for pair in self._ids if pair[0] == worker]:
            worker_id = self._ids.pop(pair)
            del self._pairs[worker_id]
            self._index.remove_worker(worker_id)

    def dump(self):
        raise NotImplementedError("the index has no dump")

    def close(self):
        """Nothing is held but memory."""

    def _worker_id(self, worker, rank):
        pair = (worker, rank)
        if pair not in self._ids:
            worker_id = self._ids[pair] = f"{worker}:{rank}"
            self._pairs[worker_id] = pair
            self._index.add_worker(worker_id, block_size=BLOCK_SIZE)
        return self._ids[pair]
