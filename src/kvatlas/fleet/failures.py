"""What went wrong with an HTTP call, in the words of an operator rather than of the HTTP library."""

import os
import socket

import aiohttp

__all__ = ["describe_failure"]


def describe_failure(error: BaseException) -> str:
    """One short phrase, e.g. `connection refused (127.0.0.1:8000)`. Says the address where the library tells it."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorError):
        where = f"{error.host}:{error.port}"
        if isinstance(error.os_error, socket.gaierror):
            return f"the name {error.host} cannot be resolved"
        return f"{_system_text(error.os_error) or 'no connection'} ({where})"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the connection was closed before an answer"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the answer ended early"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"the answer is not HTTP: {error.message}".splitlines()[0]
    if isinstance(error, aiohttp.InvalidURL):
        return f"{error.url} is not a URL that can be called"
    if isinstance(error, OSError):
        return _system_text(error) or str(error) or type(error).__name__
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _system_text(error: OSError) -> str:
    """The system's own text for an error number: libraries put addresses and lists of attempts into theirs."""
    return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else ""
