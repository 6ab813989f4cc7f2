"""`kvatlas sim`: simulated engines that answer like vLLM."""

import contextlib
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from kvatlas.cli.output import print_json
from kvatlas.cli.tiny_model import kept_tiny_model
from kvatlas.errors import ConfigError
from kvatlas.hashing import VLLM_ALGOS
from kvatlas.simulator import (
    EXAMPLE_SCRIPT,
    ConnectorConfig,
    EngineAddress,
    EngineConfig,
    EventsConfig,
    LatencyConfig,
    SimulatedFleet,
    SpeculativeConfig,
    read_script,
    trace_cache,
)

__all__ = ["command", "worker_option"]

_WATCH_S = 0.3


class _Engine(msgspec.Struct):
    url: str
    events: str | None
    replay: str | None
    pid: int
    ranks: list[tuple[str, str | None]]
    """Events and replay endpoint of each data-parallel rank."""


class _Started(msgspec.Struct):
    engines: list[_Engine]
    tokenizer: str


@click.command(name="sim", help=__doc__)
@click.option("--engines", type=click.IntRange(min=1), default=2, show_default=True, help="How many.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8100,
    show_default=True,
    help="HTTP port of the first; the others count up. 0 takes free ones.",
)
@click.option(
    "--events-port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port of the first engine's KV events; replay is 1000 above it. 0 takes free ones.  [default: 0]",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address they listen on.")
@click.option("--model", default="kvatlas-sim", show_default=True, help="Name of the model they serve.")
@click.option(
    "--tokenizer",
    default=None,
    help="Folder or hub name of a tokenizer; without it a tiny one, kept in the cache directory.",
)
@click.option("--block-size", type=click.IntRange(min=1), default=16, show_default=True, help="Tokens per KV block.")
@click.option(
    "--num-blocks", type=click.IntRange(min=2), default=4096, show_default=True, help="Blocks in the pool of each."
)
@click.option(
    "--max-model-len", type=click.IntRange(min=1), default=16_384, show_default=True, help="Most tokens of one request."
)
@click.option(
    "--hash-algo",
    type=click.Choice(list(VLLM_ALGOS)),
    default="sha256",
    show_default=True,
    help="vLLM's --prefix-caching-hash-algo.",
)
@click.option(
    "--prefill-tokens-per-s",
    type=float,
    default=16_000.0,
    show_default=True,
    help="Prompt tokens computed in a second.",
)
@click.option("--time-scale", type=float, default=1.0, show_default=True, help="Real seconds per simulated second.")
@click.option("--seed", type=int, default=0, show_default=True, help="Fixes replies and jitter.")
@click.option("--data-parallel-size", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks of each.")
@click.option("--sync-scheduling", is_flag=True, help="Plan a step only when the one before it has ended.")
@click.option(
    "--scheduling-policy",
    type=click.Choice(["fcfs", "priority"]),
    default="fcfs",
    show_default=True,
    help="Who is first.",
)
@click.option(
    "--speculative-tokens", type=click.IntRange(min=0), default=0, show_default=True, help="Drafts of each decode step."
)
@click.option(
    "--lora",
    "loras",
    multiple=True,
    metavar="NAME[=PATH]",
    help="An adapter clients may name as their model; repeatable.",
)
@click.option("--max-loras", type=click.IntRange(min=1), default=1, show_default=True, help="Adapters in one step.")
@click.option(
    "--connector", type=click.Choice(["host", "disk", "tiered"]), default=None, help="KV outside the device: where."
)
@click.option("--connector-dir", default=None, help="Directory of its files; engines share it.")
@click.option(
    "--connector-blocks", type=click.IntRange(min=1), default=65_536, show_default=True, help="Blocks in host memory."
)
@click.option(
    "--connector-bytes", type=click.IntRange(min=1), default=2**30, show_default=True, help="Bound on its files."
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="SPEC",
    help="What goes wrong, like drop:p=0.1 or restart:at=20s,engine=1; repeatable. See docs/simulator.md.",
)
@click.option(
    "--trace-cache",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[FILE]",
    help="Start nothing; print a step-by-step picture of the cache under a script (JSON), or under an example.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the addresses as JSON.")
def command(**options: Any) -> None:
    """Run engines until SIGTERM or Ctrl-C, or tell what one does under a script."""
    if options["trace_cache"] is not None:
        _trace(options["trace_cache"])
        return
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with contextlib.ExitStack() as stack:
        tokenizer = options["tokenizer"] or stack.enter_context(kept_tiny_model())
        fleet = stack.enter_context(
            SimulatedFleet(options["engines"], _engine_config(options | {"tokenizer": tokenizer}))
        )
        _announce(fleet, options["model"], as_json=options["as_json"])
        _watch(fleet, stop)


def _announce(fleet: SimulatedFleet, model: str, *, as_json: bool) -> None:
    if as_json:
        shown = [
            _Engine(e.base_url, e.events_endpoint, e.replay_endpoint, e.pid, list(e.rank_endpoints))
            for e in fleet.engines
        ]
        print_json(_Started(shown, fleet.tokenizer))
        return
    if len(fleet.engines) == 1:
        click.echo(f"1 engine serves {model}; put a gateway in front of it with:")
    else:
        click.echo(f"{len(fleet.engines)} engines serve {model}; put a gateway in front of them with:")
    workers = " \\\n  ".join(f"--worker {text}" for e in fleet.engines for text in _worker_options(e))
    click.echo(f"kvatlas serve --tokenizer {fleet.tokenizer} \\\n  {workers}")


def _worker_options(engine: EngineAddress) -> list[str]:
    """One for each rank: a rank has a cache and an event stream of its own."""
    if len(engine.rank_endpoints) < 2:
        return [worker_option(engine.base_url, engine.events_endpoint, engine.replay_endpoint)]
    return [
        f"{worker_option(engine.base_url, events, replay)},rank={rank}"
        for rank, (events, replay) in enumerate(engine.rank_endpoints)
    ]


def _watch(fleet: SimulatedFleet, stop: threading.Event) -> None:
    """Wait for the end, and tell of each engine that ends before.

    Raises:
        Exit: with 1 when none is left.
    """
    ended: set[int] = set()
    while not stop.wait(_WATCH_S):
        for index, status in enumerate(fleet.exit_statuses):
            if status is None or index in ended:
                continue
            ended.add(index)
            engine, left = fleet.engines[index], len(fleet.engines) - len(ended)
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            click.echo(f"engine {engine.base_url} (pid {engine.pid}) ended: {how}; {left} left", err=True)
        if len(ended) == len(fleet.engines):
            raise click.exceptions.Exit(1)


def _trace(path: str) -> None:
    """Print the pictures of a script's file, or of the built-in example."""
    script = EXAMPLE_SCRIPT
    if path:
        try:
            script = read_script(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; give a JSON file of requests") from None
    for line in trace_cache(script):
        click.echo(line)


def _engine_config(options: Mapping[str, Any]) -> EngineConfig:
    host, events_port = options["host"], options["events_port"]
    replay_port = events_port + 1000 if events_port else 0
    loras = [text.partition("=") for text in options["loras"]]
    if options["connector"] in {"disk", "tiered"} and options["connector_dir"] is None:
        raise ConfigError(f"--connector {options['connector']} keeps blocks in files: give --connector-dir DIRECTORY")
    connector = options["connector"] and ConnectorConfig(
        kind=options["connector"],
        host_blocks=options["connector_blocks"],
        directory=options["connector_dir"],
        disk_bytes=options["connector_bytes"],
    )
    same = ("model", "tokenizer", "block_size", "num_blocks", "max_model_len", "hash_algo", "seed", "host", "port")
    return EngineConfig(
        **{name: options[name] for name in same},
        data_parallel_size=options["data_parallel_size"],
        async_scheduling=not options["sync_scheduling"],
        scheduling_policy=options["scheduling_policy"],
        speculative=SpeculativeConfig(num_tokens=options["speculative_tokens"]),
        lora_modules={name: path or name for name, _, path in loras},
        max_loras=options["max_loras"],
        connector=connector,
        events=EventsConfig(endpoint=f"tcp://{host}:{events_port}", replay_endpoint=f"tcp://{host}:{replay_port}"),
        faults=tuple(options["faults"]),
        latency=LatencyConfig(prefill_tokens_per_s=options["prefill_tokens_per_s"], time_scale=options["time_scale"]),
    )


def worker_option(url: str, events: str | None, replay: str | None) -> str:
    """The text of `kvatlas serve --worker` for an engine."""
    parts = [url]
    if events is not None:
        parts.append(f"events={events}")
    if replay is not None:
        parts.append(f"replay={replay}")
    return ",".join(parts)
