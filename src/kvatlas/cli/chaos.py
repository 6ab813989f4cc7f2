"""`kvatlas chaos`: break event streams on purpose and hold the index against what engines truly hold.

Simulated engines, conversations, faults and the index run in virtual time: no sockets, no waiting. At every instant the
index's claims are compared with the contents of every engine's cache.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvatlas.chaos import DEFAULT_SCENARIOS, ChaosReport, ChaosRow, ChaosSettings, run_chaos
from kvatlas.cli.output import console, print_json, print_table

__all__ = ["command"]


@click.command(name="chaos", help=__doc__)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    help="A fault's name or spec, as of `kvatlas sim --fault`; also no_replay, mixture, none. Joined by + they come "
    "together, e.g. drop+replay. Repeat it for several runs. Without it: every fault alone, and combinations.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of traffic, engines and faults.")
@click.option("--workers", type=click.IntRange(1, 256), default=4, show_default=True, help="Engines in each run.")
@click.option("--requests", type=click.IntRange(min=1), default=800, show_default=True, help="Requests in each run.")
@click.option(
    "--num-blocks",
    type=click.IntRange(min=160),
    default=256,
    show_default=True,
    help="KV blocks of 16 tokens an engine.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(*, faults: tuple[str, ...], seed: int, workers: int, requests: int, num_blocks: int, as_json: bool) -> None:
    """Run every set of faults; exit with 1 when a guarantee is broken."""
    settings = ChaosSettings(workers=workers, requests=requests, num_blocks=num_blocks, seed=seed)
    names = faults or DEFAULT_SCENARIOS
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("runs"), TimeElapsedColumn())
    with _quiet_log(), Progress(*columns, console=console, disable=as_json, transient=True) as progress:
        task = progress.add_task("", total=len(names))
        report = run_chaos(settings, names, on_row=lambda _: progress.advance(task))
    if as_json:
        print_json(report)
    else:
        _print(report, settings)
    if not report.is_kept:
        raise click.exceptions.Exit(1)


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Lost trust is what is asked for here: not worth a line each."""
    log = logging.getLogger("kvatlas")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _print(report: ChaosReport, settings: ChaosSettings) -> None:
    fleet = f"{settings.workers} engines of {settings.num_blocks} blocks"
    title = f"{settings.requests} requests on {fleet}, seed {settings.seed}"
    columns = ["fault", "detected after", "over-claimed before", "after", "doubts gone", "full recall"]
    print_table(title, columns, [_cells(row) for row in report.rows])
    console.print(
        "over-claimed: most blocks claimed in full and not held, before anybody could know of a loss; and after. "
        "doubts gone, full recall: turnovers of the pool since the last loss.",
        style="dim",
    )
    for row in report.rows:
        for broken in row.broken:
            click.echo(f"{row.fault}: {broken}", err=True)


def _cells(row: ChaosRow) -> list[str]:
    nothing_lost = row.detect_s is None
    recall = "-" if nothing_lost else "not yet"
    if row.recall_99_after_turnovers is not None:
        recall = f"{row.recall_99_after_turnovers:.2f}"
    gone = row.unconfirmed_gone_after_turnovers
    return [
        row.fault,
        "-" if row.detect_s is None else f"{row.detect_s:.2f} s",
        str(row.overclaimed_blocks_before_detection),
        str(row.overclaimed_blocks_after_detection),
        "-" if gone is None else f"{gone:.2f}",
        recall,
    ]
