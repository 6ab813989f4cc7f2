"""NVIDIA Dynamo's indexer as a consumer of engines' event streams. Runs only where ai-dynamo-runtime is installed."""

import asyncio
import importlib
from time import monotonic, process_time
from typing import Any

from .serve import serve
from .workload import BLOCK_SIZE, last_prompts, token_ids

__all__ = ["DynamoConsumer", "main"]

_LOOK_EVERY_S = 0.005
_MODEL = "m"


class DynamoConsumer:
    """`dynamo._core.SelectionService` in this process; answers `connect`, then `measure`."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._core: Any = importlib.import_module("dynamo._core")
        self._service: Any = None
        self._wanted: dict[int, dict[str, Any]] = {}
        self._start_s = 0.0

    def answer(self, command: dict[str, Any]) -> dict[str, float]:
        """Do what a command says; `measure` gives processor seconds from `connect` until all is visible."""
        if command["do"] == "connect":
            return self._runner.run(self._connect(command))
        return self._runner.run(self._measure(command["timeout_s"]))

    async def _connect(self, command: dict[str, Any]) -> dict[str, float]:
        self._service = self._core.SelectionService(indexer_threads=2)
        for number, endpoint in enumerate(command["endpoints"]):
            await self._service.upsert_worker(
                {
                    "worker_id": number,
                    "model_name": _MODEL,
                    "endpoint": f"http://127.0.0.1:{number + 1}",
                    "block_size": BLOCK_SIZE,
                    "data_parallel_start_rank": 0,
                    "data_parallel_size": 1,
                    "kv_events_endpoints": {0: endpoint},
                    "max_num_batched_tokens": 8192,
                    "total_kv_blocks": 1_000_000,
                }
            )
        for worker, prompt in last_prompts(len(command["endpoints"]), command["entries"]).items():
            hashes = self._core.compute_block_hash_for_seq(token_ids(prompt.hashes), BLOCK_SIZE)
            signed = [block - (1 << 64) if block >> 63 else block for block in hashes]
            self._wanted[worker] = {
                "model_name": _MODEL,
                "block_hashes": signed,
                "sequence_hashes": signed,
                "isl_tokens": len(signed) * BLOCK_SIZE,
            }
        await asyncio.sleep(command["settle_s"])
        self._start_s = process_time()
        return {}

    async def _measure(self, timeout_s: float) -> dict[str, float]:
        wanted = self._wanted
        until_s = monotonic() + timeout_s
        while wanted and monotonic() < until_s:
            await asyncio.sleep(_LOOK_EVERY_S)
            for worker, question in list(wanted.items()):
                found = await self._service.overlap_scores(question)
                depth = len(question["block_hashes"])
                if any(row["worker_id"] == worker and row["device_blocks"] == depth for row in found["workers"]):
                    del wanted[worker]
        spent_s = process_time() - self._start_s
        self._service.shutdown()
        return {"cpu_s": spent_s, "missing": len(wanted)}


def main() -> None:
    """Answer commands on stdin."""
    with asyncio.Runner() as runner:
        serve(DynamoConsumer(runner).answer)
