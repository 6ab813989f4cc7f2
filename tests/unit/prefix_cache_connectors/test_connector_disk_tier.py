"""The disk tier: bounded, least recently used first, crash-safe, and at peace with other processes."""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvatlas.clock import ManualClock
from kvatlas.errors import ConfigError
from kvatlas.prefix_cache.connectors import BlockFiles, DiskTier, TierChange, open_directory, synthetic_payload
from kvatlas.prefix_cache.connectors.block_file import HEADER_BYTES

PAYLOAD_BYTES = 100


def key(number):
    """A key that looks like a digest with group 0."""
    return bytes([number]) * 32 + bytes(4)


FILE_BYTES = HEADER_BYTES + len(key(0)) + PAYLOAD_BYTES


def payload(number):
    """The bytes of a block."""
    return synthetic_payload(key(number), PAYLOAD_BYTES)


def open_tier(directory, *, blocks=10, files=None, **settings):
    """A tier with room for so many blocks."""
    return DiskTier(files or BlockFiles(directory), blocks * FILE_BYTES, clock=ManualClock(), **settings)


def fill(tier, *numbers):
    """Write blocks; whether each was kept."""
    return [tier.write(key(number), payload(number)) for number in numbers]


def readable(tier, *numbers):
    """Which of the blocks can be read and are right."""
    return [number for number in numbers if tier.read(key(number)) == payload(number)]


def bytes_on_disk(directory):
    """Sum of all file sizes, whatever their names."""
    return sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())


def test_the_block_used_longest_ago_leaves(tmp_path):
    """Reads and touches are uses; the bound holds on disk."""
    tier = open_tier(tmp_path, blocks=3)
    fill(tier, 1, 2, 3)
    readable(tier, 1)
    tier.touch([key(2)])
    fill(tier, 4)
    assert [number for number in (1, 2, 3, 4) if tier.contains(key(number))] == [1, 2, 4]
    assert bytes_on_disk(tmp_path) == tier.total_bytes == 3 * FILE_BYTES
    assert tier.stats.evicted == 1


def test_pinned_blocks_stay(tmp_path):
    """What is being read is passed over; when all is, a new block is refused."""
    tier = open_tier(tmp_path, blocks=2)
    fill(tier, 1, 2)
    tier.pin(key(1))
    assert fill(tier, 3) == [True]
    assert tier.keys == (key(1), key(3))
    tier.pin(key(3))
    assert fill(tier, 4) == [False]
    tier.unpin(key(1))
    assert fill(tier, 4) == [True]
    assert tier.keys == (key(3), key(4))
    assert tier.stats.refused == 1


def test_a_block_larger_than_the_bound_is_refused(tmp_path):
    """It evicts nothing for a block that could never fit."""
    tier = open_tier(tmp_path, blocks=2)
    fill(tier, 1)
    assert not tier.write(key(2), bytes(2 * FILE_BYTES))
    assert tier.keys == (key(1),)


def test_blocks_and_their_order_survive_a_restart(tmp_path):
    """A new tier on the directory knows the blocks, in the order of their last use, and tells of them."""
    first = open_tier(tmp_path)
    fill(first, 1, 2, 3)
    readable(first, 1)
    second = open_tier(tmp_path)
    assert second.keys == (key(2), key(3), key(1))
    assert second.take_changes() == [TierChange((key(2), key(3), key(1)), "STORAGE", stored=True)]
    assert readable(second, 1, 2, 3) == [1, 2, 3]
    assert open_tier(tmp_path, announce_existing=False).take_changes() == []


def test_a_smaller_bound_is_kept_from_the_start(tmp_path):
    """Reopened with less room, the tier drops the oldest at once."""
    fill(open_tier(tmp_path), 1, 2, 3)
    assert open_tier(tmp_path, blocks=1).keys == (key(3),)
    assert bytes_on_disk(tmp_path) == FILE_BYTES


def test_a_clock_that_goes_back_does_not_disturb_the_order(tmp_path):
    """Uses are ordered although the wall clock jumps by hours between them."""
    clock = ManualClock()
    tier = DiskTier(BlockFiles(tmp_path), 10 * FILE_BYTES, clock=clock)
    fill(tier, 1)
    clock.jump_wall(-7200)
    fill(tier, 2)
    assert open_tier(tmp_path).keys == (key(1), key(2))


@pytest.mark.parametrize("length", range(0, FILE_BYTES, 7))
def test_a_torn_file_is_never_served(tmp_path, length):
    """Cut behind a running tier or before a restart: not served, removed, counted, and gone for onlookers."""
    tier = open_tier(tmp_path)
    fill(tier, 1, 2)
    tier.take_changes()
    path = BlockFiles(tmp_path).path_of(key(1))
    os.truncate(path, length)
    assert tier.read(key(1)) is None
    assert not path.exists()
    assert tier.stats.torn == 1
    assert tier.take_changes() == [TierChange((key(1),), "STORAGE", stored=False)]

    fill(tier, 1)
    os.truncate(path, length)
    again = open_tier(tmp_path)
    assert again.keys == (key(2),)
    assert again.stats.torn == 1
    assert not path.exists()


