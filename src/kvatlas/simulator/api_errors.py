"""Errors as a vLLM server words them: `{"error": {"message", "type", "param", "code"}}`.

A body that cannot be read is typed with the HTTP phrase ("Bad Request"), a request the engine refuses with an
exception's name ("BadRequestError"). Source: vLLM 0.32 `entrypoints/openai` (exception handlers,
`create_error_response`).
"""

from http import HTTPStatus

import msgspec
from aiohttp import web

from kvatlas.errors import KvAtlasError, ModelNotFound

__all__ = ["engine_error", "http_error", "invalid_body", "json_response"]

_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError", 503: "ServiceUnavailableError"}


def invalid_body(error: KvAtlasError) -> web.Response:
    """The body is not JSON or has a field of the wrong shape."""
    return _response(error.message, HTTPStatus.BAD_REQUEST.phrase, None, HTTPStatus.BAD_REQUEST)


def engine_error(error: KvAtlasError) -> web.Response:
    """The engine refuses or fails a request it understood."""
    status = error.http_status
    param = "model" if isinstance(error, ModelNotFound) else None
    return _response(error.message, _TYPES.get(status, HTTPStatus(status).phrase), param, status)


def http_error(status: int) -> web.Response:
    """No such route, method not allowed, body too large."""
    phrase = HTTPStatus(status).phrase
    return _response(phrase, phrase, None, status)


def _response(message: str, error_type: str, param: str | None, status: int) -> web.Response:
    body = {"error": {"message": message, "type": error_type, "param": param, "code": int(status)}}
    return json_response(body, status)


def json_response(value: object, status: int = 200) -> web.Response:
    """A response whose body is JSON."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
