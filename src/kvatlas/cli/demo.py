"""`kvatlas demo`: what routing by cache is worth, shown on this machine in half a minute.

Four simulated engines, the gateway as its own process, and the same seeded conversations twice: round robin, then
`cost`.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import click
import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvatlas.cli.output import console, print_json, print_table
from kvatlas.cli.signals import sigterm_ends_block
from kvatlas.cli.sim import worker_option
from kvatlas.cli.tiny_model import kept_tiny_model
from kvatlas.clock import SystemClock
from kvatlas.errors import UpstreamError
from kvatlas.replay import ConversationSettings, RunSummary, hold_conversations, make_conversations, summarise
from kvatlas.routing import POLICY_NAMES
from kvatlas.simulator import EngineConfig, LatencyConfig, SimulatedFleet

__all__ = ["command", "print_summaries"]

_MODEL = "kvatlas-sim"
_STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class _Setup:
    engines: int
    conversations: int
    turns: int
    num_blocks: int
    seed: int


class _DemoJson(msgspec.Struct):
    policies: dict[str, RunSummary]


@click.command(name="demo", help=__doc__)
@click.option("--engines", type=click.IntRange(min=1), default=4, show_default=True, help="Simulated engines.")
@click.option(
    "--conversations", type=click.IntRange(min=1), default=48, show_default=True, help="Conversations held at once."
)
@click.option("--turns", type=click.IntRange(min=1), default=5, show_default=True, help="Questions per conversation.")
@click.option(
    "--num-blocks",
    type=click.IntRange(min=258),
    default=800,
    show_default=True,
    help="KV blocks of 16 tokens per engine: small enough that copies compete for room.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(list(POLICY_NAMES)),
    default=("round_robin", "cost"),
    show_default=True,
    help="Policies to compare, in order.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of load and engines.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    *,
    engines: int,
    conversations: int,
    turns: int,
    num_blocks: int,
    policies: tuple[str, ...],
    seed: int,
    as_json: bool,
) -> None:
    """Compare policies on a simulated fleet."""
    setup = _Setup(engines, conversations, turns, num_blocks, seed)
    with sigterm_ends_block():
        summaries = _run(setup, policies, quiet=as_json)
    if as_json:
        print_json(_DemoJson(summaries))
    else:
        load = f"{conversations} conversations x {turns} turns"
        print_summaries(f"{load} on {engines} simulated engines, seed {seed}", summaries)
    if any(summary.failed for summary in summaries.values()):
        raise click.exceptions.Exit(1)


def _run(setup: _Setup, policies: tuple[str, ...], *, quiet: bool) -> dict[str, RunSummary]:
    progress = Progress(
        TextColumn("{task.description:<14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
        console=console,
        disable=quiet,
    )
    summaries: dict[str, RunSummary] = {}
    with kept_tiny_model() as tokenizer, progress:
        for policy in policies:
            task = progress.add_task(policy, total=setup.conversations * setup.turns)
            summaries[policy] = _run_policy(setup, policy, tokenizer, partial(progress.advance, task))
    return summaries


def _run_policy(setup: _Setup, policy: str, tokenizer: str, advance: Callable[[], None]) -> RunSummary:
    config = EngineConfig(
        model=_MODEL,
        tokenizer=tokenizer,
        num_blocks=setup.num_blocks,
        max_model_len=4096,
        seed=setup.seed,
        latency=LatencyConfig(prefill_tokens_per_s=8_000.0, decode_step_s=0.004),
    )
    load = make_conversations(ConversationSettings(conversations=setup.conversations, turns=setup.turns), setup.seed)
    with SimulatedFleet(setup.engines, config) as fleet, _gateway(fleet, policy, setup.seed) as base_url:
        results = asyncio.run(hold_conversations(base_url, _MODEL, load, SystemClock(), on_turn=lambda _: advance()))
    return summarise(results, setup.engines)


@contextlib.contextmanager
def _gateway(fleet: SimulatedFleet, policy: str, seed: int) -> Iterator[str]:
    """A gateway process in front of the fleet; yields its URL. It ends with this process, however that ends."""
    workers = [worker_option(e.base_url, e.events_endpoint, e.replay_endpoint) for e in fleet.engines]
    arguments = [
        sys.executable,
        "-m",
        "kvatlas",
        "serve",
        "--follow-stdin",
        "--json",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--admin-port",
        "0",
    ]
    arguments += ["--policy", policy, "--seed", str(seed), "--tokenizer", fleet.tokenizer]
    arguments += [part for worker in workers for part in ("--worker", worker)]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield f"http://127.0.0.1:{_read_port(process)}"
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _read_port(process: "subprocess.Popen[str]") -> int:
    text = ""
    for line in process.stdout or ():
        text += line
        if line.rstrip() == "}":
            return int(json.loads(text)["gateway_port"])
    raise UpstreamError(
        f"the gateway did not start (exit code {process.wait()}): run `kvatlas serve` by hand to see why"
    )


def print_summaries(title: str, summaries: dict[str, RunSummary]) -> None:
    """Write the table, what its columns mean, and what failed requests said."""
    rows = [
        [
            name,
            f"{100 * s.hit_rate:.1f} %",
            f"{s.ttft_p50_ms:.0f} ms",
            f"{s.ttft_p90_ms:.0f} ms",
            f"{s.max_over_mean_work:.2f}",
            f"{s.predicted_equal}/{s.predicted}",
            str(s.requests),
            str(s.failed),
        ]
        for name, s in summaries.items()
    ]
    columns = [
        "policy",
        "hit rate",
        "TTFT p50",
        "TTFT p90",
        "max/mean work",
        "predicted = actual",
        "requests",
        "failed",
    ]
    print_table(title, columns, rows)
    console.print(_explain(summaries), style="dim")
    for name, summary in summaries.items():
        for error in summary.errors:
            click.echo(f"{name}: a request failed: {error}")


def _explain(summaries: dict[str, RunSummary]) -> str:
    """One line under the table for who meets its columns for the first time."""
    misses = ", ".join(f"{name} {s.predicted_over}/{s.predicted_under}" for name, s in summaries.items())
    return (
        "max/mean work: prompt tokens computed by the busiest engine over the mean of all (1.00 = even). "
        "predicted = actual: the cached tokens promised per request against the engine's own count; a promise is over "
        "when blocks were evicted between promise and admission, under when another request cached them meanwhile "
        f"(over/under: {misses})."
    )
