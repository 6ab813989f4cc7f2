"""`kvatlas bench`: what we cost, in processor time, beside a peer in the same run."""

from pathlib import Path

import click

from kvatlas.bench import BenchReport, run_gateway_bench
from kvatlas.bench.hash import HASH_PEERS, run_hash_bench
from kvatlas.bench.prefix_cache import run_prefix_cache_bench
from kvatlas.cli.output import print_json, print_table
from kvatlas.errors import ConfigError

__all__ = ["command"]

_RECORDINGS = Path("tests/vectors/core")
_PLANNERS = {"fixed": "kvatlas.gateway:FixedPlanner", "routed": "kvatlas.bench.routed_planner:routed_planner"}


@click.group(name="bench", help=__doc__)
def command() -> None:
    """Measure what we cost."""


@command.command()
@click.option("--duration", "duration_s", type=float, default=3.0, show_default=True, help="Seconds per measured run.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=2, show_default=True, help="Runs of each; the least counts."
)
@click.option(
    "--against", multiple=True, default=("aiohttp",), show_default=True, help="Peers measured in the same run."
)
@click.option(
    "--planner",
    "planners",
    multiple=True,
    type=click.Choice(list(_PLANNERS)),
    default=("fixed", "routed"),
    show_default=True,
    help="fixed: bytes only. routed: parse, render, hash, look up 8 workers, score, audit.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def gateway(
    *, duration_s: float, rounds: int, against: tuple[str, ...], planners: tuple[str, ...], as_json: bool
) -> None:
    """Processor microseconds the gateway spends per JSON request and per SSE event."""
    reports = {
        name: run_gateway_bench(duration_s, against=against, planner=_PLANNERS[name], rounds=rounds)
        for name in planners
    }
    rows = [
        type(row)(f"{row.work} ({name})", row.unit, row.ours, row.peer, row.peer_value, row.ratio)
        for name, report in reports.items()
        for row in report.rows
    ]
    _print(BenchReport(next(iter(reports.values())).machine, rows), as_json=as_json)


@command.command(name="hash")
@click.option(
    "--against",
    type=click.Choice(list(HASH_PEERS)),
    default=None,
    help="Measure the installed peer's hasher in turns; without it, and in its other rows, the Python kernels.",
)
@click.option("--interpreter", default=".venv-real/bin/python", show_default=True, help="The Python that has the peer.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Turns of each; medians count."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def hash_command(*, against: str | None, interpreter: str, rounds: int, as_json: bool) -> None:
    """Nanoseconds for each block of a long prompt, of every chain of block hashes."""
    _print(run_hash_bench(against=against, interpreter=interpreter, rounds=rounds), as_json=as_json)


@command.command(name="prefix-cache")
@click.option(
    "--recordings",
    type=click.Path(path_type=Path),
    default=_RECORDINGS,
    show_default=True,
    help="Folder of recorded cache operations; one row each.",
)
@click.option(
    "--against", type=click.Choice(["vllm"]), default=None, help="Measure the installed engine's own in turns."
)
@click.option("--interpreter", default=".venv-real/bin/python", show_default=True, help="The Python that has vLLM.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=9, show_default=True, help="Turns of each; medians count."
)
@click.option(
    "--requests", type=click.IntRange(min=1), default=10_000, show_default=True, help="Requests of 8k tokens."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def prefix_cache(
    *, recordings: Path, against: str | None, interpreter: str, rounds: int, requests: int, as_json: bool
) -> None:
    """Time per cache operation, requests per second, bytes per block; beside vLLM's KVCacheManager with --against."""
    if recordings == _RECORDINGS and not recordings.is_dir():
        raise ConfigError(
            f"{recordings} is not here: recordings come with the sources, not with the package. Run this in a "
            "checkout of kvatlas, or give a folder with --recordings"
        )
    files = sorted(recordings.glob("*.jsonl"))
    if not files:
        raise ConfigError(f"no recordings (*.jsonl) in {recordings}: give the folder with --recordings")
    report = run_prefix_cache_bench(
        files, against=against, interpreter=interpreter, rounds=rounds, num_requests=requests
    )
    _print(report, as_json=as_json)


def _print(report: BenchReport, *, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    table = [
        [
            row.work,
            f"{row.ours:.2f}",
            row.unit,
            row.peer or "",
            "" if row.peer_value is None else f"{row.peer_value:.2f}",
            "" if row.ratio is None else f"{row.ratio:.1f}x",
        ]
        for row in report.rows
    ]
    print_table(report.machine, ["work", "ours", "unit", "peer", "its value", "better by"], table)
