"""`kvatlas workers`: the workers of a running gateway, a line each."""

import click
import msgspec

from kvatlas.admin import WorkerView
from kvatlas.cli.admin_client import admin_option, ask_admin
from kvatlas.cli.output import print_json, print_table
from kvatlas.fleet import Trust

__all__ = ["command"]

_REASON_WIDTH = 48


class _Answer(msgspec.Struct):
    policy: str
    workers: list[WorkerView]


@click.command(name="workers", help=__doc__)
@admin_option
@click.option("--json", "as_json", is_flag=True, help="Print all that /api/workers tells, as JSON.")
def command(*, admin: str, as_json: bool) -> None:
    """Print health, trust, load and kept promises of each worker."""
    answer = ask_admin(admin, "/api/workers", _Answer)
    if as_json:
        print_json(answer)
        return
    columns = ["worker", "healthy", "trust", "in flight", "queued tokens", "blocks", "equal/over/under"]
    print_table(f"policy {answer.policy}", columns, [_row(worker) for worker in answer.workers], left=3)
    for worker in answer.workers:
        if not worker.healthy:
            click.echo(f"{worker.id} gets no traffic: {worker.health_reason} ({worker.failed_checks} failed checks)")
        elif worker.silent_reason is not None:
            click.echo(f"{worker.id} is left out where enough others are heard: {worker.silent_reason}")
        elif worker.trust.level == Trust.NONE:
            click.echo(f"{worker.id} is routed by load alone: {worker.trust.reason}")


def _row(worker: WorkerView) -> list[str]:
    predictions = worker.predictions
    return [
        worker.id,
        "yes" if worker.healthy else "NO",
        f"{worker.trust.level}: {_shorten(worker.trust.reason)}",
        str(worker.load.in_flight),
        str(worker.load.queued_prefill_tokens),
        str(worker.index.resident_blocks),
        f"{predictions.equal}/{predictions.over}/{predictions.under}",
    ]


def _shorten(text: str) -> str:
    return text if len(text) <= _REASON_WIDTH else text[: _REASON_WIDTH - 3].rstrip() + "..."
