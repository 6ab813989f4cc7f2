"""The journal: what it keeps through crashes, what it refuses, and what it replaces."""

import os
import shutil

import pytest

from kvatlas.errors import ConfigError, IndexStateError
from kvatlas.stream import Journal

SOURCE = "tcp://127.0.0.1:5557"


def opened(folder, **options):
    return Journal(folder, SOURCE, **options)


def filled(folder, payloads, **options):
    with opened(folder, **options) as journal:
        for number, payload in enumerate(payloads):
            journal.append(number, number, payload)


def content(journal, seq=0):
    return [(record.seq, record.engine_seq, record.payload) for record in journal.read_from(seq)]


def files(folder):
    return sorted(path for path in folder.iterdir() if path.name.endswith(".kvj"))


def test_what_was_appended_is_there_after_opening_again(tmp_path):
    """Numbers, the engine's numbers and bytes survive, the next number follows."""
    filled(tmp_path, [b"one", b"", b"three"])
    with opened(tmp_path) as journal:
        assert content(journal) == [(0, 0, b"one"), (1, 1, b""), (2, 2, b"three")]
        assert journal.next_seq == 3
        assert journal.last_of_engine.payload == b"three"


def test_nothing_waits_in_the_process(tmp_path):
    """A batch is with the operating system when `append` returns: a copy of the files has it, unflushed."""
    journal = opened(tmp_path / "live")
    journal.append(0, 0, b"payload")
    shutil.copytree(tmp_path / "live", tmp_path / "copy")
    with opened(tmp_path / "copy") as copied:
        assert content(copied) == [(0, 0, b"payload")]
    journal.close()


@pytest.mark.parametrize("payload", [b"", b"last batch of the stream"])
def test_a_tail_torn_at_any_byte_is_cut_and_written_over(tmp_path, payload):
    """However much of the last record reached the disk, it is gone, the ones before are there, and writing goes on."""
    filled(tmp_path / "whole", [b"first", b"second"])
    start = files(tmp_path / "whole")[0].stat().st_size
    with opened(tmp_path / "whole") as journal:
        journal.append(2, 2, payload)
    whole = files(tmp_path / "whole")[0].read_bytes()
    assert len(whole) > start
    for length in range(start, len(whole)):
        folder = tmp_path / f"torn{length}"
        folder.mkdir()
        (folder / files(tmp_path / "whole")[0].name).write_bytes(whole[:length])
        with opened(folder) as journal:
            assert content(journal) == [(0, 0, b"first"), (1, 1, b"second")]
            assert journal.cut_bytes == length - start
            journal.append(2, 2, b"again")
        with opened(folder) as journal:
            assert content(journal)[-1] == (2, 2, b"again")
            assert journal.cut_bytes == 0


def test_every_single_damaged_byte_of_the_last_record_is_noticed(tmp_path):
    """A flipped byte in length, checksum, numbers or payload never yields another record."""
    filled(tmp_path / "whole", [b"first"])
    start = files(tmp_path / "whole")[0].stat().st_size
    with opened(tmp_path / "whole") as journal:
        journal.append(1, 1, b"second")
    name = files(tmp_path / "whole")[0].name
    whole = (tmp_path / "whole" / name).read_bytes()
    for place in range(start, len(whole)):
        folder = tmp_path / f"flipped{place}"
        folder.mkdir()
        damaged = bytearray(whole)
        damaged[place] ^= 0x5A
        (folder / name).write_bytes(damaged)
        with opened(folder) as journal:
            assert content(journal) == [(0, 0, b"first")]


def test_a_tail_of_zeros_is_cut(tmp_path):
    """Blocks a file system allotted and never filled are no records."""
    filled(tmp_path, [b"first"])
    with files(tmp_path)[0].open("ab") as file:
        file.write(bytes(4096))
    with opened(tmp_path) as journal:
        assert content(journal) == [(0, 0, b"first")]
        assert journal.cut_bytes == 4096


def test_damage_in_a_sealed_file_shows_as_missing_numbers(tmp_path):
    """What lies behind the damage in its file is missing, later files are kept, nothing is renumbered."""
    filled(tmp_path, [b"x" * 100] * 9, segment_bytes=300)
    first, second, *_ = files(tmp_path)
    data = bytearray(first.read_bytes())
    data[-130] ^= 1  # in the record before the file's last one
    first.write_bytes(data)
    with opened(tmp_path, segment_bytes=300) as journal:
        assert journal.damaged_segments == 1
        numbers = [seq for seq, _, _ in content(journal)]
        assert numbers[-1] == 8
        missing = sorted(set(range(9)) - set(numbers))
        assert missing
        assert missing == list(range(missing[0], missing[-1] + 1))
        assert journal.next_seq == 9
    assert second.exists()


def test_a_missing_file_shows_as_missing_numbers(tmp_path):
    """Somebody deleted a file: its numbers are missing, the others keep theirs."""
    filled(tmp_path, [b"x" * 100] * 9, segment_bytes=300)
    files(tmp_path)[1].unlink()
    with opened(tmp_path, segment_bytes=300) as journal:
        numbers = [seq for seq, _, _ in content(journal)]
        assert numbers[0] == 0
        assert numbers[-1] == 8
        assert len(numbers) < 9


@pytest.mark.parametrize("data", [b"", b"hello", b"x" * 4096])
def test_a_foreign_file_is_refused(tmp_path, data):
    """A file of that name with other content stops the start, is named in the message, and is not touched."""
    path = tmp_path / "0000000001-000000.kvj"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"0000000001-000000\.kvj is not a file of a kvatlas journal"):
        opened(tmp_path)
    assert path.read_bytes() == data


