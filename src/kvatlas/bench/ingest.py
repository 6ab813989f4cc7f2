"""What ingest costs: engines' raw ZMQ messages to blocks that can be found, beside Dynamo's indexer.

Three processes on loopback: engines that publish, the consumer that is measured, and this one. Both consumers get the
same messages, twice: *as sent*, while the engines send as fast as they can, and *from a backlog*, when all was sent
while the consumer's process stood still, so that nothing else works beside it. Blocks per second of the consumer's
processor time, all threads and libraries included, from the first message until the last block of every worker is
found: what one core can take.
"""

import itertools
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvatlas._native import backend_name
from kvatlas.bench import ingest_feed, ingest_ours, ingest_peer
from kvatlas.bench.child import PeerProcess, peer_process
from kvatlas.bench.dynamo_interpreter import DYNAMO_NEEDS, require_dynamo
from kvatlas.bench.report import BenchReport, BenchRow, machine_name
from kvatlas.errors import ConfigError

__all__ = ["INGEST_PEERS", "run_ingest_bench"]

INGEST_PEERS = ("dynamo",)
"""Who ingest is measured against."""

_ENTRIES = 200_000
_WORKERS = 8


@dataclass(frozen=True, slots=True)
class _Load:
    entries: int
    per_event: int
    from_backlog: bool
    settle_s: float
    timeout_s: float


def run_ingest_bench(
    *,
    against: str | None = None,
    interpreter: str | Path = ".venv-dynamo/bin/python",
    rounds: int = 3,
    scale: float = 1.0,
    settle_s: float = 0.7,
    timeout_s: float = 60.0,
) -> BenchReport:
    """Measure ingest of 16-block and of single-block events.

    Args:
        against: `dynamo`, or None to measure ours alone.
        interpreter: a Python that has ai-dynamo-runtime.
        rounds: runs of each side, in turns; the median counts.
        scale: of the number of blocks.
        settle_s: between connecting and the first message; a publisher drops what it sends before it knows of us.
        timeout_s: for all blocks to become visible.

    Raises:
        ConfigError: an unknown peer, no round, a peer that does not run, blocks that never became visible.
    """
    if against is not None and against not in INGEST_PEERS:
        raise ConfigError(f"ingest is measured against {', '.join(INGEST_PEERS)} or nothing, got {against!r}")
    if rounds < 1:
        raise ConfigError(f"at least one round is needed, got {rounds}")
    peer_python = None if against is None else require_dynamo(interpreter)
    rows = []
    for (per_event, share), from_backlog in itertools.product(((16, 1), (1, 4)), (False, True)):
        load = _Load(max(int(_ENTRIES * scale / share), 1), per_event, from_backlog, settle_s, timeout_s)
        ours, peers = [], []
        for _ in range(rounds):
            ours.append(_rate(Path(sys.executable), ingest_ours.__file__, "kvatlas", load))
            if peer_python is not None:
                peers.append(_rate(peer_python, ingest_peer.__file__, DYNAMO_NEEDS, load))
        rows.append(_row(_name(load), statistics.median(ours), statistics.median(peers) if peers else None, against))
    return BenchReport(machine=f"{machine_name()}, {backend_name()} kernels", rows=rows)


def _name(load: _Load) -> str:
    blocks = "1 block" if load.per_event == 1 else f"{load.per_event} blocks"
    return f"ZMQ messages to visible, {blocks} an event, {'from a backlog' if load.from_backlog else 'as sent'}"


def _row(name: str, ours: float, peer: float | None, against: str | None) -> BenchRow:
    unit = "blocks per core/s"
    if peer is None:
        return BenchRow(name, unit, round(ours))
    return BenchRow(name, unit, round(ours), against, round(peer), round(ours / peer, 2))


def _rate(python: Path, script: str, needs: str, load: _Load) -> float:
    """Blocks per processor second of one consumer, in fresh processes."""
    quiet = {"DYN_LOG": "error", **os.environ}
    with ExitStack() as stack:
        here = peer_process(sys.executable, ingest_feed.__file__, needs="kvatlas", environment=dict(os.environ))
        feed: PeerProcess = stack.enter_context(here)
        consumer = stack.enter_context(peer_process(python, script, needs=needs, environment=quiet))
        opened = feed.ask(do="open", workers=_WORKERS, entries=load.entries, per_event=load.per_event)
        consumer.ask(
            do="connect",
            endpoints=opened["endpoints"],
            entries=load.entries,
            settle_s=load.settle_s,
            timeout_s=load.timeout_s,
        )
        if load.from_backlog:
            with consumer.stopped():
                blocks = feed.ask(do="send")["blocks"]
            answer = consumer.ask(do="measure", timeout_s=load.timeout_s)
        else:
            with ThreadPoolExecutor(1) as pool:
                measured = pool.submit(consumer.ask, do="measure", timeout_s=load.timeout_s)
                blocks = feed.ask(do="send")["blocks"]
                answer = measured.result()
        feed.ask(do="close")
    if answer["missing"]:
        raise ConfigError(
            f"blocks of {answer['missing']} of {_WORKERS} workers were not visible {load.timeout_s} s after they were "
            f"sent to {script}: a slow machine, or messages sent before the connection stood; try again"
        )
    return float(blocks / answer["cpu_s"])
