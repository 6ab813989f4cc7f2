"""`kvatlas events`: look at KV event streams."""

from pathlib import Path

import click

from kvatlas.cli.output import print_json
from kvatlas.cli.tail import tail
from kvatlas.errors import ConfigError
from kvatlas.replay import replay_recording

__all__ = ["command"]


@click.group(name="events", help=__doc__)
def command() -> None:
    """Look at KV event streams."""


@command.command()
@click.argument("recording", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replay(*, recording: Path, as_json: bool) -> None:
    """Feed RECORDING to the index and predict cached_tokens of each request just before it was sent.

    Exit code 1 when a prediction differs from what the engine reported, or nothing could be compared.
    """
    try:
        report = replay_recording(recording)
    except OSError as error:
        raise ConfigError(f"cannot read the recording {recording}: {error.strerror}") from error
    if as_json:
        print_json(report)
    else:
        share = 100 * report.equal / report.compared if report.compared else 0.0
        click.echo(
            f"requests {report.requests}, events {report.events}, gaps {report.gaps}, malformed {report.malformed}"
        )
        click.echo(
            f"compared {report.compared} (from line {report.known_from_line}), equal {report.equal} ({share:.1f} %)"
        )
        for difference in report.differences:
            click.echo(
                f"  line {difference.line}: predicted {difference.predicted}, engine reported {difference.reported}"
            )
    if not report.compared or report.differences:
        raise click.exceptions.Exit(1)


command.add_command(tail)