def test_a_damaged_header_and_a_newer_format_are_refused(tmp_path):
    """Neither is guessed at: the message says which it is."""
    filled(tmp_path, [b"x"])
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:8] + b"\x07" + whole[9:])
    with pytest.raises(ConfigError, match="journal format 7, this kvatlas reads 1"):
        opened(tmp_path)
    path.write_bytes(whole[:12] + b"\xff" + whole[13:])
    with pytest.raises(ConfigError, match="damaged header"):
        opened(tmp_path)


def test_another_streams_journal_is_refused(tmp_path):
    """Two engines' streams never mix in one folder."""
    filled(tmp_path, [b"x"])
    with pytest.raises(ConfigError, match=r"holds the journal of tcp://127\.0\.0\.1:5557, not of tcp://other:1"):
        Journal(tmp_path, "tcp://other:1")
    with opened(tmp_path) as journal:
        assert content(journal) == [(0, 0, b"x")]


def test_a_folder_serves_one_journal_at_a_time(tmp_path):
    """A second keeper on the same folder is refused while the first one runs."""
    with opened(tmp_path), pytest.raises(ConfigError, match="in use by another keeper"):
        opened(tmp_path)
    opened(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    """The message names folder and reason."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot keep a journal in"):
        opened(tmp_path / "file" / "folder")


def test_reading_from_any_number_across_files(tmp_path):
    """Reading starts at the number asked for, whichever file it is in, and passes holes."""
    numbers = [number for number in range(1000) if not 400 <= number < 420]
    with opened(tmp_path, segment_bytes=4096) as journal:
        for number in numbers:
            journal.append(number, number, b"p%d" % number)
        assert len(files(tmp_path)) > 3
        for start in (0, 1, 127, 128, 399, 400, 410, 420, 998, 999, 1000, 5000):
            assert [seq for seq, _, _ in content(journal, start)] == [each for each in numbers if each >= start]
    with opened(tmp_path, segment_bytes=4096) as journal:
        assert [seq for seq, _, _ in content(journal, 300)] == [each for each in numbers if each >= 300]


def test_a_reader_gets_what_is_appended_while_it_reads(tmp_path):
    """Reading ends at the newest batch there is then, also in a file that was begun meanwhile."""
    with opened(tmp_path, segment_bytes=200) as journal:
        journal.append(0, 0, b"x" * 150)
        reading = journal.read_from(0)
        seen = [next(reading).seq]
        for number in range(1, 6):
            journal.append(number, number, b"x" * 150)
        seen += [record.seq for record in reading]
        assert seen == [0, 1, 2, 3, 4, 5]


def test_a_new_life_takes_the_place_of_the_old_one(tmp_path):
    """Numbers start again, old files go, a reader of the old life ends."""
    with opened(tmp_path, segment_bytes=100) as journal:
        for number in range(5):
            journal.append(number, number, b"x" * 90)
        reading = journal.read_from(0)
        next(reading)
        journal.begin_life()
        assert list(reading) == []
        assert (journal.life, journal.next_seq, content(journal)) == (2, 0, [])
        assert journal.last_of_engine is None
        journal.append(0, 0, b"new")
    assert len(files(tmp_path)) == 1
    with opened(tmp_path) as journal:
        assert (journal.life, content(journal)) == (2, [(0, 0, b"new")])


def test_a_successor_counts_only_when_it_is_whole(tmp_path):
    """A crash before `adopt` leaves the old life, a crash right after it the new one, whatever files lie around."""
    with opened(tmp_path) as journal:
        journal.append(0, 0, b"old")
        target = journal.successor()
        target.append(0, -1, b"compacted")
        target.sync()
        old = files(tmp_path)[0]
        kept = old.read_bytes()
    assert list(tmp_path.glob("*.tmp"))
    with opened(tmp_path) as journal:
        assert content(journal) == [(0, 0, b"old")]
        assert not list(tmp_path.glob("*.tmp"))
        target = journal.successor()
        target.append(0, -1, b"compacted")
        journal.adopt(target)
    old.write_bytes(kept)  # as if the crash came before the old file was deleted
    with opened(tmp_path) as journal:
        assert content(journal) == [(0, -1, b"compacted")]
    assert not old.exists()


def test_numbers_must_rise(tmp_path):
    """A number that was used, or skipped, is refused."""
    with opened(tmp_path) as journal:
        journal.append(5, 5, b"x")
        for number in (5, 4, 0):
            with pytest.raises(IndexStateError, match="the next number is 6 or above"):
                journal.append(number, 6, b"y")


def test_a_write_that_fails_leaves_the_journal_as_it_was(tmp_path, monkeypatch):
    """A full disk takes half a record: the half is taken back, and the next batch is whole."""
    with opened(tmp_path) as journal:
        journal.append(0, 0, b"first")
        real, calls = os.pwrite, []

        def full(handle, data, offset):
            calls.append(offset)
            if len(calls) > 1:
                raise OSError(28, "No space left on device")
            return real(handle, data[:10], offset)

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            journal.append(1, 1, b"second")
        monkeypatch.undo()
        journal.append(1, 1, b"again")
    with opened(tmp_path) as journal:
        assert journal.cut_bytes == 0
        assert content(journal) == [(0, 0, b"first"), (1, 1, b"again")]
