"""The engines of the ingest benchmark: one publisher a worker, on loopback, that send what `index_kit` says.

Runs as a process of its own, so that making and sending events costs the measured process nothing.
"""

from typing import Any, cast

import msgspec

from kvatlas.bench.index_kit import BLOCK_SIZE, serve, sessions, stores, token_ids
from kvatlas.events import BlockStored, Event, EventBatch, encode_event
from kvatlas.stream import PublisherConfig, ZmqEventPublisher

__all__ = ["Feed"]


class Feed:
    """Answers `open`, then `send`, then `close`."""

    def __init__(self) -> None:
        self._publishers: list[ZmqEventPublisher] = []
        self._blocks = 0
        self._batches: list[tuple[int, EventBatch]] = []

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do what a command says: `open` gives the endpoints, `send` the number of blocks sent."""
        match command["do"]:
            case "open":
                return self._open(command["workers"], command["entries"], command["per_event"])
            case "send":
                for worker, batch in self._batches:
                    self._publishers[worker].publish(batch)
                return {"blocks": self._blocks}
        for publisher in self._publishers:
            publisher.close()
        return {}

    def _open(self, workers: int, entries: int, per_event: int) -> dict[str, Any]:
        config = PublisherConfig(endpoint="tcp://127.0.0.1:0", bind=True)
        self._publishers = [ZmqEventPublisher(config) for _ in range(workers)]
        for run in stores(sessions(workers, entries, copies=1), per_event):
            event = BlockStored(run.hashes, run.parent, token_ids(run.hashes), BLOCK_SIZE, medium="GPU")
            # Encoded beforehand: sending must not be slower than the consumer, or it would wake up for every message.
            encoded = cast("Event", msgspec.Raw(encode_event(event)))
            self._blocks += len(run.hashes)
            self._batches.append((run.worker, EventBatch(0.0, [encoded], 0)))
        return {"endpoints": [publisher.endpoint for publisher in self._publishers]}


if __name__ == "__main__":
    serve(Feed().answer)
