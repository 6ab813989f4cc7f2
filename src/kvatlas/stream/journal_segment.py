"""One file of a stream's journal: a header that says whose it is, then records, each with a checksum.

A record is trusted only when it is whole and its checksum fits; reading ends before the first that is not. A file is
written under a temporary name and renamed when its header is on disk, so a name that is there has a whole header.

Layout, little-endian: magic (8 bytes), version u16, life u64, number u32, first seq u64, length of source u16, source
(UTF-8), crc32 of all before. Then records: length of payload u32, crc32 u32, seq u64, engine seq i64, payload. The
checksum covers the other three fields and the payload.
"""

import os
import struct
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvatlas.errors import ConfigError

__all__ = [
    "NO_ENGINE_SEQ",
    "SUFFIX",
    "TEMPORARY",
    "Extent",
    "JournalRecord",
    "Segment",
    "SegmentHeader",
    "read_extent",
    "read_records",
    "sync_folder",
]

SUFFIX = ".kvj"
TEMPORARY = ".tmp"
NO_ENGINE_SEQ = -1
"""Engine's number of a batch that the engine never sent."""

_MAGIC = b"KVATLASJ"
_VERSION = 1
_FIXED = struct.Struct("<8sHQIQH")
_CRC = struct.Struct("<I")
_RECORD = struct.Struct("<IIQq")
_NUMBERS = struct.Struct("<IQq")
_CHUNK_BYTES = 256 * 1024
_INDEX_EVERY = 128


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """One batch of the journal.

    Attributes:
        seq: its number as the journal's readers know it.
        engine_seq: its number at the engine; -1 for a batch that the engine never sent.
        payload: the batch's bytes.
        end: where the next record begins in its file.
    """

    seq: int
    engine_seq: int
    payload: bytes
    end: int

    @property
    def start(self) -> int:
        """Where the record begins in its file."""
        return self.end - len(self.payload) - _RECORD.size


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Whose file it is: of which stream (`source`), which life, the how-manieth of it, and its lowest seq."""

    source: str
    life: int
    number: int
    first_seq: int

    @property
    def name(self) -> str:
        """The file's name; names sort as lives and numbers do."""
        return f"{self.life:010d}-{self.number:06d}{SUFFIX}"

    def encode(self) -> bytes:
        """The header's bytes."""
        source = self.source.encode()
        head = _FIXED.pack(_MAGIC, _VERSION, self.life, self.number, self.first_seq, len(source)) + source
        return head + _CRC.pack(zlib.crc32(head))


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _encode_record(seq: int, engine_seq: int, payload: bytes) -> bytes:
    check = zlib.crc32(payload, zlib.crc32(_NUMBERS.pack(len(payload), seq, engine_seq)))
    return _RECORD.pack(len(payload), check, seq, engine_seq) + payload


def read_records(handle: int, start: int, end: int) -> Iterator[JournalRecord]:
    """The whole and undamaged records of bytes `start..end` of a file; ends before the first other one."""
    buffer, at = b"", 0
    base = start

    def fill(wanted: int) -> bool:
        """Have `wanted` bytes at `at`; False when the file has no more."""
        nonlocal buffer, at, base
        if len(buffer) - at >= wanted:
            return True
        if base + at + wanted > end:
            return False
        size = min(max(wanted, _CHUNK_BYTES), end - base - at)
        base, at = base + at, 0
        buffer = os.pread(handle, size, base)
        return len(buffer) >= wanted

    while fill(_RECORD.size):
        length, check, seq, engine_seq = _RECORD.unpack_from(buffer, at)
        if not fill(_RECORD.size + length):
            return
        payload = buffer[at + _RECORD.size : at + _RECORD.size + length]
        if zlib.crc32(payload, zlib.crc32(_NUMBERS.pack(length, seq, engine_seq))) != check:
            return
        at += _RECORD.size + length
        yield JournalRecord(seq, engine_seq, payload, base + at)


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes `start..end` of a journal's file: whole records."""

    path: Path
    start: int
    end: int


def read_extent(extent: Extent) -> Iterator[JournalRecord]:
    """The records of a part of a file, by a handle of its own: any thread may.

    Raises:
        OSError: the file is gone.
    """
    handle = os.open(extent.path, os.O_RDONLY)
    try:
        yield from read_records(handle, extent.start, extent.end)
    finally:
        os.close(handle)


