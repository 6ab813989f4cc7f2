"""What hashing a prompt costs: each chain of block hashes, beside the project whose hash it is or beside Python.

Nanoseconds of processor time for each 16-token block, through the public calls, results made into Python objects. Ours
runs here; a peer in a child process of an interpreter that has it, in turns, and the median of the rounds counts. Where
both compute the same hash it must be equal, else there is no comparison. Rows without that peer, or whose hash it
lacks a package for, are held against the Python kernels.
"""

import os
import statistics
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvatlas import _native
from kvatlas._native import Kernels, backend_name, choose
from kvatlas.bench import hash_peer
from kvatlas.bench.child import PeerProcess, peer_process
from kvatlas.bench.hash_peer import BLOCK_SIZE, HASH_SEED, median_ns, prompt
from kvatlas.bench.report import BenchReport, BenchRow, machine_name
from kvatlas.errors import ConfigError
from kvatlas.hashing import (
    BlockKeyHasher,
    LlmdHasher,
    VllmHasher,
    dynamo_local_hashes,
    dynamo_seed,
    dynamo_sequence_hashes,
)

__all__ = ["HASH_PEERS", "run_hash_bench"]

HASH_PEERS = {"vllm": "vllm 0.32", "dynamo": "ai-dynamo-runtime"}
"""Peers by name, and what their interpreter must have installed."""

_SEED = 7


@dataclass(frozen=True, slots=True)
class _Work:
    """One row: a chain, in one form of token ids.

    Attributes:
        num_tokens: of the prompt, without the scale.
        peer: what of `hash_peer` it is held against, or None; the first word is the project.
        ours: the public call.
        python: the same with the Python kernels.
        equal: whether the peer computes the same hash.
    """

    name: str
    num_tokens: int
    peer: str | None
    ours: Callable[[Sequence[int]], Sequence[Any]]
    python: Callable[[Kernels, Sequence[int]], object]
    equal: bool = True

    @property
    def project(self) -> str | None:
        """Whose peer it is."""
        return self.peer.split()[0] if self.peer else None


def _works() -> list[_Work]:
    return [*_vllm_works(), *_key_works(), *_dynamo_works(), *_python_works()]


def _vllm_works() -> list[_Work]:
    sha256, xxhash = VllmHasher("sha256_cbor", HASH_SEED), VllmHasher("xxhash_cbor", HASH_SEED)
    return [
        _Work(
            "vLLM sha256_cbor",
            1 << 15,
            "vllm sha256_cbor",
            lambda ids: sha256.hash_tokens(ids, BLOCK_SIZE),
            lambda python, ids: python.chain_sha256_cbor(ids, BLOCK_SIZE, sha256.none_hash),
        ),
        _Work(
            "vLLM xxhash_cbor",
            1 << 15,
            "vllm xxhash_cbor",
            lambda ids: xxhash.hash_tokens(ids, BLOCK_SIZE),
            lambda python, ids: python.chain_xxh3_128_cbor(ids, BLOCK_SIZE, xxhash.none_hash),
        ),
    ]


def _key_works() -> list[_Work]:
    keys = BlockKeyHasher(_SEED)
    root = keys.root_key()
    return [
        _Work(
            "block keys (XXH3)",
            1 << 17,
            "dynamo",
            lambda ids: keys.chain(ids, BLOCK_SIZE),
            lambda python, ids: python.chain_xxh3(ids, BLOCK_SIZE, root, _SEED),
            equal=False,
        )
    ]


def _dynamo_works() -> list[_Work]:
    seed = dynamo_seed()
    return [
        _Work(
            "Dynamo local hashes (XXH3)",
            1 << 17,
            "dynamo",
            lambda ids: dynamo_local_hashes(ids, BLOCK_SIZE),
            lambda python, ids: python.xxh3_blocks(ids, BLOCK_SIZE, seed),
        ),
        _Work(
            "Dynamo local and sequence hashes",
            1 << 17,
            None,
            lambda ids: dynamo_sequence_hashes(dynamo_local_hashes(ids, BLOCK_SIZE)),
            lambda python, ids: python.chain_xxh3_pairs(python.xxh3_blocks(ids, BLOCK_SIZE, seed), None, seed),
        ),
    ]


