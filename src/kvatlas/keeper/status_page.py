"""What a keeper does, over HTTP: `/status` as JSON, `/metrics` as Prometheus text. For operators, not for readers."""

import msgspec
from aiohttp import web

from kvatlas.errors import ConfigError
from kvatlas.keeper.keeper import Keeper, KeeperCounters
from kvatlas.stream import ServerCounters, StreamCounters, StreamStatus

__all__ = ["KeeperStatus", "StatusPage", "start_status_page"]

_LEVELS = {"answers_now", "life", "next_seq", "last_engine_seq", "journal_bytes", "serving", "resumed"}


class KeeperStatus(msgspec.Struct):
    """All that is shown."""

    status: StreamStatus
    reason: str
    serving: bool
    publish: str
    replay: str
    life: int
    next_seq: int
    last_engine_seq: int
    journal_bytes: int
    cut_bytes: int
    damaged_segments: int
    keeper: KeeperCounters
    server: ServerCounters
    engine: StreamCounters

    @classmethod
    def of(cls, keeper: Keeper) -> "KeeperStatus":
        """As it is now."""
        journal = keeper.journal
        status, reason = keeper.status
        return cls(
            status=status,
            reason=reason,
            serving=keeper.server.is_open,
            publish=keeper.server.endpoint,
            replay=keeper.server.replay_endpoint,
            life=journal.life,
            next_seq=journal.next_seq,
            last_engine_seq=keeper.last_engine_seq,
            journal_bytes=journal.size_bytes,
            cut_bytes=journal.cut_bytes,
            damaged_segments=journal.damaged_segments,
            keeper=keeper.counters,
            server=keeper.server.counters,
            engine=keeper.subscriber.counters,
        )


class StatusPage:
    """A page that is being served; `close` ends it."""

    def __init__(self, runner: web.AppRunner, port: int) -> None:
        self.port = port
        self._runner = runner

    async def close(self) -> None:
        """Stop serving."""
        await self._runner.cleanup()


async def start_status_page(keeper: Keeper, host: str, port: int) -> StatusPage:
    """Serve a keeper's status.

    Raises:
        ConfigError: the port cannot be bound.
    """

    async def status(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(KeeperStatus.of(keeper)), content_type="application/json")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=_metrics_text(KeeperStatus.of(keeper)))

    app = web.Application()
    app.router.add_get("/status", status)
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            f"the status page cannot listen on {host}:{port}: {error.strerror}; choose another port"
        ) from error
    return StatusPage(runner, runner.addresses[0][1])


def _metrics_text(status: KeeperStatus) -> str:
    """Every number of the status, named after its place in it."""
    lines = []
    for group, name, value in _numbers(msgspec.to_builtins(status)):
        kind = "gauge" if name in _LEVELS else "counter"
        full = "_".join(part for part in ("kvatlas_keeper", group, name) if part)
        full += "_total" if kind == "counter" else ""
        lines += [f"# TYPE {full} {kind}", f"{full} {int(value)}"]
    return "\n".join(lines) + "\n"


def _numbers(fields: dict[str, object]) -> list[tuple[str, str, int]]:
    found = []
    for name, value in fields.items():
        if isinstance(value, dict):
            group = "" if name == "keeper" else name
            found += [(group, key, number) for key, number in value.items() if isinstance(number, int)]
        elif isinstance(value, int):
            found.append(("", name, value))
    return found
