"""What hashing a prompt costs: each chain of block hashes, beside the project whose hash it is or beside Python.

Nanoseconds of processor time for each 16-token block, through the public calls, results made into Python objects. Ours
runs here; a peer in a child process of an interpreter that has it, in turns, and the median of the rounds counts. vLLM
must give the same digest, else there is no comparison. Rows without that peer are held against the Python kernels.
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
from kvatlas.hashing import BlockKeyHasher, VllmHasher

__all__ = ["HASH_PEERS", "run_hash_bench"]

HASH_PEERS = {"vllm": "vllm 0.32", "dynamo": "ai-dynamo-runtime"}
"""Peers by name, and what their interpreter must have installed."""

_SEED = 7


@dataclass(frozen=True, slots=True)
class _Work:
    """One row: a chain, in one form of token ids.

    Attributes:
        num_tokens: of the prompt, without the scale.
        peer: whose hash it is, or None.
        ours: the public call.
        python: the same with the Python kernels.
    """

    name: str
    num_tokens: int
    peer: str | None
    ours: Callable[[Sequence[int]], Sequence[Any]]
    python: Callable[[Kernels, Sequence[int]], object]


def _works() -> list[_Work]:
    vllm = VllmHasher("sha256_cbor", HASH_SEED)
    keys = BlockKeyHasher(_SEED)
    root = keys.root_key()
    none_hash = vllm.none_hash
    return [
        _Work(
            "vLLM sha256_cbor",
            1 << 15,
            "vllm",
            lambda ids: vllm.hash_tokens(ids, BLOCK_SIZE),
            lambda python, ids: python.chain_sha256_cbor(ids, BLOCK_SIZE, none_hash),
        ),
        _Work(
            "block keys (XXH3)",
            1 << 17,
            "dynamo",
            lambda ids: keys.chain(ids, BLOCK_SIZE),
            lambda python, ids: python.chain_xxh3(ids, BLOCK_SIZE, root, _SEED),
        ),
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
            _row(work, form, child if work.peer == against else None, rounds, calls, scale)
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

    def peer_ns() -> float:
        if child is None or work.peer is None:
            return median_ns(lambda: work.python(python, ids), 1)
        answer = child.ask(peer=work.peer, num_tokens=num_tokens, form=form, calls=max(calls // 3, 1))
        _require_equal(work, work.ours(ids)[-1], answer["last"])
        return float(answer["ns"])

    ours, peers = [], []
    for _ in range(rounds):
        ours.append(median_ns(lambda: work.ours(ids), calls) / num_blocks)
        peers.append(peer_ns() / num_blocks)
    our_value, peer_value = statistics.median(ours), statistics.median(peers)
    return BenchRow(
        f"{work.name}, {num_tokens} tokens, {'int32 array' if form == 'array' else 'list'}",
        "ns/block",
        round(our_value, 1),
        work.peer if child is not None else "python",
        round(peer_value, 1),
        round(peer_value / our_value, 1),
    )


def _require_equal(work: _Work, ours: object, peers: object) -> None:
    """An engine's digest must be ours too; Dynamo's hash is another one, only its cost is compared."""
    if isinstance(ours, bytes) and ours.hex() != peers:
        raise ConfigError(f"{work.peer} hashes otherwise ({peers}, ours {ours.hex()}): is it another version?")
