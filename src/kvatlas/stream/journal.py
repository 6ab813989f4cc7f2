"""A publisher's life on disk: every batch with its number, append-only, in a folder of its own.

One life is kept, in segments (`journal_segment`). The newest life in the folder counts; files of older ones, and
temporary ones, are what a crash left behind, and go when the journal is opened. So a life is replaced by writing its
successor's first segment completely and renaming it.

What a crash of the process cannot take: every batch `append` returned for. What a power failure can: batches since the
last `sync`.
"""

import contextlib
import fcntl
import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from kvatlas.errors import ConfigError, IndexStateError
from kvatlas.stream.journal_segment import (
    SUFFIX,
    TEMPORARY,
    Extent,
    JournalRecord,
    Segment,
    SegmentHeader,
    sync_folder,
)

__all__ = ["Journal"]

_log = logging.getLogger(__name__)

DEFAULT_SEGMENT_BYTES = 64 * 1024 * 1024
_LOCK = "lock"


class Journal:
    """The journal of one stream. Used by one thread.

    Args:
        folder: made when it is not there; no second journal may use it.
        source: whose stream it is; a folder with another's is refused.
        segment_bytes: size at which a new file begins.

    Raises:
        ConfigError: the folder is in use, holds another stream's journal or a foreign file, or cannot be written.
    """

    def __init__(self, folder: Path, source: str, *, segment_bytes: int = DEFAULT_SEGMENT_BYTES) -> None:
        self._folder = folder
        self._source = source
        self._segment_bytes = segment_bytes
        self.cut_bytes = 0
        """Bytes of a torn tail that were cut off when the journal was opened."""
        self.damaged_segments = 0
        """Files with a damaged record before their end: from there to the next file the numbers are missing."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot keep a journal in {folder}: {error.strerror}; give a folder to write") from error
        self._segments: list[Segment] = []
        try:
            self._take_lock()
            self._load()
        except BaseException:
            self.close()
            raise

    # -- what it holds --

    @property
    def life(self) -> int:
        """Number of the life that is kept; rises with each."""
        return self._segments[-1].header.life

    @property
    def next_seq(self) -> int:
        """One above the highest number; 0 in an empty life."""
        return self._segments[-1].next_seq

    @property
    def last_of_engine(self) -> JournalRecord | None:
        """The newest batch that the engine sent; None when the life has none."""
        found = (segment.last_of_engine for segment in reversed(self._segments))
        return next((record for record in found if record is not None), None)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(segment.end for segment in self._segments)

    def read_from(self, seq: int) -> Iterator[JournalRecord]:
        """Every record numbered `seq` or above, those included that are appended while it is read.

        It ends early when another life begins. Cost: one read for 256 KiB; to find `seq`, up to 128 records more.
        """
        segments = self._segments
        at = max(bisect_right([segment.header.first_seq for segment in segments], seq) - 1, 0)
        while segments is self._segments and at < len(segments):
            segment = segments[at]
            place = segment.place_of(seq)
            while segments is self._segments and place < segment.end:
                before = place
                for record in segment.records(place):
                    place = record.end
                    if record.seq >= seq:
                        yield record
                        if segments is not self._segments:
                            return
                if place == before:  # damaged since it was opened
                    break
            at += 1

    def extents_before_last(self) -> list[Extent]:
        """Where all records before the engine's newest are; empty without one."""
        return self._extents(until_last=True)

    def extents(self) -> list[Extent]:
        """Where all records are."""
        return self._extents(until_last=False)

    def _extents(self, *, until_last: bool) -> list[Extent]:
        last = self.last_of_engine
        if until_last and last is None:
            return []
        found = []
        for segment in self._segments:
            start = len(segment.header.encode())
            holds_last = until_last and segment.last_of_engine is last
            found.append(Extent(segment.path, start, last.start if holds_last and last else segment.end))
            if holds_last:
                break
        return found

    # -- writing --

    def append(self, seq: int, engine_seq: int, payload: bytes) -> None:
        """Write one batch. Afterwards a crash of the process cannot lose it. `engine_seq` -1: not the engine's.

        Raises:
            IndexStateError: the number does not rise.
            OSError: it cannot be written; the journal is as before.

        Cost: one system call, about 3 us.
        """
        if seq < self.next_seq:
            raise IndexStateError(f"batch {seq} cannot be journaled: the next number is {self.next_seq} or above")
        if self._segments[-1].end >= self._segment_bytes:
            self._segments[-1].sync()
            segment = self._new_segment(self.life, len(self._segments), seq)
            segment.commit()
            self._segments.append(segment)
        self._segments[-1].append(seq, engine_seq, payload)

    def sync(self) -> None:
        """Wait until everything appended is on disk."""
        self._segments[-1].sync()

    def syncing(self) -> Callable[[], None]:
        """What waits until everything appended so far is on disk: to be called once, on any thread."""
        return self._segments[-1].syncing()

    def begin_life(self) -> None:
        """Forget all; numbers start again."""
        segment = self._new_segment(self.life + 1, 0, 0)
        segment.commit()
        self._replace_with(segment)

    def successor(self) -> Segment:
        """A file for the next life, to be filled and then given to `adopt`."""
        return self._new_segment(self.life + 1, 0, 0)

    def adopt(self, segment: Segment) -> None:
        """Replace all by what a `successor` holds, in one step."""
        segment.commit()
        self._replace_with(segment)

    def close(self) -> None:
        """Everything on disk, files closed. Idempotent."""
        for segment in self._segments:
            with contextlib.suppress(OSError):
                segment.sync()
            segment.close()
        self._segments = []
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _new_segment(self, life: int, number: int, first_seq: int) -> Segment:
        return Segment.create(self._folder, SegmentHeader(self._source, life, number, first_seq))

    def _replace_with(self, segment: Segment) -> None:
        old, self._segments = self._segments, [segment]
        for each in old:
            each.remove()
        sync_folder(self._folder)

    # -- opening --

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{self._folder} is in use by another keeper; give each a folder of its own") from None

    def _load(self) -> None:
        for left in self._folder.glob(f"*{SUFFIX}{TEMPORARY}"):
            left.unlink()
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            segment = Segment.load(path)
            self._segments.append(segment)
            if segment.header.source != self._source:
                raise ConfigError(
                    f"{self._folder} holds the journal of {segment.header.source}, not of {self._source}; "
                    "give another folder, or delete this one to start over"
                )
        newest = max((segment.header.life for segment in self._segments), default=None)
        if newest is None:
            first = self._new_segment(1, 0, 0)
            self._segments = [first]
            first.commit()
            return
        kept = [segment for segment in self._segments if segment.header.life == newest]
        outdated = [segment for segment in self._segments if segment.header.life != newest]
        self._segments = kept
        for segment in outdated:
            segment.remove()
        self._judge_damage()

    def _judge_damage(self) -> None:
        """A torn tail is cut and written over; damage before it stays, and shows as missing numbers."""
        *sealed, tail = self._segments
        for segment in sealed:
            if segment.damaged_bytes:
                self.damaged_segments += 1
                _log.error("%s is damaged: %d bytes at its end are lost", segment.path, segment.damaged_bytes)
        if tail.damaged_bytes:
            self.cut_bytes = tail.damaged_bytes
            _log.warning("%s: a torn tail of %d bytes is cut off", tail.path, tail.damaged_bytes)
            tail.cut()
