"""The whole gateway in one process: built from its configuration, started, drained and stopped in order."""

import asyncio
import contextlib
import logging
import secrets
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

from kvatlas import __version__
from kvatlas.admin import AdminState, make_admin_app
from kvatlas.clock import SystemClock
from kvatlas.config import ServeConfig
from kvatlas.errors import ConfigError
from kvatlas.fleet import Fleet, SnapshotKeeper, describe_failure, find_warm_start, fleet_snapshot
from kvatlas.gateway import GatewayConfig, GatewayServer, Timeouts
from kvatlas.gateway.fleet_planner import FleetPlanner
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex
from kvatlas.rendering import LocalRenderer
from kvatlas.routing import DecisionLog, Picker, make_policy

__all__ = ["Service"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the service listens, free ports resolved."""

    gateway: int
    admin: int


class Service:
    """A gateway over a fleet, with its admin app.

    Args:
        config: checked settings.

    Raises:
        ConfigError: a tokenizer cannot be loaded, or the policy is unknown.
    """

    def __init__(self, config: ServeConfig) -> None:
        if config.full_report_share and any(worker.copy_mode != "set" for worker in config.workers):
            raise ConfigError(
                f"full_report_share is {config.full_report_share}, but not every worker has copy_mode=set: a report "
                "would count as further copies there. Give copy_mode=set with each worker, or leave the share out"
            )
        self._config = config
        self._clock = SystemClock()
        self._renderers = {
            model: LocalRenderer.load(source, clock=self._clock) for model, source in config.tokenizers.items()
        }
        seed = secrets.randbits(63) if config.seed is None else config.seed
        self._policy = make_policy(config.policy, seed=seed)
        self._hasher = BlockKeyHasher(seed)
        self._fleet: Fleet | None = None
        self._keeper: SnapshotKeeper | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._server: GatewayServer | None = None
        self._admin: web.AppRunner | None = None
        self._hurried = asyncio.Event()

    async def start(self) -> Ports:
        """Bring up workers, admin app and gateway, in this order.

        Raises:
            ConfigError: a port cannot be bound, a worker is given twice, or there is no folder for snapshots.
        """
        config = self._config
        _log.info("kvatlas %s starts: policy %s, %d workers", __version__, config.policy, len(config.workers))
        warm_start = await find_warm_start(config, self._clock)
        hasher = self._hasher if warm_start is None else BlockKeyHasher(warm_start.seed)
        index = PrefixIndex(hasher, max_bytes=config.index_max_bytes)
        fleet = self._fleet = Fleet(config, index, self._clock, warm_start=warm_start)
        keeper = self._make_keeper(fleet, index)
        await fleet.start()
        self._log_workers(fleet)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        log = DecisionLog(config.decision_log_size)
        planner = FleetPlanner(
            fleet,
            index,
            Picker(self._policy, self._clock, log),
            log,
            renderers=self._renderers,
            session=self._session,
            config=config,
        )
        timeouts = Timeouts(
            connect_s=config.connect_timeout_s, first_byte_s=config.first_byte_timeout_s, idle_s=config.idle_timeout_s
        )
        server_config = GatewayConfig(
            host=config.host, port=config.port, max_body_bytes=config.max_body_bytes, timeouts=timeouts
        )
        self._server = GatewayServer(server_config, planner, self._clock)
        state = AdminState(
            fleet,
            index,
            log,
            planner,
            self._server.stats,
            self._policy.name,
            self._clock,
            keeper.stats if keeper is not None else None,
        )
        admin_port = await self._start_admin(state)
        try:
            gateway_port = await self._server.start()
        except OSError as error:
            raise _cannot_bind("gateway", config.host, config.port, error) from error
        if keeper is not None:
            self._keeper = keeper
            self._keeping = asyncio.create_task(keeper.run(), name="snapshots")
        return Ports(gateway_port, admin_port)

    async def withdraw(self) -> None:
        """Say on `/readyz` that this gateway leaves, and serve on for the configured delay or until `hurry`."""
        delay_s = self._config.shutdown_delay_s
        if self._server is None or not delay_s:
            return
        self._server.withdraw()
        _log.info("/readyz answers 503 now; requests are taken for %g s more", delay_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurried.wait(), delay_s)

    def hurry(self) -> None:
        """Wait for nothing any more: what runs is cut."""
        self._hurried.set()
        if self._server is not None:
            self._server.hurry()

    async def close(self) -> None:
        """Let running requests end (up to the configured drain time or until `hurry`), then stop everything."""
        if self._server is not None:
            await self._server.close(self._config.drain_s)
        if self._admin is not None:
            await self._admin.cleanup()
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._keeper is not None:
            await self._keeper.save()
        if self._fleet is not None:
            await self._fleet.close()
        if self._session is not None:
            await self._session.close()
        for renderer in self._renderers.values():
            renderer.close()

    def _make_keeper(self, fleet: Fleet, index: PrefixIndex) -> SnapshotKeeper | None:
        config = self._config
        if config.snapshot_path is None:
            return None
        path = Path(config.snapshot_path)
        return SnapshotKeeper(
            path, config.snapshot_interval_s, lambda: fleet_snapshot(fleet, index, self._clock), self._clock
        )

    def _log_workers(self, fleet: Fleet) -> None:
        for worker in fleet.workers:
            at = worker.events_at
            events = at.events if at else "no, routed by load alone"
            replay = f", replay {at.replay}" if at and at.replay else ""
            health = "healthy" if worker.healthy else "not healthy yet"
            _log.info(
                "worker %s: %s, events %s%s, %s: %s",
                worker.worker_id,
                worker.config.url,
                events,
                replay,
                health,
                worker.health_reason,
            )

    async def _start_admin(self, state: AdminState) -> int:
        config = self._config
        self._admin = web.AppRunner(make_admin_app(state), access_log=None)
        await self._admin.setup()
        site = web.TCPSite(self._admin, config.admin_host, config.admin_port)
        try:
            await site.start()
        except OSError as error:
            raise _cannot_bind("admin app", config.admin_host, config.admin_port, error) from error
        port: int = self._admin.addresses[0][1]
        return port


def _cannot_bind(what: str, host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"the {what} cannot listen on {host}:{port}: {describe_failure(error)}; choose another port or address"
    )
