"""Answers the gateway makes itself: errors in one shape, and the two health endpoints. Bytes only, no I/O."""

from http import HTTPStatus

import msgspec

from kvatlas.errors import KvAtlasError, error_type

__all__ = ["CONTINUE", "error_body", "error_response", "json_response"]

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class _ErrorBody(msgspec.Struct):
    message: str
    type: str
    code: str


class _ErrorEnvelope(msgspec.Struct):
    error: _ErrorBody


_encode = msgspec.json.Encoder().encode


def error_body(status: int, code: str, message: str) -> bytes:
    """The JSON of an error answer: the one shape of gateway and admin port."""
    return _encode(_ErrorEnvelope(_ErrorBody(message, error_type(status), code)))


def error_response(error: Exception, request_id: str | None, *, close: bool, head_only: bool = False) -> bytes:
    """The whole answer for an error.

    A `KvAtlasError` speaks for itself; anything else is a 500 that does not show its text to the client.
    """
    if isinstance(error, KvAtlasError):
        status, code, message = error.http_status, error.code, error.message
    else:
        status, code = KvAtlasError.http_status, KvAtlasError.code
        message = "the gateway failed on this request; its log has the details under the same request id"
    body = error_body(status, code, message)
    return json_response(status, body, request_id, close=close, head_only=head_only)


def json_response(status: int, body: bytes, request_id: str | None, *, close: bool, head_only: bool = False) -> bytes:
    """A whole JSON response with framing, ready to be written."""
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    if request_id is not None:
        lines.append(f"x-request-id: {request_id}")
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        lines.append("retry-after: 1")
    if close:
        lines.append("connection: close")
    head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
    return head if head_only else head + body
