"""What commands ask of a running gateway's admin port, and how they fail when it is not there."""

import asyncio
import re
from typing import TypeVar

import aiohttp
import click
import msgspec

from kvatlas.errors import ConfigError, KvAtlasError, UpstreamConnectError, UpstreamError
from kvatlas.fleet import describe_failure

__all__ = ["admin_option", "ask_admin", "check_admin_url"]

_HINT = "is --admin the admin port of a kvatlas gateway (9090 unless set), not the gateway's own?"
_TIMEOUT_S = 30.0
Answer = TypeVar("Answer")

admin_option = click.option(
    "--admin", default="http://127.0.0.1:9090", show_default=True, help="Admin URL of the gateway."
)
"""The option all such commands share."""


class _ErrorBody(msgspec.Struct):
    message: str
    code: str | int | None = None


class _Error(msgspec.Struct):
    error: _ErrorBody


def ask_admin(admin: str, path: str, answer: type[Answer], *, question: object = None) -> Answer:
    """GET `path`, or POST a question to it, and decode the answer.

    Raises:
        ConfigError: the admin URL is none.
        UpstreamConnectError: nobody answers there.
        UpstreamError: what answers is not a gateway's admin app.
        KvAtlasError: the admin app refuses the question.
    """
    check_admin_url(admin)
    base = admin.rstrip("/")
    status, body = asyncio.run(_call(base, path, question))
    url = base + path
    try:
        if status == 200:
            return msgspec.json.decode(body, type=answer)
        error = msgspec.json.decode(body, type=_Error).error
    except msgspec.DecodeError as fault:
        raise UpstreamError(f"{url} answered {status} with something that is not ours: {_HINT}") from fault
    if status == 400 and error.code in {"bad_request", "hashing_error"}:
        raise KvAtlasError(f"{url} refused the question: {error.message}")
    # The admin app knows every path that is asked here: what does not is another server.
    raise UpstreamError(f"{url} answered {status}: {_HINT} It said: {error.message}")


def check_admin_url(admin: str) -> None:
    """Refuse what is no URL.

    Raises:
        ConfigError: http:// is missing.
    """
    if not re.match(r"https?://", admin):
        raise ConfigError(f"--admin {admin!r} is not a URL: http:// is missing, try --admin http://{admin}")


async def _call(base: str, path: str, question: object) -> tuple[int, bytes]:
    method = "GET" if question is None else "POST"
    data = None if question is None else msgspec.json.encode(question)
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session,
            session.request(method, base + path, data=data) as response,
        ):
            return response.status, await response.read()
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise UpstreamConnectError(
            f"cannot reach the admin app at {base}: {describe_failure(error)}; is the gateway running? And {_HINT}"
        ) from error
