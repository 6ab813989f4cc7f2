"""Entry point: finds the subcommand, imports only that one, and turns our errors into one line and exit code 2.

Ctrl-C ends any command quietly, with the exit code shells give it.
"""

import importlib
import sys

import click

from kvatlas import __version__
from kvatlas.errors import KvAtlasError

__all__ = ["cli", "main"]

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 and the number of the signal."""

COMMANDS = {
    "bench": ("kvatlas.cli.bench", "Measure what we cost, beside a peer in the same run."),
    "chaos": ("kvatlas.cli.chaos", "Break event streams on purpose; hold the index against what engines truly hold."),
    "demo": ("kvatlas.cli.demo", "Simulated fleet, gateway and load: round robin against cost, in one table."),
    "events": ("kvatlas.cli.events", "Look at KV event streams: replay a recording, tail a live one."),
    "hash": ("kvatlas.cli.hash", "Print the block hashes an engine computes for token ids."),
    "index": ("kvatlas.cli.index", "Ask a running gateway's index who holds a prompt; write and read its snapshots."),
    "keeper": ("kvatlas.cli.keeper", "Keep an engine's event stream and serve it on from 0."),
    "serve": ("kvatlas.cli.serve", "Run the gateway in front of engines."),
    "sim": ("kvatlas.cli.sim", "Run simulated engines that answer like vLLM."),
    "workers": ("kvatlas.cli.workers", "Show the workers of a running gateway: health, trust, load, predictions."),
}


class _LazyGroup(click.Group):
    """A group whose commands are imported when they run, so that `kvatlas hash` does not wait for a web server."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name][0]).command
        if not isinstance(command, click.Command):
            raise TypeError(f"{COMMANDS[cmd_name][0]}.command is {type(command)}, expected a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


def _print_version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:  # noqa: FBT001 (click's signature)
    if not wanted or ctx.resilient_parsing:
        return
    backend = importlib.import_module("kvatlas._native").backend_name()
    click.echo(f"kvatlas, version {__version__}, {backend} kernels")
    ctx.exit()


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version, and whether the kernels are native or pure Python.",
)
def cli() -> None:
    """kvatlas: send each LLM request to the engine that already holds its prefix."""


def main() -> None:
    """Run the command line; exit 2 with one clear line when the input or the configuration is at fault."""
    try:
        status = cli(prog_name="kvatlas", standalone_mode=False)
    except click.Abort:  # what click makes of Ctrl-C
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except KvAtlasError as error:
        click.echo(f"kvatlas: {error.message}", err=True)
        sys.exit(2)
    sys.exit(status if isinstance(status, int) else 0)
