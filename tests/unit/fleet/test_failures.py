"""Failures of HTTP calls in an operator's words."""

import errno
import socket

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from kvatlas.fleet import describe_failure

KEY = ConnectionKey("127.0.0.1", 18100, False, True, None, None, None)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            aiohttp.ClientConnectorError(KEY, OSError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 18100)")),
            "connection refused (127.0.0.1:18100)",
        ),
        (aiohttp.ClientConnectorError(KEY, OSError("Multiple exceptions: ...")), "no connection (127.0.0.1:18100)"),
        (
            aiohttp.ClientConnectorError(KEY, socket.gaierror(-2, "Name or service not known")),
            "the name 127.0.0.1 cannot be resolved",
        ),
        (TimeoutError(), "no answer in time"),
        (aiohttp.ServerTimeoutError(), "no answer in time"),
        (aiohttp.ServerDisconnectedError(), "the connection was closed before an answer"),
        (aiohttp.ClientPayloadError("<TransferEncodingError: 400>"), "the answer ended early"),
        (aiohttp.ClientOSError(errno.ECONNRESET, "Connection reset by peer"), "connection reset by peer"),
        (OSError(errno.EADDRINUSE, "error while attempting to bind on address"), "address already in use"),
        (ValueError("/metrics is too large"), "ValueError: /metrics is too large"),
    ],
)
def test_failures_are_told_without_the_library(error: Exception, text: str) -> None:
    """Neither class names of the HTTP library nor its lists of attempts reach a person."""
    assert describe_failure(error) == text
