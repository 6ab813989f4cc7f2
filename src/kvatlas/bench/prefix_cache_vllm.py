"""vLLM's own prefix cache under the workloads of `prefix_cache`: a child process of an interpreter that has vLLM.

Run as a file, not as a module: that interpreter need not have this package, so nothing of it is imported here. Commands
come as JSON lines on stdin, answers go as JSON lines to the original stdout; what vLLM prints goes to stderr.
"""

import gc
import importlib
import json
import logging
import os
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from time import thread_time_ns
from typing import Any, TextIO

__all__ = ["environment", "long_prompts", "main"]

BLOCK_SIZE = 16
PROMPT_BLOCKS = 512
HEAD_BLOCKS = 384
NUM_HEADS = 64


def environment() -> dict[str, str]:
    """The environment of the child: the recordings' hash seed."""
    return {**os.environ, "PYTHONHASHSEED": "0"}


def long_prompts(count: int) -> Iterator[tuple[list[int], list[bytes]]]:
    """Token ids and block digests of prompts of 512 blocks of 16 tokens.

    Three quarters of a prompt are one of 64 heads, the rest is its own. Digests are drawn, not hashed: a cache only
    compares them.
    """
    rng = random.Random(0)
    heads = [[rng.randbytes(32) for _ in range(HEAD_BLOCKS)] for _ in range(NUM_HEADS)]
    token_ids = [rng.randrange(150_000) for _ in range(PROMPT_BLOCKS * BLOCK_SIZE)]
    for _ in range(count):
        tail = [rng.randbytes(32) for _ in range(PROMPT_BLOCKS - HEAD_BLOCKS)]
        yield token_ids.copy(), rng.choice(heads) + tail


