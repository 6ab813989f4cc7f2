"""Recordings of an engine: the raw frames of its event stream between the requests that caused them.

One JSON object a line, in the order of arrival; `kind` tells which. Times are seconds since the Unix epoch on the
recorder's machine.

Source: tests/vectors/streams (samples), recorded from vLLM 0.32.0.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeAlias

import msgspec

from kvatlas.errors import EventDecodeError
from kvatlas.stream.replay_channel import split_frames

__all__ = [
    "Record",
    "RecordedFrames",
    "RecordedMetrics",
    "RecordedRequest",
    "RecordedReset",
    "RecordingWriter",
    "read_recording",
]


@dataclass(frozen=True, slots=True)
class RecordedFrames:
    """One message of the event stream. `line` counts from 1."""

    line: int
    t_s: float
    topic: bytes
    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request, written when its response arrived at `t_s`; it was sent at `sent_s`.

    `prompt_token_ids` is None when the prompt was not given as token ids. `cached_tokens` is what the engine
    reported; None when it did not. `body` is the JSON object that was sent.
    """

    line: int
    t_s: float
    sent_s: float
    status: int
    prompt_token_ids: tuple[int, ...] | None
    cache_salt: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_token_ids: tuple[int, ...]
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedReset:
    """The engine was told to reset its prefix cache. `success` is its word: a busy engine says no, with status 200."""

    line: int
    t_s: float
    status: int
    success: bool


@dataclass(frozen=True, slots=True)
class RecordedMetrics:
    """Some lines of the engine's metrics page."""

    line: int
    t_s: float
    text: tuple[str, ...]


Record: TypeAlias = RecordedFrames | RecordedRequest | RecordedReset | RecordedMetrics


class _FramesLine(msgspec.Struct, tag_field="kind", tag="frames"):
    t: float
    frames: list[str]


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _RequestLine(msgspec.Struct, tag_field="kind", tag="request"):
    t: float
    sent: float
    body: dict[str, Any]
    status: int
    usage: _Usage | None = None
    token_ids: list[int] | None = None


class _ResetAnswer(msgspec.Struct):
    success: bool = False


class _ResetLine(msgspec.Struct, tag_field="kind", tag="reset"):
    t: float
    status: int
    text: str = ""


class _MetricsLine(msgspec.Struct, tag_field="kind", tag="metrics"):
    t: float
    text: list[str]


_Line: TypeAlias = _FramesLine | _RequestLine | _ResetLine | _MetricsLine
_decode_line = msgspec.json.Decoder(_Line).decode
_HTTP_OK = 200
_encode_line = msgspec.json.Encoder().encode


def read_recording(path: Path | str) -> Iterator[Record]:
    """The records of a file, one at a time.

    Raises:
        EventDecodeError: a line is not a record; the message names file and line.
        OSError: the file cannot be read.
    """
    with Path(path).open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                record = _to_record(_decode_line(text), number)
            except (ValueError, RecursionError) as error:
                raise EventDecodeError(
                    f"{path}, line {number} is not a record of an event recording: {error}"
                ) from error
            if record is None:
                raise EventDecodeError(f"{path}, line {number}: expected frames [topic, 8-byte number, batch]")
            yield record


class RecordingWriter:
    """Appends records to a file for `read_recording`; usable as a context manager. Their `line` is not written."""

    def __init__(self, path: Path | str) -> None:
        self._file: BinaryIO = Path(path).open("ab")  # noqa: SIM115 - closed by close()

    def write(self, record: Record) -> None:
        """Append one record as one line."""
        self._file.write(_encode_line(_to_line(record)) + b"\n")

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _to_record(line: _Line, number: int) -> Record | None:
    if isinstance(line, _FramesLine):
        frames = [base64.b64decode(frame, validate=True) for frame in line.frames]
        message = split_frames(frames)
        if message is None or len(frames) != 3:
            return None
        return RecordedFrames(number, line.t, frames[0], *message)
    if isinstance(line, _RequestLine):
        prompt, salt = line.body.get("prompt"), line.body.get("cache_salt")
        is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        usage = line.usage or _Usage()
        return RecordedRequest(
            line=number,
            t_s=line.t,
            sent_s=line.sent,
            status=line.status,
            prompt_token_ids=tuple(prompt or ()) if is_ids else None,
            cache_salt=salt if isinstance(salt, str) else None,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None,
            output_token_ids=tuple(line.token_ids or ()),
            body=line.body,
        )
    if isinstance(line, _ResetLine):
        return RecordedReset(number, line.t, line.status, success=_reset_succeeded(line))
    return RecordedMetrics(number, line.t, tuple(line.text))


def _reset_succeeded(line: _ResetLine) -> bool:
    """Whether the answer's body says so; an engine that answers nothing (old vLLM) says it with its status."""
    if line.status != _HTTP_OK:
        return False
    try:
        return not line.text or msgspec.json.decode(line.text, type=_ResetAnswer).success
    except msgspec.DecodeError:
        return False


def _to_line(record: Record) -> _Line:
    if isinstance(record, RecordedFrames):
        frames = (record.topic, record.seq.to_bytes(8, "big"), record.payload)
        return _FramesLine(t=record.t_s, frames=[base64.b64encode(frame).decode() for frame in frames])
    if isinstance(record, RecordedRequest):
        details = None if record.cached_tokens is None else _PromptDetails(record.cached_tokens)
        return _RequestLine(
            t=record.t_s,
            sent=record.sent_s,
            body=record.body,
            status=record.status,
            usage=_Usage(record.prompt_tokens, details),
            token_ids=list(record.output_token_ids),
        )
    if isinstance(record, RecordedReset):
        answer = msgspec.json.encode(_ResetAnswer(record.success)).decode()
        return _ResetLine(t=record.t_s, status=record.status, text=answer)
    return _MetricsLine(t=record.t_s, text=list(record.text))
