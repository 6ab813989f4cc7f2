"""`kvatlas index dump|show|load`: snapshots of the index as files."""

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec

from kvatlas._native import xxh3_64
from kvatlas.cli.admin_client import admin_option, check_admin_url
from kvatlas.cli.output import print_json, print_table
from kvatlas.errors import ConfigError
from kvatlas.fleet import check_blocks, fetch_snapshot, new_file, read_snapshot_file
from kvatlas.index import PrefixIndex, Snapshot, WorkerSnapshot, read_snapshot

__all__ = ["dump", "load", "show"]

_HEADINGS = ["worker", "trust", "loss", "blocks", "bytes", "last batch"]


class _Worker(msgspec.Struct):
    """One worker. `last_seq` None: nothing can prove its life, and all it holds is doubted at a start."""

    blocks: int
    bytes: int
    trust: str
    last_seq: int | None
    loss: str | None


class _Contents(msgspec.Struct):
    """A snapshot."""

    kvatlas_version: str
    taken_wall_s: float
    bytes: int
    blocks: int
    workers: dict[str, _Worker]


class _Loaded(msgspec.Struct):
    """What loading it into an empty index takes, and dumping it again: all workers, and the longest of them."""

    blocks: int
    workers: int
    load_ms: float
    dump_ms: float
    longest_dump_ms: float
    memory_bytes: int


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@admin_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def dump(*, file: Path, admin: str, as_json: bool) -> None:
    """Write a running gateway's index to FILE, which is replaced."""
    check_admin_url(admin)
    data = asyncio.run(fetch_snapshot(admin))
    snapshot = read_snapshot(data, f"the snapshot of {admin}")
    try:
        asyncio.run(_write(file, data))
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error
    _print(snapshot, len(data), as_json=as_json)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(*, file: Path, as_json: bool) -> None:
    """Print what a snapshot's FILE says of each worker."""
    _print(read_snapshot_file(file), file.stat().st_size, as_json=as_json)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def load(*, file: Path, as_json: bool) -> None:
    """Load FILE into an empty index, as `serve` does at a start, and print what that takes."""
    snapshot = read_snapshot_file(file)
    began_s = time.perf_counter()
    index = check_blocks(snapshot)
    load_s = time.perf_counter() - began_s
    dumps_s = [_dump_time_s(index, worker_id) for worker_id in index.worker_ids]
    loaded = _Loaded(
        index.memory.entries,
        len(snapshot.workers),
        round(load_s * 1000, 3),
        round(sum(dumps_s) * 1000, 3),
        round(max(dumps_s, default=0.0) * 1000, 3),
        index.memory.used_bytes,
    )
    if as_json:
        print_json(loaded)
        return
    click.echo(
        f"{loaded.blocks} blocks of {loaded.workers} workers: loaded in {loaded.load_ms:g} ms, dumped in "
        f"{loaded.dump_ms:g} ms (longest worker {loaded.longest_dump_ms:g} ms), {loaded.memory_bytes} bytes of memory"
    )


def _dump_time_s(index: PrefixIndex, worker_id: str) -> float:
    began_s = time.perf_counter()
    xxh3_64(index.dump_blocks(worker_id), 0)
    return time.perf_counter() - began_s


async def _write(path: Path, data: bytes) -> None:
    async with new_file(path) as file:
        file.write(data)


def _print(snapshot: Snapshot, size_bytes: int, *, as_json: bool) -> None:
    workers = {worker.state.worker_id: _describe(worker) for worker in snapshot.workers}
    blocks = sum(worker.blocks for worker in workers.values())
    head = snapshot.head
    if as_json:
        print_json(_Contents(head.kvatlas_version, head.taken_wall_s, size_bytes, blocks, workers))
        return
    rows = [
        [worker_id, worker.trust, worker.loss or "-", str(worker.blocks), str(worker.bytes), _seq(worker.last_seq)]
        for worker_id, worker in workers.items()
    ]
    taken = datetime.fromtimestamp(head.taken_wall_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    title = f"taken {taken} by kvatlas {head.kvatlas_version}: {blocks} blocks, {size_bytes} bytes"
    print_table(title, _HEADINGS, rows, left=3)


def _describe(worker: WorkerSnapshot) -> _Worker:
    state = worker.state
    last_seq = None if state.position is None else state.position.seq
    return _Worker(worker.block_count, len(worker.blocks), state.trust, last_seq, state.loss)


def _seq(seq: int | None) -> str:
    return "-" if seq is None else str(seq)