def test_damage_inside_is_found_when_read(tmp_path):
    """A restart trusts sizes only; a flipped bit fails the checksum of the read, and the file goes."""
    fill(open_tier(tmp_path), 1)
    path = BlockFiles(tmp_path).path_of(key(1))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    tier = open_tier(tmp_path)
    assert tier.contains(key(1))
    assert tier.read(key(1)) is None
    assert (tier.stats.corrupt, path.exists(), len(tier)) == (1, False, 0)


def test_files_of_another_model_are_foreign(tmp_path):
    """The same tokens have the same hash in two models: the namespace keeps them apart."""
    fill(open_tier(tmp_path, namespace="a"), 1)
    tier = open_tier(tmp_path, namespace="b")
    assert (tier.contains(key(1)), tier.stats.foreign) == (False, 1)


def test_names_that_are_not_ours_are_left_alone(tmp_path):
    """Pointing a tier at a directory in use costs nobody a file."""
    others = [tmp_path / "notes.txt", tmp_path / "01" / "notes.kv", tmp_path / "01" / "AB.kv", tmp_path / "x.kv"]
    (tmp_path / "01").mkdir()
    for path in others:
        path.write_text("mine")
    tier = open_tier(tmp_path, blocks=1)
    fill(tier, 1, 2, 3)
    tier.clear()
    assert [path.read_text() for path in others] == ["mine"] * 4


def test_a_removed_file_is_noticed(tmp_path):
    """A lookup asks the file system; without sharing a read finds out, and both tell onlookers."""
    for shared in (True, False):
        tier = open_tier(tmp_path, shared=shared)
        fill(tier, 1)
        tier.take_changes()
        BlockFiles(tmp_path).remove(key(1))
        assert tier.contains(key(1)) is not shared
        assert tier.read(key(1)) is None
        assert tier.take_changes() == [TierChange((key(1),), "STORAGE", stored=False)]


def test_two_tiers_see_each_others_blocks(tmp_path):
    """What one process wrote the other serves, and does not write again."""
    one, two = open_tier(tmp_path), open_tier(tmp_path)
    fill(one, 1)
    assert readable(two, 1) == [1]
    assert fill(two, 1) == [True]
    assert two.stats.written == 0
    assert two.take_changes() == [TierChange((key(1),), "STORAGE", stored=True)]


class EvictedByAnother(BlockFiles):
    """Another process evicts each file between the look at its name and the look at its header."""

    def read_head(self, key):
        """Too late."""
        self.remove(key)
        return super().read_head(key)


def test_a_file_evicted_while_it_is_looked_at_is_not_called_torn(tmp_path):
    """It is simply not there, whether the directory is scanned or a block is looked up."""
    fill(open_tier(tmp_path), 1)
    tier = open_tier(tmp_path, files=EvictedByAnother(tmp_path))
    fill(open_tier(tmp_path), 2)
    assert not tier.contains(key(2))
    assert (len(tier), tier.stats.torn, tier.take_changes()) == (0, 0, [])


