"""What the index costs: look-ups, events, memory, beside Dynamo's radix tree under the same work.

Each side is a process of its own and does what `index_kit` describes, in turns; the median of the rounds counts. Works
on memory get a fresh process each. A side that answers otherwise than the work was made to be answered is no result.
"""

import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvatlas._native import backend_name
from kvatlas.bench import index_ours, index_peer
from kvatlas.bench.child import PeerProcess, peer_process
from kvatlas.bench.dynamo_interpreter import DYNAMO_NEEDS, require_dynamo
from kvatlas.bench.index_kit import BLOCK_SIZE, PATTERNS
from kvatlas.bench.report import BenchReport, BenchRow, machine_name
from kvatlas.errors import ConfigError

__all__ = ["INDEX_BLOCKS", "INDEX_PEERS", "INDEX_WORKERS", "run_index_bench"]

INDEX_PEERS = ("dynamo",)
"""Who the index is measured against."""
INDEX_BLOCKS = (64, 512, 2048)
INDEX_WORKERS = (8, 64, 512)

_ENTRIES = 200_000
_MEMORY_ENTRIES = 1_000_000
_CHURN_TIMES = 10
_CALLS = 1_000


@dataclass(frozen=True, slots=True)
class _Work:
    """One row.

    Attributes:
        command: what both sides are asked.
        form: by which of our calls; see `index_ours.answer`.
        has_peer: whether the peer can do it, too.
        fresh: whether each side does it in a process that did nothing before, once.
    """

    name: str
    unit: str
    command: dict[str, Any]
    form: str = "bytes"
    has_peer: bool = True
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class _Sides:
    """Both processes; the peer's is None when there is no peer."""

    ours: PeerProcess
    peer: PeerProcess | None


def run_index_bench(
    *,
    against: str | None = None,
    interpreter: str | Path = ".venv-dynamo/bin/python",
    pattern: str = "ladder",
    rounds: int = 5,
    scale: float = 1.0,
) -> BenchReport:
    """Measure the index.

    Args:
        against: `dynamo`, or None to measure ours alone.
        interpreter: a Python that has ai-dynamo-runtime.
        pattern: who holds the prompts that are looked up: `ladder`, `full` or `single`.
        rounds: turns of each side.
        scale: of all sizes: workers, blocks, calls, entries.

    Raises:
        ConfigError: an unknown peer or pattern, no round, a peer that does not run or a side that answers wrong.
    """
    if against is not None and against not in INDEX_PEERS:
        raise ConfigError(f"the index is measured against {', '.join(INDEX_PEERS)} or nothing, got {against!r}")
    if pattern not in PATTERNS:
        raise ConfigError(f"prompts are held in the pattern {', '.join(PATTERNS)}, got {pattern!r}")
    if rounds < 1:
        raise ConfigError(f"at least one round is needed, got {rounds}")
    peer_python = None if against is None else require_dynamo(interpreter)
    rows: list[BenchRow] = []
    with ExitStack() as stack:
        lasting = _started(stack, peer_python)
        for work in _works(pattern, scale):
            if work.fresh:
                with ExitStack() as own:
                    sides = _started(own, peer_python if work.has_peer else None)
                    rows.extend(_memory_rows(work, sides, against))
            else:
                rows.append(_row(work, lasting, against, rounds))
    return BenchReport(machine=f"{machine_name()}, {backend_name()} kernels", rows=rows)