def _python_works() -> list[_Work]:
    """Chains of projects that have no peer process here."""
    xxh64 = LlmdHasher("xxh64")
    return [
        _Work(
            "SGLang pages (SHA-256)",
            1 << 15,
            None,
            lambda ids: _native.chain_sha256_pages(ids, BLOCK_SIZE),
            lambda python, ids: python.chain_sha256_pages(ids, BLOCK_SIZE),
        ),
        _Work(
            "llm-d keys (FNV-1a)",
            1 << 15,
            None,
            lambda ids: _native.chain_fnv1a_cbor(ids, BLOCK_SIZE, _SEED),
            lambda python, ids: python.chain_fnv1a_cbor(ids, BLOCK_SIZE, _SEED),
        ),
        _Work(
            "llm-d keys (XXH64)",
            1 << 15,
            None,
            lambda ids: xxh64.chain(ids, BLOCK_SIZE, model="m"),
            lambda python, ids: python.chain_xxh64(ids, BLOCK_SIZE, _SEED),
        ),
    ]


def run_hash_bench(
    *,
    against: str | None = None,
    interpreter: str | Path = ".venv-real/bin/python",
    rounds: int = 5,
    calls: int = 9,
    scale: float = 1.0,
) -> BenchReport:
    """Measure every chain, from an int32 array and from a list.

    Args:
        against: `vllm` or `dynamo`, or None for the Python kernels alone.
        interpreter: a Python that has the peer.
        rounds: turns of each side.
        calls: of each side in a turn, whose median counts.
        scale: of the prompts' lengths, 32k tokens (128k for block keys).

    Raises:
        ConfigError: an unknown peer, no round or call, a peer that does not run or hashes otherwise.
    """
    if against is not None and against not in HASH_PEERS:
        raise ConfigError(f"hashing is measured against {', '.join(HASH_PEERS)} or nothing, got {against!r}")
    if min(rounds, calls) < 1:
        raise ConfigError(f"at least one round and one call are needed, got {rounds} and {calls}")
    with ExitStack() as stack:
        child = None
        if against is not None:
            environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED}
            child = stack.enter_context(
                peer_process(interpreter, hash_peer.__file__, needs=HASH_PEERS[against], environment=environment)
            )
        rows = [
            _row(work, form, child if work.project == against else None, rounds, calls, scale)
            for work in _works()
            for form in ("array", "list")
        ]
    return BenchReport(machine=f"{machine_name()}, {backend_name()} kernels", rows=rows)


def _row(work: _Work, form: str, child: PeerProcess | None, rounds: int, calls: int, scale: float) -> BenchRow:
    num_tokens = max(int(work.num_tokens * scale), BLOCK_SIZE)
    num_blocks = num_tokens // BLOCK_SIZE
    token_ids = prompt(num_tokens)
    ids = token_ids if form == "list" else array("i", token_ids)
    python = choose("0")

    def python_ns() -> float:
        return median_ns(lambda: work.python(python, ids), 1)

    def peer_ns() -> float | None:
        if child is None:
            return None
        answer = child.ask(peer=work.peer, num_tokens=num_tokens, form=form, calls=max(calls // 3, 1))
        if answer["ns"] is None:
            return None
        _require_equal(work, work.ours(ids)[-1], answer["last"])
        return float(answer["ns"])

    ours, peers, named = [], [], "python"
    for _ in range(rounds):
        ours.append(median_ns(lambda: work.ours(ids), calls) / num_blocks)
        measured = peer_ns()
        if measured is not None and work.project:
            named = work.project
        peers.append((python_ns() if measured is None else measured) / num_blocks)
    our_value, peer_value = statistics.median(ours), statistics.median(peers)
    return BenchRow(
        f"{work.name}, {num_tokens} tokens, {'int32 array' if form == 'array' else 'list'}",
        "ns/block",
        round(our_value, 1),
        named,
        round(peer_value, 1),
        round(peer_value / our_value, 1),
    )


def _require_equal(work: _Work, ours: object, peers: object) -> None:
    """The last block's hash is the peer's too, where it is the same hash and not another whose cost is compared."""
    shown = ours.hex() if isinstance(ours, bytes) else ours
    if work.equal and shown != peers:
        raise ConfigError(f"{work.peer} hashes otherwise ({peers}, ours {shown}): is it another version?")