class VllmCache:
    """Builds vLLM's managers and requests. Untyped: the modules are not there when this is type-checked."""

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._manager: Any = importlib.import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
        self._utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
        self._request: Any = importlib.import_module("vllm.v1.request").Request
        self._kinds: Any = importlib.import_module("vllm.v1.kv_cache_interface")
        self._params: Any = importlib.import_module("vllm.sampling_params").SamplingParams
        self._hash: Any = importlib.import_module("vllm.utils.hashing").sha256_cbor
        self._utils.init_none_hash(self._hash)

    def manager(self, setup: dict[str, Any]) -> Any:
        """A manager for a recording's first line."""
        groups = [
            self._kinds.KVCacheGroupSpec([f"layer{index}"], self._spec(group))
            for index, group in enumerate(setup["groups"])
        ]
        config = self._kinds.KVCacheConfig(
            num_blocks=setup["num_blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=setup["retention_interval"],
        )
        return self._manager(
            config,
            setup["max_model_len"],
            setup["scheduler_block_size"],
            setup["hash_block_size"],
            max_in_flight_tokens=setup["max_in_flight_tokens"],
            use_eagle=setup["use_eagle"],
            enable_kv_cache_events=True,
            log_stats=True,
        )

    def _spec(self, group: dict[str, Any]) -> Any:
        size, kinds = group["block_size"], self._kinds
        shape = {"num_kv_heads": 1, "head_size": 1, "dtype": self._torch.float32}
        match group["kind"]:
            case "full_attention":
                return kinds.FullAttentionSpec(block_size=size, **shape)
            case "sliding_window":
                return kinds.SlidingWindowSpec(block_size=size, sliding_window=group["window"], **shape)
            case "chunked_local_attention":
                return kinds.ChunkedLocalAttentionSpec(block_size=size, attention_chunk_size=group["chunk"], **shape)
        states = {"shapes": ((1,),), "dtypes": (self._torch.float32,)}
        return kinds.MambaSpec(block_size=size, mamba_cache_mode="align", **states)

    def request(self, line: dict[str, Any], hash_block_size: int | None) -> Any:
        """A request of an `admit` line; without a hash block size its digests are set by the caller."""
        full = line.get("report_mode") == "full"
        params = self._params(
            max_tokens=50,
            extra_args={"kv_cache_report_mode": "full"} if full else None,
            prompt_logprobs=1 if line.get("prompt_logprobs") else None,
        )
        hasher = self._utils.get_request_block_hasher(hash_block_size, self._hash) if hash_block_size else None
        return self._request(
            line["id"], line["tokens"], params, None, cache_salt=line.get("cache_salt"), block_hasher=hasher
        )

    def operations(self, path: str) -> dict[str, int]:
        """Time of a recording's operations."""
        setup, *lines = map(json.loads, Path(path).read_text("utf-8").splitlines())
        requests = {line["id"]: self.request(line, setup["hash_block_size"]) for line in lines if line["op"] == "admit"}
        run = RecordedRun(self.manager(setup), requests)
        gc.collect()
        gc.disable()
        for line in lines:
            run.apply(line)
        gc.enable()
        return {"total_ns": run.total_ns, "count": len(lines)}

    def long_requests(self, count: int) -> Iterator[Any]:
        """The requests of `long_prompts`."""
        for number, (token_ids, digests) in enumerate(long_prompts(count)):
            request = self.request({"id": f"r{number}", "tokens": token_ids}, None)
            request.block_hashes = digests
            yield request

    def plain_manager(self, num_blocks: int) -> Any:
        """A manager of one full-attention group."""
        return self.manager(
            {
                "groups": [{"kind": "full_attention", "block_size": BLOCK_SIZE}],
                "num_blocks": num_blocks,
                "retention_interval": 0,
                "max_model_len": 1 << 20,
                "scheduler_block_size": BLOCK_SIZE,
                "hash_block_size": BLOCK_SIZE,
                "max_in_flight_tokens": 8192,
                "use_eagle": False,
            }
        )

    def requests(self, count: int, num_blocks: int) -> dict[str, int]:
        """Time of many long requests, one after the other."""
        manager = self.plain_manager(num_blocks)
        total_ns = 0
        gc.collect()
        gc.disable()
        for request in self.long_requests(count):
            start = thread_time_ns()
            pass_through(manager, request)
            total_ns += thread_time_ns() - start
        gc.enable()
        return {"total_ns": total_ns, "count": count}

    def memory(self, count: int, num_blocks: int) -> float:
        """Bytes of a pool that is full of cached blocks, for each block."""
        requests = list(self.long_requests(count))
        gc.collect()
        tracemalloc.start()
        manager = self.plain_manager(num_blocks)
        for request in requests:
            pass_through(manager, request)
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return used / num_blocks


def pass_through(manager: Any, request: Any) -> None:
    """Look a request up, allocate, free."""
    manager.new_step_starts()
    blocks, hit_tokens, _ = manager.get_computed_blocks(request)
    manager.allocate_slots(request, request.num_tokens - hit_tokens, hit_tokens, blocks)
    manager.record_prefix_cache_stats(request, hit_tokens)
    manager.free(request)
    manager.take_events()


class RecordedRun:
    """Recorded operations on a manager; `total_ns` is the time spent in it."""

    def __init__(self, manager: Any, requests: dict[str, Any]) -> None:
        self.total_ns = 0
        self._manager = manager
        self._requests = requests
        self._live: dict[str, Any] = {}

    def apply(self, line: dict[str, Any]) -> None:
        """Do one operation, as a scheduler step of its own."""
        request: Any = self._requests.get(line.get("id", ""))
        if line.get("append"):
            request.append_output_token_ids(line["append"])
        start = thread_time_ns()
        self._manager.new_step_starts()
        match line["op"]:
            case "admit":
                self._admit(request, line["scheduled"])
            case "step":
                self._step(request, line["scheduled"])
            case "free":
                self._manager.free(self._live.pop(line["id"]))
            case "evict_blocks":
                self._manager.evict_blocks(set(line["block_ids"]))
            case "reset" | "free_all_and_reset":
                if line["op"] != "reset":
                    for live in self._live.values():
                        self._manager.free(live)
                    self._live.clear()
                self._manager.reset_prefix_cache()
        self._manager.take_events()
        self.total_ns += thread_time_ns() - start

    def _admit(self, request: Any, scheduled: int) -> None:
        blocks, hit_tokens, boundary = self._manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        if self._manager.allocate_slots(request, scheduled, hit_tokens, blocks) is not None:
            self._manager.record_prefix_cache_stats(request, hit_tokens)
            request.num_computed_tokens = hit_tokens + scheduled
            self._live[request.request_id] = request

    def _step(self, request: Any, scheduled: int) -> None:
        if self._manager.allocate_slots(request, scheduled) is None:
            self._manager.free(self._live.pop(request.request_id))
        else:
            request.num_computed_tokens += scheduled


def main(answers: TextIO) -> None:
    """Answer commands until stdin ends."""
    logging.disable(logging.WARNING)  # a refused reset is logged, which would be timed
    cache = VllmCache()
    works: dict[str, Callable[..., Any]] = {
        "operations": cache.operations,
        "requests": cache.requests,
        "memory": cache.memory,
    }
    for text in sys.stdin:
        command = json.loads(text)
        answer = works[command.pop("work")](**command)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    answer_stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    main(answer_stream)