def _works(pattern: str, scale: float) -> Iterator[_Work]:
    calls = max(int(_CALLS * scale), 10)

    def scaled(count: int) -> int:
        return max(int(count * scale), 2)

    def find(workers: int, blocks: int, **more: Any) -> dict[str, Any]:
        return {"work": "find", "workers": workers, "blocks": blocks, "pattern": pattern, "calls": calls, **more}

    for workers in map(scaled, INDEX_WORKERS):
        for blocks in map(scaled, INDEX_BLOCKS):
            yield _Work(f"find, {blocks} blocks, {workers} workers, {pattern}", "us/find", find(workers, blocks))
    few, least, most = scaled(INDEX_WORKERS[0]), scaled(INDEX_BLOCKS[0]), scaled(INDEX_BLOCKS[-1])
    missed = find(few, least, miss=True)
    yield _Work(f"find, {least} blocks, {few} workers, miss on the first block", "us/find", missed)
    for blocks in (least, most):
        name = f"find_tokens, {blocks * BLOCK_SIZE} tokens, {few} workers, {pattern}"
        yield _Work(name, "us/find", find(few, blocks), "tokens", has_peer=False)
    name = f"find_tokens, {most * BLOCK_SIZE} tokens, {few} workers, miss on the first block"
    yield _Work(name, "us/find", find(few, most, miss=True), "tokens", has_peer=False)
    yield from _event_works(scaled(_ENTRIES))
    entries = scaled(_MEMORY_ENTRIES)
    for copies, name in ((1, "unique"), (8, "shared by 8")):
        command = {"work": "memory", "entries": entries, "copies": copies}
        yield _Work(f"memory, {entries} entries, {name}", "bytes/(block, worker)", command, fresh=True)
    command = {"work": "memory", "entries": entries, "copies": 1}
    name = f"memory, {entries} entries into a cap of {index_ours.CAP_BYTES >> 20} MiB"
    yield _Work(name, "% of the cap", command, "capped", has_peer=False, fresh=True)
    churn = {"work": "churn", "entries": scaled(_ENTRIES), "times": _CHURN_TIMES}
    yield _Work(f"memory after {_CHURN_TIMES}x churn, against warmed up", "% growth", churn, fresh=True)


def _event_works(entries: int) -> Iterator[_Work]:
    for per_event, name in ((16, "16 blocks an event"), (1, "1 block an event")):
        command = {"work": "store", "entries": entries, "per_event": per_event}
        yield _Work(f"stored, {name}, from bytes", "ns/block", command)
        yield _Work(f"stored, {name}, decoded", "ns/block", command, "decoded")
    yield _Work("removed, 16 blocks an event, from bytes", "ns/block", {"work": "remove", "entries": entries})
    yield _Work("purge of a worker", "ns/block", {"work": "purge", "entries": entries})


def _started(stack: ExitStack, peer_python: Path | None) -> _Sides:
    environment = dict(os.environ)
    ours = peer_process(sys.executable, index_ours.__file__, needs="kvatlas", environment=environment)
    if peer_python is None:
        return _Sides(stack.enter_context(ours), None)
    quiet = {"DYN_LOG": "error", **environment}
    peer = peer_process(peer_python, index_peer.__file__, needs=DYNAMO_NEEDS, environment=quiet)
    return _Sides(stack.enter_context(ours), stack.enter_context(peer))


def _row(work: _Work, sides: _Sides, against: str | None, rounds: int) -> BenchRow:
    ours, peers = [], []
    for _ in range(rounds):
        ours.append(_value("kvatlas", work, sides.ours.ask(form=work.form, **work.command)))
        if sides.peer is not None and work.has_peer:
            peers.append(_value("the peer", work, sides.peer.ask(**work.command)))
    return _compared(work, statistics.median(ours), statistics.median(peers) if peers else None, against)


def _value(side: str, work: _Work, answer: dict[str, float]) -> float:
    if answer.get("wrong"):
        raise ConfigError(
            f"{work.name}: {side} gave {answer['wrong']} wrong answers, so its time is no result: "
            "another version than this benchmark knows?"
        )
    return answer["value"]


def _compared(work: _Work, ours: float, peer: float | None, against: str | None) -> BenchRow:
    if peer is None:
        return BenchRow(work.name, work.unit, round(ours, 2))
    ratio = round(peer / ours, 2) if ours > 0 and peer > 0 else None
    return BenchRow(work.name, work.unit, round(ours, 2), against, round(peer, 2), ratio)


def _memory_rows(work: _Work, sides: _Sides, against: str | None) -> Iterator[BenchRow]:
    """Growth of the resident set, and how far our own account of it is off."""
    ours = sides.ours.ask(form=work.form, **work.command)
    peer = None if sides.peer is None else sides.peer.ask(**work.command)["value"]
    if work.form == "capped":
        yield BenchRow(work.name, work.unit, round(ours["resident_bytes"] / index_ours.CAP_BYTES * 100, 1))
    else:
        yield _compared(work, ours["value"], peer, against)
    if "used_bytes" in ours:
        off = abs(ours["used_bytes"] - ours["resident_bytes"]) / max(ours["resident_bytes"], 1) * 100
        yield BenchRow(f"{work.name}: own account against resident set", "% off", round(off, 1))
