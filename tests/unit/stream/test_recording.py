"""Recordings: what is written is read again, and what is no recording is refused by line."""

import json

import pytest

from kvatlas.errors import EventDecodeError
from kvatlas.stream import (
    RecordedFrames,
    RecordedMetrics,
    RecordedRequest,
    RecordedReset,
    RecordingWriter,
    read_recording,
)

RECORDS = [
    RecordedMetrics(1, 1.5, ("vllm:num_preemptions_total 0.0",)),
    RecordedFrames(2, 2.5, b"kv-events", 7, b"\x93\x01\x90\xc0"),
    RecordedRequest(
        line=3,
        t_s=3.5,
        sent_s=3.0,
        status=200,
        prompt_token_ids=(1, 2, 3),
        cache_salt="tenant-0",
        prompt_tokens=3,
        cached_tokens=0,
        output_token_ids=(9,),
        body={"prompt": [1, 2, 3], "cache_salt": "tenant-0", "model": "tiny"},
    ),
    RecordedReset(4, 4.5, 200, success=True),
]


def test_what_is_written_is_read_again(tmp_path):
    """Every kind of record survives the file, in order."""
    path = tmp_path / "stream.jsonl"
    with RecordingWriter(path) as writer:
        for record in RECORDS:
            writer.write(record)
    assert list(read_recording(path)) == RECORDS


def test_writer_appends(tmp_path):
    """A second writer goes on where the first one stopped, and flush makes it readable at once."""
    path = tmp_path / "stream.jsonl"
    with RecordingWriter(path) as writer:
        writer.write(RECORDS[0])
    writer = RecordingWriter(path)
    writer.write(RECORDS[3])
    writer.flush()
    assert [record.line for record in read_recording(path)] == [1, 2]
    writer.close()
    writer.close()


@pytest.mark.parametrize("prompt", ["text", ["text"], [1, True], [[1]], None])
def test_prompts_that_are_not_token_ids(tmp_path, prompt):
    """A prompt in any other form stays in the body; a failed request reports nothing cached."""
    path = tmp_path / "stream.jsonl"
    request = RecordedRequest(1, 2.0, 1.0, 500, None, None, None, None, (), {"prompt": prompt})
    with RecordingWriter(path) as writer:
        writer.write(request)
    assert list(read_recording(path)) == [request]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "line 2"),
        ('{"kind": "video", "t": 1}', "video"),
        ('{"t": 1}', "kind"),
        ('{"kind": "reset", "t": "x", "status": 200}', "got `str`"),
        ('{"kind": "frames", "t": 1, "frames": ["?", "AAAAAAAAAAA=", ""]}', "line 2"),
        ('{"kind": "frames", "t": 1, "frames": ["\u00e9", "AAAAAAAAAAA=", ""]}', "line 2"),
        ('{"kind": "frames", "t": 1, "frames": ["", "AAA=", ""]}', "8-byte number"),
        ('{"kind": "frames", "t": 1, "frames": ["AAAAAAAAAAA=", ""]}', "8-byte number"),
    ],
)
def test_lines_that_are_no_records(tmp_path, line, word):
    """The error names the file, the line and what is wrong with it."""
    path = tmp_path / "stream.jsonl"
    path.write_text('{"kind": "reset", "t": 1, "status": 200}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(EventDecodeError, match=word) as caught:
        list(read_recording(path))
    assert str(path) in caught.value.message


@pytest.mark.parametrize(
    ("status", "text", "success"),
    [
        (200, '{"success":true}', True),
        (200, '{"success":false}', False),
        (200, "", True),
        (200, "<html>", False),
        (404, "", False),
    ],
)
def test_a_reset_succeeded_only_when_the_engine_says_so(tmp_path, status, text, success):
    """A busy engine refuses with status 200; an old one answers an empty 200."""
    path = tmp_path / "stream.jsonl"
    path.write_text(json.dumps({"kind": "reset", "t": 1, "status": status, "text": text}))
    assert list(read_recording(path)) == [RecordedReset(1, 1.0, status, success=success)]


def test_blank_lines_are_skipped(tmp_path):
    """An empty line is no record and no error; numbers still count it."""
    path = tmp_path / "stream.jsonl"
    path.write_text('\n{"kind": "reset", "t": 1, "status": 200}\n\n')
    assert list(read_recording(path)) == [RecordedReset(2, 1.0, 200, success=True)]
