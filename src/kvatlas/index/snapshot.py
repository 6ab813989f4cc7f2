r"""The fleet index as bytes: what a restarted router, or a new one, starts from.

Here: the form of a snapshot, written and read a worker at a time. Not here: files, sockets, and whether what a snapshot
says is still true: `kvatlas.fleet` has it proven by the engines.

Form, all integers little-endian::

    "KVATLAS\x1a"  u32 version
    sections: u32 kind, u32 zero, u64 length, u64 checksum, then `length` bytes

One HEAD; for each worker one WORKER (MessagePack of `WorkerState`) and one BLOCKS (the core's dump, `c/dump.c`); one
END. A section's checksum is XXH3-64 of its bytes, seeded with its kind and its number, so that sections cannot change
places. All is checked before anything is used: a snapshot loads whole, or not at all.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from kvatlas._native import xxh3_64
from kvatlas.errors import IndexStateError
from kvatlas.events import StreamPosition
from kvatlas.index.column_state import ColumnState

__all__ = [
    "SNAPSHOT_VERSION",
    "Snapshot",
    "SnapshotHead",
    "WorkerSnapshot",
    "WorkerState",
    "read_snapshot",
    "write_snapshot",
]

SNAPSHOT_VERSION = 2
"""1: without ages and times of use."""
_MAGIC = b"KVATLAS\x1a"
_START = struct.Struct("<8sI")
_SECTION = struct.Struct("<IIQQ")
_COUNT, _COUNT_AT = struct.Struct("<I"), 56
_HEAD, _WORKER, _BLOCKS, _END = (int.from_bytes(name, "little") for name in (b"HEAD", b"WORK", b"BLKS", b"END\0"))


class SnapshotHead(msgspec.Struct, frozen=True):
    """What holds for the whole snapshot.

    Attributes:
        seed: of its block keys; they mean nothing under another.
        taken_wall_s: Unix time.
        kvatlas_version: which release wrote it, for people.
    """

    seed: int
    taken_wall_s: float
    kvatlas_version: str


class WorkerState(msgspec.Struct, frozen=True):
    """One worker without its blocks.

    Attributes:
        worker_id, url, rank: whose it is.
        copy_mode: what a repeated store means; under another mode the blocks mean something else.
        planes: (medium, group) of each plane, in the numbers of the blocks' dump.
        position: the last batch applied, for asking the publisher whether it is still the same life; None: unprovable.
        engine_started_s: Unix time at which the engine's process started; None when it did not tell.
        loss: why the worker is `partial`; None when nothing was lost.
        trust, trust_reason: as they stood, for people.
    """

    worker_id: str
    url: str
    rank: int | None
    copy_mode: str
    column: ColumnState
    planes: tuple[tuple[str, int], ...]
    position: StreamPosition | None = None
    engine_started_s: float | None = None
    loss: str | None = None
    trust: str = "none"
    trust_reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One worker whole. `blocks` is the core's dump of its column."""

    state: WorkerState
    blocks: bytes

    @property
    def block_count(self) -> int:
        """Blocks that the worker holds, on the device or elsewhere."""
        return _COUNT.unpack_from(self.blocks, _COUNT_AT)[0] if len(self.blocks) >= _COUNT_AT + _COUNT.size else 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot that was read and checked."""

    head: SnapshotHead
    workers: tuple[WorkerSnapshot, ...]


def write_snapshot(head: SnapshotHead, workers: Iterable[WorkerSnapshot]) -> Iterator[bytes]:
    """Yield a snapshot's bytes, those of one worker at a time: whoever writes them lets others run in between.

    Cost: a checksum over the bytes, 18 a block.
    """
    number = 0
    yield _START.pack(_MAGIC, SNAPSHOT_VERSION) + _section(_HEAD, number, msgspec.msgpack.encode(head))
    for worker in workers:
        yield _section(_WORKER, number + 1, msgspec.msgpack.encode(worker.state))
        yield _section(_BLOCKS, number + 2, worker.blocks)
        number += 2
    yield _section(_END, number + 1, b"")


def read_snapshot(data: bytes, source: str) -> Snapshot:
    """Read and check a snapshot.

    Args:
        data: all of it.
        source: where it came from, for errors.

    Raises:
        IndexStateError: it is none, is of another version, or was truncated or damaged; the message says which.

    Cost: O(bytes).
    """
    if len(data) < _START.size or not data.startswith(_MAGIC):
        raise IndexStateError(f"{source} is no snapshot of a kvatlas index: expected it to begin with {_MAGIC!r}")
    version = _START.unpack_from(data)[1]
    if version != SNAPSHOT_VERSION:
        raise IndexStateError(
            f"{source} is a snapshot of version {version}, and this release reads version {SNAPSHOT_VERSION}: "
            "use the release that wrote it, or remove it and start without"
        )
    sections = list(_sections(data, source))
    try:
        return _assemble(sections, source)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(source, f"its description of a worker cannot be read: {error}") from error


def _assemble(sections: list[tuple[int, bytes]], source: str) -> Snapshot:
    kinds = [kind for kind, _ in sections]
    count = (len(kinds) - 2) // 2
    if kinds != [_HEAD, *[_WORKER, _BLOCKS] * count, _END]:
        raise _damaged(source, "its sections are out of order")
    head = msgspec.msgpack.decode(sections[0][1], type=SnapshotHead)
    workers = tuple(
        WorkerSnapshot(msgspec.msgpack.decode(sections[i][1], type=WorkerState), sections[i + 1][1])
        for i in range(1, len(sections) - 1, 2)
    )
    positions = [worker.state.position for worker in workers]
    if any(position is not None and (position.seq < 0 or position.digest < 1) for position in positions):
        raise _damaged(source, "a stream position is out of range")
    if len({worker.state.worker_id for worker in workers}) != count:
        raise _damaged(source, "a worker comes twice")
    return Snapshot(head, workers)


def _section(kind: int, number: int, payload: bytes) -> bytes:
    return _SECTION.pack(kind, 0, len(payload), xxh3_64(payload, kind << 32 | number)) + payload


def _sections(data: bytes, source: str) -> Iterator[tuple[int, bytes]]:
    at, number, kind = _START.size, 0, _HEAD
    while kind != _END:
        if at + _SECTION.size > len(data):
            raise _damaged(source, f"it ends after {len(data)} bytes, before its end was reached")
        kind, zero, length, checksum = _SECTION.unpack_from(data, at)
        at += _SECTION.size
        if length > len(data) - at:
            raise _damaged(source, f"it ends after {len(data)} bytes, before its end was reached")
        payload = data[at : at + length]
        if zero or xxh3_64(payload, kind << 32 | number) != checksum:
            raise _damaged(source, f"the checksum of section {number} is wrong")
        yield kind, payload
        at += length
        number += 1
    if at != len(data):
        raise _damaged(source, f"{len(data) - at} bytes follow its end")


def _damaged(source: str, why: str) -> IndexStateError:
    return IndexStateError(f"{source} is a damaged snapshot: {why}; remove it and start without")