def test_two_tiers_keep_the_bound_together(tmp_path):
    """Writing in turns they exceed it by at most a sixteenth each."""
    blocks = 32
    one, two = open_tier(tmp_path, blocks=blocks), open_tier(tmp_path, blocks=blocks)
    most = 0
    for number in range(100):
        fill((one, two)[number % 2], number)
        most = max(most, bytes_on_disk(tmp_path))
    assert most <= (blocks + 2 * (blocks // 16 + 1)) * FILE_BYTES


class FullDisk(BlockFiles):
    """A directory on a device without space."""

    def write_all(self, fd, data):
        """Half a file, then an error."""
        os.write(fd, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_device_costs_the_block_only(tmp_path):
    """The block is not kept, nothing is left behind, nothing is raised."""
    tier = open_tier(tmp_path, files=FullDisk(tmp_path))
    assert fill(tier, 1) == [False]
    assert (tier.stats.write_errors, tier.contains(key(1)), bytes_on_disk(tmp_path)) == (1, False, 0)


class Killed(BaseException):
    """The process dies here: nothing after it runs."""


class MortalFiles(BlockFiles):
    """A directory whose writer dies at a chosen step, in `write_all` after a chosen number of bytes."""

    def __init__(self, directory, step, written_bytes=0):
        super().__init__(directory, fsync=True)
        self.step, self.written_bytes = step, written_bytes

    def open_temporary(self):
        """Dies after the file was made."""
        fd, path = super().open_temporary()
        if self.step == "open":
            os.close(fd)  # as the end of a process would
            raise Killed
        return fd, path

    def write_all(self, fd, data):
        """Dies part of the way."""
        if self.step == "write":
            os.write(fd, data[: self.written_bytes])
        self._perhaps_die("write")
        super().write_all(fd, data)

    def sync(self, fd):
        """Dies before the bytes are flushed."""
        self._perhaps_die("sync")
        super().sync(fd)

    def rename(self, temporary, path):
        """Dies just before or just after the name appears."""
        self._perhaps_die("before rename")
        super().rename(temporary, path)
        self._perhaps_die("after rename")

    def sync_directory(self, directory):
        """Dies before the name is flushed."""
        self._perhaps_die("sync directory")
        super().sync_directory(directory)

    def _perhaps_die(self, step):
        if step == self.step:
            raise Killed


KILL_POINTS = [
    ("open", 0, False),
    *(("write", written, False) for written in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, FILE_BYTES - 1, FILE_BYTES)),
    ("sync", 0, False),
    ("before rename", 0, False),
    ("after rename", 0, True),
    ("sync directory", 0, True),
]


@pytest.mark.parametrize(("step", "written", "survives"), KILL_POINTS)
def test_a_writer_may_die_at_any_step(tmp_path, step, written, survives):
    """After a restart the block is whole or absent, the others are untouched, and no leftover stays."""
    fill(open_tier(tmp_path), 1)
    dying = open_tier(tmp_path, files=MortalFiles(tmp_path, step, written))
    with pytest.raises(Killed):
        dying.write(key(2), payload(2))
    tier = open_tier(tmp_path)
    assert readable(tier, 1, 2) == ([1, 2] if survives else [1])
    assert bytes_on_disk(tmp_path) == tier.total_bytes
    assert tier.stats.temporaries == (not survives)
    assert (tier.stats.torn, tier.stats.corrupt, tier.stats.foreign) == (0, 0, 0)


def test_the_temporary_of_a_living_writer_stays(tmp_path):
    """Opening a directory does not take a file from under somebody who is writing it."""
    fd, path = BlockFiles(tmp_path).open_temporary()
    assert open_tier(tmp_path).stats.temporaries == 0
    os.close(fd)
    assert path.exists()
    assert open_tier(tmp_path).stats.temporaries == 1
    assert not path.exists()


def test_directories_that_cannot_be_used_are_refused(tmp_path):
    """A file in the way, or a bound below a header, is the operator's to mend."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="may write"):
        open_directory(tmp_path / "file")
    with pytest.raises(ConfigError, match="max_bytes"):
        DiskTier(BlockFiles(tmp_path), HEADER_BYTES, clock=ManualClock())


WRITER = """
    import sys, random
    from pathlib import Path
    from kvatlas.clock import SystemClock
    from kvatlas.prefix_cache.connectors import BlockFiles, DiskTier, synthetic_payload
    tier = DiskTier(BlockFiles(Path(sys.argv[1])), int(sys.argv[2]), clock=SystemClock())
    dice, wrong = random.Random(int(sys.argv[3])), 0
    for turn in range(int(sys.argv[4])):
        number = dice.randrange(60)
        key = bytes([number]) * 32 + bytes(4)
        if dice.random() < 0.5:
            tier.write(key, synthetic_payload(key, 100))
        else:
            found = tier.read(key)
            wrong += found is not None and found != synthetic_payload(key, 100)
        if turn == 50:
            print("under way", flush=True)
    s = tier.stats
    print(wrong, s.torn, s.corrupt, s.foreign, s.write_errors)
"""


def start_writer(directory, seed, turns):
    """A process that writes and reads blocks of the directory at random."""
    arguments = [str(directory), str(20 * FILE_BYTES), str(seed), str(turns)]
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), *arguments], stdout=subprocess.PIPE, text=True
    )


def test_processes_share_a_directory_and_may_be_killed(tmp_path):
    """Two hammer it while a third is killed in the middle: nobody reads anything wrong, the rest is whole."""
    workers = [start_writer(tmp_path, seed, 800) for seed in (1, 2)]
    victim = start_writer(tmp_path, 3, 10**9)
    assert victim.stdout.readline() == "under way\n"
    victim.kill()
    victim.communicate(timeout=30)
    for worker in workers:
        output, _ = worker.communicate(timeout=60)
        assert worker.returncode == 0
        assert output.splitlines()[-1] == "0 0 0 0 0"
    tier = open_tier(tmp_path, blocks=1000)
    assert readable(tier, *range(60)) == [number for number in range(60) if tier.contains(key(number))]
    assert (tier.stats.torn, tier.stats.corrupt, tier.stats.foreign) == (0, 0, 0)
    assert bytes_on_disk(tmp_path) == tier.total_bytes
