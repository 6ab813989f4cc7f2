"""One life of a simulated engine: from an empty cache to its end, with its loops, its metrics and its HTTP port."""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from kvatlas.clock import Clock
from kvatlas.errors import ConfigError
from kvatlas.fleet import describe_failure
from kvatlas.prefix_cache.connector import KVConnector
from kvatlas.rendering import LocalRenderer
from kvatlas.simulator.config import EngineConfig
from kvatlas.simulator.core import EngineCore
from kvatlas.simulator.engine import SimulatedEngine
from kvatlas.simulator.metrics import EngineMetrics
from kvatlas.simulator.metrics_page import MetricsPage
from kvatlas.simulator.ranks import EngineRanks
from kvatlas.simulator.replies import ReplySampler
from kvatlas.simulator.server import EngineApi
from kvatlas.simulator.vocabulary import ReplyVocabulary
from kvatlas.stream import ZmqEventPublisher

__all__ = ["EngineLife", "EngineParts", "hold_port", "reset_connection"]

_CLOSE_GRACE_S = 1.0
_LINGER_OFF = struct.pack("ii", 1, 0)
"""Close without a word: the peer gets a reset."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What outlives a life.

    Args:
        config: sizes, rates, endpoints.
        renderer: prompts to tokens.
        vocabulary: tokens to text.
        sampler: makes the replies.
        publishers: one for each rank, None = events are off.
        clock: the engine's.
        sleep: waits real seconds, longer while the engine hangs.
        on_piece: see `EngineApi`.
    """

    config: EngineConfig
    renderer: LocalRenderer
    vocabulary: ReplyVocabulary
    sampler: ReplySampler
    publishers: Sequence[ZmqEventPublisher | None]
    clock: Clock
    sleep: Callable[[float], Awaitable[None]]
    on_piece: Callable[[web.Request, int], None]


class EngineLife:
    """Engines with empty caches, running; they serve once `listen` was called.

    Args:
        parts: what it is made of.
        started_s: wall time of its start, as shown to clients.
    """

    def __init__(self, parts: EngineParts, started_s: float) -> None:
        config = parts.config
        page = MetricsPage(config)
        page.set_start(started_s)
        engines = []
        all_metrics = []
        for rank, publisher in enumerate(parts.publishers):
            core = EngineCore(config, parts.sampler, connector=_make_connector(config, parts.clock), rank=rank)
            metrics = EngineMetrics(config, core.scheduler, page, rank)
            engine = SimulatedEngine(core, metrics, publisher=publisher, clock=parts.clock, sleep=parts.sleep)
            engines.append(engine)
            all_metrics.append(metrics)
        self._config = config
        self.ranks = EngineRanks(config, engines, all_metrics, page)
        """The engines."""
        api = EngineApi(
            config,
            self.ranks,
            page,
            parts.renderer,
            parts.vocabulary,
            parts.clock,
            started_s=started_s,
            on_piece=parts.on_piece,
        )
        for rank, publisher in enumerate(parts.publishers):
            if publisher is not None:
                api.announce_events(rank, publisher.endpoint, publisher.replay_endpoint)
        self.application = api.application()
        """Routes may be added until `listen`."""
        for engine in engines:
            engine.start()
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None

    async def listen(self, port: int) -> int:
        """Begin to serve. Returns the port, a free one when 0 was asked for.

        Raises:
            ConfigError: it cannot be bound.
        """
        # handler_cancellation: a client that hangs up cancels its handler, and that drops its requests.
        self._runner = web.AppRunner(
            self.application, access_log=None, handler_cancellation=True, shutdown_timeout=_CLOSE_GRACE_S
        )
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, self._config.host, port, backlog=1024)
        try:
            await self._site.start()
        except OSError as error:
            raise _cannot_listen(self._config.host, port, error) from None
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """End in order: no new connections, open ones have a moment, then the loops stop."""
        if self._runner is not None:
            await self._runner.cleanup()
        for engine in self.ranks.engines:
            await engine.close()

    async def end(self, *, with_reset: bool) -> None:
        """End as a process does that is killed: all connections break, by a reset or by an end of data."""
        for engine in self.ranks.engines:
            await engine.close()
        if self._site is not None:
            await self._site.stop()
        if self._runner is not None and self._runner.server is not None:
            for connection in self._runner.server.connections:
                if connection.transport is not None:
                    if with_reset:
                        reset_connection(connection.transport)
                    else:
                        connection.transport.abort()
        await self.close()


def reset_connection(transport: asyncio.BaseTransport) -> None:
    """Break a TCP connection so that the peer gets a reset. What was not sent yet is lost."""
    connection = transport.get_extra_info("socket")
    if connection is not None and not transport.is_closing():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_OFF)
    if isinstance(transport, asyncio.WriteTransport):
        transport.abort()


def hold_port(host: str, port: int) -> socket.socket:
    """Take a port (0 = a free one) without listening: connections to it are refused until somebody listens.

    Raises:
        ConfigError: it cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        held = socket.socket(family, kind, protocol)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
    except OSError as error:
        raise _cannot_listen(host, port, error) from None
    return held


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {host}:{port}: {describe_failure(error)}; choose another port, or 0")


def _make_connector(config: EngineConfig, clock: Clock) -> KVConnector | None:
    if config.connector is None:
        return None
    from kvatlas.simulator.kv_connector import build_connector  # noqa: PLC0415 - most engines start without it

    return build_connector(config, clock)
