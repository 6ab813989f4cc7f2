"""The engines of the ingest benchmark: one publisher a worker, on loopback, that send what `index_kit` says.

Runs as a process of its own, so that making and sending events costs the measured process nothing.
"""

from typing import Any

from kvatlas.bench.index_kit import BLOCK_SIZE, serve, sessions, stores, token_ids
from kvatlas.events import BlockStored, EventBatch, encode_batch
from kvatlas.stream import PublisherConfig, PublisherSockets, Sent

__all__ = ["Feed"]


class Feed:
    """Answers `open`, then `send`, then `close`."""

    def __init__(self) -> None:
        self._publishers: list[PublisherSockets] = []
        self._blocks = 0
        self._batches: list[tuple[PublisherSockets, Sent]] = []

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do what a command says: `open` gives the endpoints, `send` the number of blocks sent."""
        match command["do"]:
            case "open":
                return self._open(command["workers"], command["entries"], command["per_event"])
            case "send":
                for publisher, sent in self._batches:
                    publisher.send(sent)
                return {"blocks": self._blocks}
        for publisher in self._publishers:
            publisher.close()
        return {}

    def _open(self, workers: int, entries: int, per_event: int) -> dict[str, Any]:
        config = PublisherConfig(endpoint="tcp://127.0.0.1:0", bind=True, hwm=0)
        self._publishers = [PublisherSockets(config, 0) for _ in range(workers)]
        next_seq = [0] * workers
        for run in stores(sessions(workers, entries, copies=1), per_event):
            event = BlockStored(run.hashes, run.parent, token_ids(run.hashes), BLOCK_SIZE, medium="GPU")
            # Encoded beforehand: what limits the rate is to be the consumer, whose speed is asked.
            sent = Sent(next_seq[run.worker], encode_batch(EventBatch(0.0, [event], 0)))
            next_seq[run.worker] += 1
            self._blocks += len(run.hashes)
            self._batches.append((self._publishers[run.worker], sent))
        return {"endpoints": [publisher.endpoint for publisher in self._publishers]}


if __name__ == "__main__":
    serve(Feed().answer)
