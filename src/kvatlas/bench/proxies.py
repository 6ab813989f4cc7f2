"""The proxies of the gateway benchmark, one per process: ours with a planner of choice, and the peers.

A planner is named `module:callable`; that is called with the targets, inside the running loop, and may return an
awaitable.
"""

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import cast

import aiohttp
import msgspec
from aiohttp import web

from kvatlas.bench.processes import Ready
from kvatlas.clock import SystemClock
from kvatlas.errors import ConfigError
from kvatlas.gateway import GatewayConfig, GatewayServer, Planner, Target, event_loop_factory

__all__ = ["PEERS", "main", "planner_factory", "serve_aiohttp", "serve_gateway"]

PlannerFactory = Callable[[tuple[Target, ...]], Planner | Awaitable[Planner]]
_HOP_BY_HOP = frozenset(("connection", "content-length", "host", "keep-alive", "transfer-encoding"))


def planner_factory(name: str) -> PlannerFactory:
    """The planner factory called `module:callable`.

    Raises:
        ConfigError: there is no such module or callable.
    """
    module_name, separator, attribute = name.partition(":")
    try:
        factory = getattr(import_module(module_name), attribute) if separator else None
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"planner {name!r} cannot be loaded: {error}") from error
    if not callable(factory):
        raise ConfigError(f"planner {name!r} is not usable: expected 'module:callable' that takes a tuple of targets")
    return cast("PlannerFactory", factory)


async def serve_gateway(backend_port: int, planner_name: str) -> int:
    """Start our gateway and return its port."""
    planner = planner_factory(planner_name)((Target("w1", "127.0.0.1", backend_port),))
    if inspect.isawaitable(planner):
        planner = await planner
    return await GatewayServer(GatewayConfig(port=0), planner, SystemClock()).start()


async def serve_aiohttp(backend_port: int) -> int:
    """Start a plain pass-through proxy made of aiohttp's server and client, and return its port."""
    session = aiohttp.ClientSession(
        f"http://127.0.0.1:{backend_port}", connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
    )

    async def forward(request: web.Request) -> web.StreamResponse:
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP]
        body = await request.read()
        async with session.request(request.method, request.rel_url, headers=headers, data=body) as upstream:
            kept = [(name, value) for name, value in upstream.headers.items() if name.lower() not in _HOP_BY_HOP]
            if upstream.content_length is not None:
                return web.Response(status=upstream.status, headers=dict(kept), body=await upstream.read())
            response = web.StreamResponse(status=upstream.status, headers=dict(kept))
            await response.prepare(request)
            async for data in upstream.content.iter_any():
                await response.write(data)
            await response.write_eof()
            return response

    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{tail:.*}", forward)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port: int = runner.addresses[0][1]
    return port


PEERS: dict[str, Callable[[int], Awaitable[int]]] = {"aiohttp": serve_aiohttp}


async def _serve(name: str, backend_port: int, planner_name: str) -> None:
    port = await (serve_gateway(backend_port, planner_name) if name == "kvatlas" else PEERS[name](backend_port))
    sys.stdout.write(msgspec.json.encode(Ready(port)).decode() + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def main() -> None:
    """Entry of the process: NAME, BACKEND_PORT, PLANNER; prints its port and serves until it is stopped."""
    name, backend_port, planner_name = sys.argv[1:]
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(_serve(name, int(backend_port), planner_name))
