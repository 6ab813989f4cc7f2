"""`kvatlas bench`: what we cost, in processor time, beside a peer in the same run."""

import sys
from pathlib import Path

import click

from kvatlas.bench import BenchReport, BenchRow, machine_name, run_gateway_bench
from kvatlas.bench.gateway_parts import run_gateway_parts_bench
from kvatlas.bench.hash import HASH_PEERS, run_hash_bench
from kvatlas.bench.index import INDEX_PEERS, run_index_bench
from kvatlas.bench.index_check import check_index
from kvatlas.bench.index_kit import PATTERNS
from kvatlas.bench.ingest import INGEST_PEERS, run_ingest_bench
from kvatlas.bench.prefix_cache import run_prefix_cache_bench
from kvatlas.bench.recency import run_recency_bench
from kvatlas.cli.output import print_json, print_table
from kvatlas.errors import ConfigError
from kvatlas.routing import POLICY_NAMES

__all__ = ["command"]

_RECORDINGS = Path("tests/vectors/core")
_DYNAMO_PYTHON = ".venv-dynamo/bin/python"
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
@click.option(
    "--turns",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Also measure conversations of so many turns, each with text never seen before.",
)
@click.option("--parts", is_flag=True, help="Show instead what the parts of the routed path cost, one by one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def gateway(
    *,
    duration_s: float,
    rounds: int,
    against: tuple[str, ...],
    planners: tuple[str, ...],
    turns: int,
    parts: bool,
    as_json: bool,
) -> None:
    """Processor microseconds the gateway spends per JSON request and per SSE event."""
    if parts:
        _print(run_gateway_parts_bench(), as_json=as_json)
        return
    reports = {
        name: run_gateway_bench(duration_s, turns=turns, against=against, planner=_PLANNERS[name], rounds=rounds)
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


@command.command()
@click.option(
    "--against",
    type=click.Choice(INDEX_PEERS),
    default=None,
    help="Measure Dynamo's radix tree (ai-dynamo-runtime 1.6.1) in turns.",
)
@click.option("--interpreter", default=_DYNAMO_PYTHON, show_default=True, help="The Python that has the peer.")
@click.option(
    "--pattern",
    type=click.Choice(PATTERNS),
    default=PATTERNS[0],
    show_default=True,
    help="Who holds the prompts that are looked up. ladder: all the first half, then ever fewer. full: all all of it. "
    "single: one all of it, all the first sixteenth.",
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Turns of each; medians count."
)
@click.option(
    "--scale",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Of all sizes: workers, blocks, calls, entries.",
)
@click.option(
    "--check",
    "finds",
    type=click.IntRange(min=1),
    default=None,
    help="Measure nothing: compare so many answers with a naive model's while blocks come and go; exit 1 when one is "
    "wrong.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of what --check draws.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def index(
    *,
    against: str | None,
    interpreter: str,
    pattern: str,
    rounds: int,
    scale: float,
    finds: int | None,
    seed: int,
    as_json: bool,
) -> None:
    """Time of look-ups and events, bytes per block and worker, growth under churn, of the fleet index."""
    if finds is None:
        report = run_index_bench(against=against, interpreter=interpreter, pattern=pattern, rounds=rounds, scale=scale)
        _print(report, as_json=as_json)
        return
    result = check_index(finds, seed=seed)
    row = BenchRow(f"answers unlike a naive model's, of {result.finds} finds", "wrong", result.wrong)
    _print(BenchReport(machine_name(), [row]), as_json=as_json)
    if result.wrong:
        sys.exit(1)


@command.command()
@click.option(
    "--against",
    type=click.Choice(INGEST_PEERS),
    default=None,
    help="Measure Dynamo's indexer (ai-dynamo-runtime 1.6.1) in turns.",
)
@click.option("--interpreter", default=_DYNAMO_PYTHON, show_default=True, help="The Python that has the peer.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each; medians count.")
@click.option(
    "--scale",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Of the number of blocks.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ingest(*, against: str | None, interpreter: str, rounds: int, scale: float, as_json: bool) -> None:
    """Blocks per second of one core, from engines' ZMQ messages to found in the index."""
    report = run_ingest_bench(against=against, interpreter=interpreter, rounds=rounds, scale=scale)
    _print(report, as_json=as_json)


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


@command.command()
@click.option(
    "--recordings",
    type=click.Path(path_type=Path),
    default=_RECORDINGS,
    show_default=True,
    help="Folder of recorded cache operations; its full-*.jsonl are scored, if there are any.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(POLICY_NAMES),
    default=("cost", "round_robin"),
    show_default=True,
    help="Who routes on the simulated fleets.",
)
@click.option(
    "--seeds", type=click.IntRange(min=1), default=2, show_default=True, help="Runs of each, with seeds 0, 1..."
)
@click.option("--requests", type=click.IntRange(min=1), default=1500, show_default=True, help="Requests of each run.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def recency(*, recordings: Path, policies: tuple[str, ...], seeds: int, requests: int, as_json: bool) -> None:
    """How well the age of blocks tells which one an engine removes next: area under the ROC curve, 0.5 is chance."""
    files = sorted(recordings.glob("full-*.jsonl"))
    _print(run_recency_bench(files, policies=policies, seeds=seeds, requests=requests), as_json=as_json)


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
