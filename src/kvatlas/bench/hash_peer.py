"""Other projects' hashers under the workloads of `hash`: a child process of an interpreter that has them.

Run as a file, not as a module: that interpreter need not have this package, so nothing of it is imported here. Commands
come as JSON lines on stdin, answers go as JSON lines to the original stdout; what the peer prints goes to stderr.
"""

import importlib
import importlib.util
import json
import os
import random
import statistics
import sys
from array import array
from collections.abc import Callable, Sequence
from time import thread_time_ns
from typing import Any, TextIO

__all__ = ["BLOCK_SIZE", "HASH_SEED", "main", "median_ns", "prompt"]

BLOCK_SIZE = 16
HASH_SEED = "0"
_VOCABULARY = 128_256


def prompt(num_tokens: int) -> list[int]:
    """Token ids drawn evenly from a large vocabulary, the same in both processes."""
    rng = random.Random(0)
    return [rng.randrange(_VOCABULARY) for _ in range(num_tokens)]


def median_ns(call: Callable[[], object], calls: int) -> float:
    """Processor time of one call."""
    times = []
    for _ in range(calls):
        start = thread_time_ns()
        call()
        times.append(thread_time_ns() - start)
    return statistics.median(times)


def vllm_hasher(algorithm: str, token_ids: list[int]) -> Callable[[], Sequence[bytes]] | None:
    """What vLLM runs for each new request. Its requests hold a list, whatever they are made of.

    None for xxhash algorithms where the xxhash package, which vLLM does not require, is not installed.
    """
    if algorithm.startswith("xxhash") and importlib.util.find_spec("xxhash") is None:
        return None
    hash_function = getattr(importlib.import_module("vllm.utils.hashing"), algorithm)
    utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    request_type: Any = importlib.import_module("vllm.v1.request").Request
    params: Any = importlib.import_module("vllm.sampling_params").SamplingParams
    utils.init_none_hash(hash_function)
    hasher = utils.get_request_block_hasher(BLOCK_SIZE, hash_function)
    request = request_type("r", token_ids, params(max_tokens=1), None)
    return lambda: hasher(request)


def dynamo_hasher(token_ids: list[int], form: str) -> Callable[[], Sequence[int]]:
    """What Dynamo's KV router runs for each request: a hash for each block, not chained."""
    core: Any = importlib.import_module("dynamo._core")
    ids = token_ids if form == "list" else array("i", token_ids)
    return lambda: core.compute_block_hash_for_seq(ids, BLOCK_SIZE)


def main(answers: TextIO) -> None:
    """Answer commands until stdin ends: processor nanoseconds of one call and the last hash, or nulls for no hasher."""
    peers: dict[str, Callable[[list[int], str], Callable[[], Sequence[Any]] | None]] = {
        "vllm sha256_cbor": lambda token_ids, _form: vllm_hasher("sha256_cbor", token_ids),
        "vllm xxhash_cbor": lambda token_ids, _form: vllm_hasher("xxhash_cbor", token_ids),
        "dynamo": dynamo_hasher,
    }
    prepared: dict[tuple[str, int, str], Callable[[], Sequence[Any]] | None] = {}
    for text in sys.stdin:
        command = json.loads(text)
        key = (command["peer"], command["num_tokens"], command["form"])
        if key not in prepared:
            prepared[key] = peers[key[0]](prompt(key[1]), key[2])
        answers.write(json.dumps(_measured(prepared[key], command["calls"])) + "\n")
        answers.flush()


def _measured(hasher: Callable[[], Sequence[Any]] | None, calls: int) -> dict[str, Any]:
    if hasher is None:
        return {"ns": None, "last": None}
    last = hasher()[-1]
    return {"ns": median_ns(hasher, calls), "last": last.hex() if isinstance(last, bytes) else last}


if __name__ == "__main__":
    answer_stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    main(answer_stream)
