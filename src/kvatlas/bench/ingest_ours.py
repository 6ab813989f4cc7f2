"""Our consumer of the ingest benchmark: subscribers and event sources into one index, as `kvatlas serve` has them."""

import asyncio
from array import array
from collections.abc import Callable
from time import monotonic, process_time
from typing import Any

from kvatlas.bench.index_kit import BLOCK_SIZE, last_prompts, serve, token_ids
from kvatlas.clock import SystemClock
from kvatlas.fleet import EventSource, TrustState
from kvatlas.gateway import event_loop_factory
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex
from kvatlas.stream import SubscriberConfig, ZmqEventSubscriber

__all__ = ["Consumer", "main"]

_LOOK_EVERY_S = 0.005


class Consumer:
    """Answers `connect`, then `measure`.

    Args:
        runner: its loop runs only while a command is done; what arrives meanwhile waits in the sockets.
    """

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._hasher = BlockKeyHasher(1)
        self._index = PrefixIndex(self._hasher)
        self._subscribers: list[tuple[ZmqEventSubscriber, asyncio.Task[None]]] = []
        self._wanted: dict[str, array[int]] = {}
        self._start_s = 0.0

    def answer(self, command: dict[str, Any]) -> dict[str, float]:
        """Do what a command says; `measure` gives processor seconds from `connect` until all is visible."""
        if command["do"] == "connect":
            return self._runner.run(self._connect(command))
        return self._runner.run(self._measure(command["timeout_s"]))

    async def _connect(self, command: dict[str, Any]) -> dict[str, float]:
        clock = SystemClock()
        for worker, prompt in last_prompts(len(command["endpoints"]), command["entries"]).items():
            chain = self._hasher.chain(token_ids(prompt.hashes), BLOCK_SIZE)
            self._wanted[f"w{worker}"] = array("Q", chain)
        for number, endpoint in enumerate(command["endpoints"]):
            self._index.add_worker(f"w{number}", block_size=BLOCK_SIZE)
            source = EventSource(f"w{number}", self._index, TrustState(), clock)
            subscriber = ZmqEventSubscriber(SubscriberConfig(endpoint=endpoint), source, clock)
            self._subscribers.append((subscriber, asyncio.ensure_future(subscriber.run())))
        await _until(lambda: all(one.counters.connections for one, _ in self._subscribers), command["timeout_s"])
        await asyncio.sleep(command["settle_s"])
        self._start_s = process_time()
        return {}

    async def _measure(self, timeout_s: float) -> dict[str, float]:
        missing = self._wanted

        def all_visible() -> bool:
            for worker_id, block_keys in list(missing.items()):
                if self._index.find(block_keys, worker_ids=[worker_id]).get(worker_id) == len(block_keys):
                    del missing[worker_id]
            return not missing

        await _until(all_visible, timeout_s)
        spent_s = process_time() - self._start_s
        for subscriber, task in self._subscribers:
            subscriber.close()
            await task
        return {"cpu_s": spent_s, "missing": len(missing)}


async def _until(is_so: Callable[[], bool], timeout_s: float) -> None:
    """Wait for a condition, or until it is too late."""
    until_s = monotonic() + timeout_s
    while True:
        if is_so() or monotonic() > until_s:
            return
        await asyncio.sleep(_LOOK_EVERY_S)


def main() -> None:
    """Answer commands on stdin."""
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        serve(Consumer(runner).answer)


if __name__ == "__main__":
    main()
