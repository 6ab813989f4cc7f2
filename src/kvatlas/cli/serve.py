"""`kvatlas serve`: the gateway in front of engines."""

import asyncio
import logging
import signal
from pathlib import Path
from typing import Any

import click
import msgspec
import uvloop

from kvatlas.cli.limits import allow_many_files
from kvatlas.cli.output import print_json
from kvatlas.cli.service import Ports, Service
from kvatlas.cli.signals import stop_when_stdin_ends
from kvatlas.config import ServeConfig, load_serve_config, parse_worker
from kvatlas.errors import ConfigError
from kvatlas.gateway.fleet_planner import ANY_MODEL
from kvatlas.routing import POLICY_NAMES

__all__ = ["command"]

_log = logging.getLogger(__name__)


class _Ready(msgspec.Struct):
    gateway_port: int
    admin_port: int


@click.command(name="serve", help=__doc__)
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    default=None,
    help="Settings in TOML, YAML or JSON; options below override it.",
)
@click.option(
    "--worker",
    "workers",
    multiple=True,
    help="URL, or URL[,events=tcp://H:P|none][,replay=tcp://H:P][,topic=T][,rank=N]; repeat for each engine. "
    "Without events= the engine is asked where they are.",
)
@click.option(
    "--tokenizer",
    "tokenizers",
    multiple=True,
    help="[MODEL=]FOLDER or hub name; repeat for each model. Without it the engine's /tokenize is asked.",
)
@click.option(
    "--policy", type=click.Choice(list(POLICY_NAMES)), default=None, help="How a worker is picked.  [default: cost]"
)
@click.option("--host", default=None, help="Gateway address.  [default: 0.0.0.0]")
@click.option("--port", type=int, default=None, help="Gateway port; 0 takes a free one.  [default: 8080]")
@click.option("--admin-host", default=None, help="Admin address.  [default: 127.0.0.1]")
@click.option("--admin-port", type=int, default=None, help="Admin port; 0 takes a free one.  [default: 9090]")
@click.option("--seed", type=int, default=None, help="Seed of random choices and block keys.")
@click.option("--json", "as_json", is_flag=True, help="Print the ports as JSON when ready.")
@click.option("--follow-stdin", is_flag=True, hidden=True, help="Stop when standard input ends.")
def command(
    *,
    config_file: Path | None,
    workers: tuple[str, ...],
    tokenizers: tuple[str, ...],
    as_json: bool,
    follow_stdin: bool,
    **options: Any,
) -> None:
    """Run the gateway until SIGTERM or Ctrl-C; the second one does not wait for running requests."""
    config = load_serve_config(config_file) if config_file else ServeConfig()
    changes: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if workers:
        changes["workers"] = tuple(parse_worker(text) for text in workers)
    if tokenizers:
        changes["tokenizers"] = {**config.tokenizers, **dict(_parse_tokenizer(text) for text in tokenizers)}
    # Through convert, so that options obey the same limits as the file.
    try:
        config = msgspec.convert(msgspec.structs.asdict(config) | changes, ServeConfig, from_attributes=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error}; docs/config.md lists every setting") from error
    if not config.workers:
        raise ConfigError(
            "no engine to route to: give --worker URL[,events=...] at least once, or `workers` in --config"
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    allow_many_files()
    service = Service(config)
    if not uvloop.run(_serve(service, config, as_json=as_json, follow_stdin=follow_stdin)):
        raise click.Abort


async def _serve(service: Service, config: ServeConfig, *, as_json: bool, follow_stdin: bool) -> bool:
    """Serve until told to stop. Returns False when Ctrl-C came before the start was complete."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    first: signal.Signals | None = None

    def on_signal(number: signal.Signals) -> None:
        nonlocal first
        if stop.is_set():
            _log.warning("%s again: running requests are cut", number.name)
            service.hurry()
        else:
            first = number
            _log.info("%s: shutting down", number.name)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    if follow_stdin:
        stop_when_stdin_ends(stop)
    starting = loop.create_task(service.start())
    stopping = loop.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return first is not signal.SIGINT
        _announce(config, starting.result(), as_json=as_json)
        await stopping
        await service.withdraw()
        return True
    finally:
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        await service.close()


def _announce(config: ServeConfig, ports: Ports, *, as_json: bool) -> None:
    if as_json:
        print_json(_Ready(ports.gateway, ports.admin))
        return
    gateway = f"http://{config.host}:{ports.gateway}"
    click.echo(f"gateway  {gateway}/v1  policy {config.policy}, workers: {len(config.workers)}")
    click.echo(f"ready?   {gateway}/readyz  200 while any worker is healthy")
    click.echo(f"admin    http://{config.admin_host}:{ports.admin}/api/workers  /metrics  /api/decisions/ID")


def _parse_tokenizer(text: str) -> tuple[str, str]:
    model, equals, source = text.partition("=")
    if not equals:
        return ANY_MODEL, text
    if not model or not source:
        raise ConfigError(f"--tokenizer {text!r}: expected FOLDER, or MODEL=FOLDER to use it for one model only")
    return model, source
