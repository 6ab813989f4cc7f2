"""Snapshots as files: replaced whole, read at a start, and left aside with a reason when they cannot be used."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas.clock import ManualClock, SystemClock
from kvatlas.config import ServeConfig
from kvatlas.errors import ConfigError, IndexStateError
from kvatlas.fleet import SnapshotKeeper, find_warm_start, new_file, read_snapshot_file
from kvatlas.index import SnapshotHead, write_snapshot

pytestmark = pytest.mark.asyncio


def empty_snapshot(seed: int = 3) -> Iterator[bytes]:
    """A snapshot of a fleet without workers."""
    return write_snapshot(SnapshotHead(seed, 1.0, "test"), ())


def names(folder: Path) -> list[str]:
    """What is in a folder, hidden files included."""
    return [each.name for each in folder.iterdir()]


def keeper(path: Path, take=empty_snapshot) -> SnapshotKeeper:
    return SnapshotKeeper(path, 0.001, take, SystemClock())


async def test_a_snapshot_is_written_whole_and_read_again(tmp_path: Path) -> None:
    """The file appears under its name only, readable by its owner only, and its size is counted."""
    path = tmp_path / "index.snapshot"
    kept = keeper(path)
    assert await kept.save()
    assert read_snapshot_file(path).head.seed == 3
    assert names(tmp_path) == ["index.snapshot"]
    assert path.stat().st_mode & 0o077 == 0
    assert (kept.stats.saved, kept.stats.last_bytes) == (1, path.stat().st_size)


async def test_a_snapshot_that_fails_leaves_the_old_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The disk is full in the middle: the old file stays, nothing else is left, and the log says why."""
    path = tmp_path / "index.snapshot"
    await keeper(path).save()

    def broken() -> Iterator[bytes]:
        yield b"half"
        raise OSError(28, "No space left on device")

    kept = keeper(path, broken)
    assert not await kept.save()
    assert "No space left" in caplog.text
    assert read_snapshot_file(path).head.seed == 3
    assert names(tmp_path) == ["index.snapshot"]
    assert kept.stats.failed == 1


async def test_a_cancelled_write_leaves_nothing(tmp_path: Path) -> None:
    """A shutdown in the middle of a write: the half file vanishes."""

    async def write_half() -> None:
        async with new_file(tmp_path / "x") as file:
            file.write(b"half")
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await write_half()
    assert names(tmp_path) == []


async def test_others_run_between_two_workers(tmp_path: Path) -> None:
    """Writing gives the loop back after each piece."""
    turns = []

    def pieces() -> Iterator[bytes]:
        for piece in range(3):
            turns.append(piece)
            yield b"x"

    async def other() -> None:
        while len(turns) < 3 or turns[-1] != "other":
            if turns and turns[-1] != "other":
                turns.append("other")
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    await keeper(tmp_path / "x", pieces).save()
    await running
    assert turns[:5] == [0, "other", 1, "other", 2]


async def test_it_is_written_every_interval(tmp_path: Path) -> None:
    """The periodic writer goes on until it is cancelled."""
    kept = keeper(tmp_path / "x")
    running = asyncio.create_task(kept.run())
    async with asyncio.timeout(10):
        while kept.stats.saved < 3:
            await asyncio.sleep(0.002)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (kept.stats.failed, names(tmp_path)) == (0, ["x"])


async def test_the_folder_must_exist(tmp_path: Path) -> None:
    """A path in a folder that is not there is a mistake to be seen at the start, not at the first write."""
    with pytest.raises(ConfigError, match="does not exist"):
        keeper(tmp_path / "nowhere" / "x")


async def test_no_file_yet(tmp_path: Path) -> None:
    """The first start has none: it starts empty."""
    assert await find_warm_start(ServeConfig(snapshot_path=str(tmp_path / "x")), ManualClock()) is None
    assert await find_warm_start(ServeConfig(), ManualClock()) is None


async def test_a_file_is_found(tmp_path: Path) -> None:
    """Its seed is what the index then uses."""
    path = tmp_path / "x"
    await keeper(path).save()
    warm = await find_warm_start(ServeConfig(snapshot_path=str(path)), ManualClock())
    assert warm is not None
    assert warm.seed == 3


@pytest.mark.parametrize("damage", ["truncated", "foreign", "another seed"])
async def test_a_file_that_cannot_be_used_is_kept_aside(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The start goes on without it; the file is renamed, so that the next write does not destroy it."""
    path = tmp_path / "x"
    await keeper(path).save()
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "foreign":
        path.write_bytes(b"something else")
    seed = 4 if damage == "another seed" else None
    with caplog.at_level(logging.ERROR):
        assert await find_warm_start(ServeConfig(snapshot_path=str(path), seed=seed), ManualClock()) is None
    assert "the index starts empty" in caplog.text
    assert names(tmp_path) == ["x.refused"]


async def test_a_peer_that_does_not_answer_is_left_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The own file is taken instead, and the log says what the peer did."""
    path = tmp_path / "x"
    await keeper(path).save()
    config = ServeConfig(snapshot_path=str(path), bootstrap_from="http://127.0.0.1:1")
    warm = await find_warm_start(config, ManualClock())
    assert warm is not None
    assert "no snapshot from http://127.0.0.1:1/api/index/snapshot" in caplog.text


async def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """Commands say which file cannot be read, and why."""
    with pytest.raises(IndexStateError, match="nowhere cannot be read: No such file"):
        read_snapshot_file(tmp_path / "nowhere")
