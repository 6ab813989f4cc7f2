"""Reads `usage` from the end of a response that was passed through unread.

Only the last kilobytes of a response are kept, so this works on a fragment: it looks for the last `"usage"` key and
decodes the one object behind it. The same code serves JSON and SSE, and both with chunked framing in between. Text made
by a model cannot be mistaken for it, because inside a JSON string the quotes around `usage` would be escaped.
"""

import re

import msgspec

__all__ = ["NO_USAGE", "Usage", "parse_usage"]

_KEY = b'"usage"'
_MAX_KEYS = 8
_MAX_OBJECT_BYTES = 4096
_OBJECT = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')  # one level of nested objects
_CHUNK_EDGE = re.compile(rb"\r\n[0-9A-Fa-f]{1,8}\r\n")


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Token counts an engine reported; None where it said nothing."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


NO_USAGE = Usage()


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _WireUsage(msgspec.Struct):
    """Chat and completions say prompt/completion, the responses API says input/output."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None


_decode = msgspec.json.Decoder(_WireUsage).decode


def parse_usage(tail: bytes | bytearray) -> Usage:
    """Token counts from the last bytes of a response body; `NO_USAGE` when there are none to be found.

    Never raises: a response without usage, cut short, compressed or not JSON is simply silent. Cost: about 1.5 us.
    """
    if tail.endswith(b"0\r\n\r\n"):  # a chunked body: an edge may fall anywhere
        tail = _CHUNK_EDGE.sub(b"", tail)
    at = tail.rfind(_KEY)
    for _ in range(_MAX_KEYS):
        if at < 0:
            break
        found = _OBJECT.match(tail, at, at + _MAX_OBJECT_BYTES)
        if found is not None:
            return _decoded(found[1])
        at = tail.rfind(_KEY, 0, at)
    return NO_USAGE


def _decoded(text: bytes) -> Usage:
    try:
        wire = _decode(text)
    except msgspec.DecodeError:
        return NO_USAGE
    details = wire.prompt_tokens_details or wire.input_tokens_details
    return Usage(
        wire.input_tokens if wire.prompt_tokens is None else wire.prompt_tokens,
        wire.output_tokens if wire.completion_tokens is None else wire.completion_tokens,
        None if details is None else details.cached_tokens,
    )
