"""A directory of block files: whole ones under their final names, unfinished ones under temporary names.

A block is written to a temporary name, flushed if asked for, stamped, and renamed: at every moment the final name is
absent or complete. A writer holds an advisory lock on its temporary while it writes; so a temporary nobody holds was
left by a writer that died, and whoever finds it may remove it.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvatlas.prefix_cache.connectors.block_file import HEADER_BYTES

__all__ = ["BlockFiles", "FileInfo"]

_SUFFIX = ".kv"
_TEMPORARY_PREFIX = ".kvatlas-tmp-"
_SHARD_CHARS = 2


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A block file as the directory shows it: `used_ns` is its modification time, which every use moves."""

    key: bytes
    size: int
    used_ns: int


class BlockFiles:
    """Block files under one directory, in sub-directories by the first byte of the key.

    Files of other names are never touched. The methods `open_temporary` to `sync_directory` are the steps of a write.

    Raises:
        OSError: from every method, where the operating system says so and nothing else is stated.
    """

    def __init__(self, directory: Path, *, fsync: bool = False) -> None:
        self.directory = directory
        self._fsync = fsync
        directory.mkdir(parents=True, exist_ok=True)

    def path_of(self, key: bytes) -> Path:
        """Where a block's file is, if it is."""
        name = key.hex()
        return self.directory / name[:_SHARD_CHARS] / f"{name}{_SUFFIX}"

    def write(self, key: bytes, data: bytes, used_ns: int) -> None:
        """Put a whole file in place, replacing one of the same key. After an error nothing of it is left."""
        path = self.path_of(key)
        fd, temporary = self.open_temporary()
        try:
            try:
                self.write_all(fd, data)
                os.utime(fd, ns=(used_ns, used_ns))
                if self._fsync:
                    self.sync(fd)
                self.rename(temporary, path)
            except OSError:
                with suppress(OSError):
                    temporary.unlink()
                raise
        finally:
            os.close(fd)
        if self._fsync:
            self.sync_directory(path.parent)

    def open_temporary(self) -> tuple[int, Path]:
        """A new file nobody else has, locked.

        Somebody who tidies up may find the file before it is locked, hold it for a moment, and remove it: try again.
        """
        while True:
            fd, name = tempfile.mkstemp(prefix=_TEMPORARY_PREFIX, dir=self.directory)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink:
                    return fd, Path(name)
            except OSError:
                os.close(fd)
                raise
            os.close(fd)

    def write_all(self, fd: int, data: bytes) -> None:
        """Write every byte."""
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    def sync(self, fd: int) -> None:
        """Wait until a file's bytes survive a power cut."""
        os.fsync(fd)

    def rename(self, temporary: Path, path: Path) -> None:
        """Give the file its final name, in one step for every onlooker."""
        try:
            temporary.replace(path)
        except FileNotFoundError:
            path.parent.mkdir(exist_ok=True)
            temporary.replace(path)

    def sync_directory(self, directory: Path) -> None:
        """Wait until a rename survives a power cut."""
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, key: bytes) -> bytes | None:
        """The file's bytes, None when there is no file."""
        try:
            return self.path_of(key).read_bytes()
        except FileNotFoundError:
            return None

    def read_head(self, key: bytes) -> bytes | None:
        """The first `HEADER_BYTES` bytes, fewer when the file is shorter; None when there is no file."""
        try:
            with self.path_of(key).open("rb", buffering=0) as file:
                return file.read(HEADER_BYTES)
        except FileNotFoundError:
            return None

    def size_of(self, key: bytes) -> int | None:
        """The file's size, None when there is none."""
        try:
            return os.stat(self.path_of(key)).st_size  # noqa: PTH116 - Path.stat costs twice as much
        except OSError:
            return None

    def mark_used(self, key: bytes, used_ns: int) -> None:
        """Note a use; nothing happens when the file is gone."""
        with suppress(OSError):
            os.utime(self.path_of(key), ns=(used_ns, used_ns))

    def remove(self, key: bytes) -> bool:
        """Remove a file; False when it was gone or cannot be removed."""
        try:
            self.path_of(key).unlink()
        except OSError:
            return False
        return True

    def scan(self) -> list[FileInfo]:
        """Every block file, used longest ago first. Unreadable sub-directories are passed over."""
        found = [info for shard in self._shards() for info in _block_files(shard)]
        found.sort(key=lambda info: (info.used_ns, info.key))
        return found

    def remove_dead_temporaries(self) -> int:
        """Remove temporaries whose writers are gone; return how many."""
        return sum(_remove_if_unlocked(path) for path in self.directory.glob(f"{_TEMPORARY_PREFIX}*"))

    def _shards(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self.directory) as entries:
            yield from (e for e in entries if len(e.name) == _SHARD_CHARS and e.is_dir(follow_symlinks=False))


def _block_files(shard: os.DirEntry[str]) -> Iterator[FileInfo]:
    try:
        with os.scandir(shard.path) as entries:
            for entry in entries:
                key = _key_of(entry.name)
                if key is None or not entry.name.startswith(shard.name):
                    continue
                with suppress(OSError):  # removed by another process in the meantime
                    stat = entry.stat(follow_symlinks=False)
                    yield FileInfo(key, stat.st_size, stat.st_mtime_ns)
    except OSError:
        return


def _key_of(name: str) -> bytes | None:
    """The key a file name stands for, None for names that are not ours."""
    stem = name.removesuffix(_SUFFIX)
    try:
        key = bytes.fromhex(stem)
    except ValueError:
        return None
    return key if key and name == f"{key.hex()}{_SUFFIX}" else None


def _remove_if_unlocked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except OSError:
        return False  # its writer lives
    finally:
        os.close(fd)
    return True