class Segment:
    """An open file of the journal. Used by one thread; others read the file by its path.

    Attributes:
        end: bytes of it that are whole.
        last: its newest record; None when it has none.
        last_of_engine: the newest that the engine sent.
    """

    __slots__ = ("_handle", "_offsets", "_records", "_seqs", "end", "header", "last", "last_of_engine", "path")

    def __init__(self, path: Path, header: SegmentHeader, handle: int, first: int) -> None:
        self.path = path
        self.header = header
        self.end = first
        self.last: JournalRecord | None = None
        self.last_of_engine: JournalRecord | None = None
        self._handle = handle
        self._records = 0
        # Every so manieth record's place, so that a late number is found without reading the file.
        self._seqs = array("Q")
        self._offsets = array("Q")

    @classmethod
    def create(cls, folder: Path, header: SegmentHeader) -> "Segment":
        """A new file under a temporary name; `commit` gives it its own."""
        path = folder / (header.name + TEMPORARY)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        head = header.encode()
        os.write(handle, head)
        return cls(path, header, handle, len(head))

    @classmethod
    def load(cls, path: Path) -> "Segment":
        """Open a file and read it through.

        Raises:
            ConfigError: it is not a journal file, or of a version that is not known here.

        Cost: reading all of it, and about 1.5 us a record.
        """
        handle = os.open(path, os.O_RDWR)
        try:
            header, first = _read_header(path, handle)
            segment = cls(path, header, handle, first)
            for record in read_records(handle, first, os.fstat(handle).st_size):
                segment._note(record)
        except BaseException:
            os.close(handle)
            raise
        return segment

    @property
    def next_seq(self) -> int:
        """One above the highest number in it."""
        return self.header.first_seq if self.last is None else self.last.seq + 1

    @property
    def damaged_bytes(self) -> int:
        """Bytes behind the last whole record."""
        return os.fstat(self._handle).st_size - self.end

    def append(self, seq: int, engine_seq: int, payload: bytes) -> None:
        """Write one record and hand it to the operating system.

        Raises:
            OSError: it cannot be written; what was written of it is taken back.

        Cost: one system call.
        """
        data = _encode_record(seq, engine_seq, payload)
        try:
            written = os.pwrite(self._handle, data, self.end)
            while written < len(data):
                written += os.pwrite(self._handle, data[written:], self.end + written)
        except OSError:
            self.cut()
            raise
        self._note(JournalRecord(seq, engine_seq, payload, self.end + len(data)))

    def records(self, start: int) -> Iterator[JournalRecord]:
        """Records from a place on, up to those there are now."""
        return read_records(self._handle, start, self.end)

    def place_of(self, seq: int) -> int:
        """A place at or before the first record numbered `seq` or above. O(log records)."""
        at = bisect_right(self._seqs, seq) - 1
        return self._offsets[at] if at >= 0 else len(self.header.encode())

    def cut(self) -> None:
        """Take away what is behind the last whole record."""
        os.ftruncate(self._handle, self.end)

    def sync(self) -> None:
        """Wait until everything written is on disk."""
        os.fdatasync(self._handle)

    def syncing(self) -> Callable[[], None]:
        """What waits for that, on any thread, also when the file is closed meanwhile. Call it once."""
        handle = os.dup(self._handle)

        def wait() -> None:
            try:
                os.fdatasync(handle)
            finally:
                os.close(handle)

        return wait

    def commit(self) -> None:
        """On disk, and under its own name."""
        os.fsync(self._handle)
        target = self.path.with_name(self.header.name)
        self.path.rename(target)
        self.path = target
        sync_folder(target.parent)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def remove(self) -> None:
        """Close the file and delete it."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _note(self, record: JournalRecord) -> None:
        if self._records % _INDEX_EVERY == 0:
            self._seqs.append(record.seq)
            self._offsets.append(record.start)
        self._records += 1
        self.end = record.end
        self.last = record
        if record.engine_seq != NO_ENGINE_SEQ:
            self.last_of_engine = record


def _read_header(path: Path, handle: int) -> tuple[SegmentHeader, int]:
    head = os.pread(handle, _FIXED.size, 0)
    if len(head) < _FIXED.size or not head.startswith(_MAGIC):
        raise ConfigError(
            f"{path} is not a file of a kvatlas journal; give the keeper a folder of its own, or move the file away"
        )
    _, version, life, number, first_seq, length = _FIXED.unpack(head)
    if version != _VERSION:
        raise ConfigError(f"{path} has journal format {version}, this kvatlas reads {_VERSION}; use another folder")
    source = os.pread(handle, length, _FIXED.size)
    check = os.pread(handle, _CRC.size, _FIXED.size + length)
    if check != _CRC.pack(zlib.crc32(head + source)):
        raise ConfigError(f"{path} has a damaged header; delete it: what it held is asked of the engine again, or lost")
    return SegmentHeader(source.decode(errors="replace"), life, number, first_seq), _FIXED.size + length + _CRC.size
