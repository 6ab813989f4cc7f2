"""`kvatlas keeper`: an engine's event stream, kept beside it and served on from 0 to any number of subscribers."""

import asyncio
import logging
import signal
from pathlib import Path
from typing import Any

import click
import msgspec
import uvloop

from kvatlas.cli.output import print_json
from kvatlas.clock import SystemClock
from kvatlas.config import is_endpoint
from kvatlas.errors import ConfigError
from kvatlas.keeper import (
    CopyCounting,
    EventReader,
    Keeper,
    KeeperConfig,
    read_residency,
    resident_events,
    start_status_page,
)
from kvatlas.stream import Journal, ReplayServerConfig, SubscriberConfig

__all__ = ["command"]

_log = logging.getLogger(__name__)


class _Ready(msgspec.Struct):
    publish: str
    replay: str
    status_port: int | None
    data: str
    life: int
    next_seq: int
    resumed: bool


@click.command(name="keeper", help=__doc__)
@click.option("--events", required=True, metavar="tcp://HOST:PORT", help="The engine's KV event publisher.")
@click.option("--replay", default=None, metavar="tcp://HOST:PORT", help="Its replay endpoint.")
@click.option("--topic", default="", help="The engine's topic; published on as it is.")
@click.option(
    "--data",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder of the journal; one for each engine and rank.",
)
@click.option(
    "--publish", default="tcp://*:5567", show_default=True, help="Where batches are published. Port 0: a free one."
)
@click.option("--serve-replay", default="tcp://*:5568", show_default=True, help="Where replay is served.")
@click.option(
    "--max-bytes",
    type=click.IntRange(min=4096),
    default=1024**3,
    show_default=True,
    help="Journal size at which it is compacted to the blocks still resident.",
)
@click.option(
    "--copies",
    type=click.Choice([each.value for each in CopyCounting]),
    default=CopyCounting.COUNT.value,
    show_default=True,
    help="A repeated store is one more copy (vLLM), or nothing new (set: engines that re-announce).",
)
@click.option(
    "--probe-s",
    type=click.FloatRange(min=0.1),
    default=5.0,
    show_default=True,
    help="Quiet time before the engine's tail is asked for.",
)
@click.option(
    "--status-port",
    type=click.IntRange(0, 65535),
    default=None,
    help="Serve /status and /metrics there.  [default: not]",
)
@click.option("--status-host", default="127.0.0.1", show_default=True, help="Address of the status port.")
@click.option("--dump", is_flag=True, help="Print the resident blocks of the journal as events, a line each, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print the addresses as JSON.")
def command(*, events: str, replay: str | None, topic: str, folder: Path, **options: Any) -> None:
    """Keep until SIGTERM or Ctrl-C. The journal outlives the process: start it again and it goes on."""
    for name, endpoint in (("--events", events), ("--replay", replay)):
        if endpoint is not None and ("*" in endpoint or not is_endpoint(endpoint)):
            raise ConfigError(f"{name} {endpoint!r} cannot be connected to: expected tcp://HOST:PORT")
    source = f"{events} topic {topic!r}" if topic else events
    counting = CopyCounting(options["copies"])
    with Journal(folder, source) as journal:
        if options["dump"]:
            _dump(journal, counting)
            return
        config = KeeperConfig(
            engine=SubscriberConfig(endpoint=events, replay_endpoint=replay, topic=topic, probe_s=options["probe_s"]),
            serve=ReplayServerConfig(options["publish"], options["serve_replay"], topic),
            max_bytes=options["max_bytes"],
            counting=counting,
        )
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        uvloop.run(_keep(config, journal, folder, options))


async def _keep(config: KeeperConfig, journal: Journal, folder: Path, options: dict[str, Any]) -> None:
    keeper = Keeper(config, journal, SystemClock())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _stop, keeper, number)
    keeper.check_ports()
    page = None
    if options["status_port"] is not None:
        page = await start_status_page(keeper, options["status_host"], options["status_port"])
    ready = _Ready(
        publish=keeper.server.endpoint,
        replay=keeper.server.replay_endpoint,
        status_port=page.port if page else None,
        data=str(folder),
        life=journal.life,
        next_seq=journal.next_seq,
        resumed=keeper.counters.resumed,
    )
    _announce(config, ready, as_json=options["as_json"])
    try:
        await keeper.run()
    finally:
        if page is not None:
            await page.close()


def _stop(keeper: Keeper, number: signal.Signals) -> None:
    _log.info("%s: shutting down", number.name)
    keeper.close()


def _announce(config: KeeperConfig, ready: _Ready, *, as_json: bool) -> None:
    if as_json:
        print_json(ready)
        return
    click.echo(f"keeps    {config.engine.endpoint}  in {ready.data}, life {ready.life}, next batch {ready.next_seq}")
    click.echo(f"publish  {ready.publish}")
    click.echo(f"replay   {ready.replay}")
    if ready.status_port is not None:
        click.echo(f"status   port {ready.status_port}: /status, /metrics")


def _dump(journal: Journal, counting: CopyCounting) -> None:
    extents = journal.extents()
    residency = read_residency(extents, journal.next_seq, counting)
    with EventReader([extent.path for extent in extents]) as reader:
        for event in resident_events(residency, reader):
            click.echo(msgspec.json.encode(event).decode())
    if residency.is_lossy:
        click.echo("kvatlas: batches are missing in the journal: some of these blocks may be gone", err=True)
