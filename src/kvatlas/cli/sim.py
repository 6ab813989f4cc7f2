"""`kvatlas sim`: simulated engines that answer like vLLM."""

import signal
import threading

import click
import msgspec

from kvatlas.cli.output import print_json
from kvatlas.simulator import EngineConfig, EventsConfig, LatencyConfig, SimulatedFleet

__all__ = ["command", "worker_option"]


class _Engine(msgspec.Struct):
    url: str
    events: str | None
    replay: str | None
    pid: int


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
@click.option("--tokenizer", default=None, help="Folder or hub name of a tokenizer; without it a tiny one is made.")
@click.option("--block-size", type=click.IntRange(min=1), default=16, show_default=True, help="Tokens per KV block.")
@click.option(
    "--num-blocks", type=click.IntRange(min=2), default=4096, show_default=True, help="Blocks in the pool of each."
)
@click.option(
    "--max-model-len", type=click.IntRange(min=1), default=16_384, show_default=True, help="Most tokens of one request."
)
@click.option("--hash-algo", default="sha256", show_default=True, help="vLLM's --prefix-caching-hash-algo.")
@click.option(
    "--prefill-tokens-per-s",
    type=float,
    default=16_000.0,
    show_default=True,
    help="Prompt tokens computed in a second.",
)
@click.option("--time-scale", type=float, default=1.0, show_default=True, help="Real seconds per simulated second.")
@click.option("--seed", type=int, default=0, show_default=True, help="Fixes replies and jitter.")
@click.option("--json", "as_json", is_flag=True, help="Print the addresses as JSON.")
def command(
    *,
    engines: int,
    port: int,
    events_port: int,
    host: str,
    model: str,
    tokenizer: str | None,
    block_size: int,
    num_blocks: int,
    max_model_len: int,
    hash_algo: str,
    prefill_tokens_per_s: float,
    time_scale: float,
    seed: int,
    as_json: bool,
) -> None:
    """Run engines until SIGTERM or Ctrl-C."""
    replay_port = events_port + 1000 if events_port else 0
    config = EngineConfig(
        model=model,
        tokenizer=tokenizer,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        hash_algo=hash_algo,
        seed=seed,
        host=host,
        port=port,
        events=EventsConfig(endpoint=f"tcp://{host}:{events_port}", replay_endpoint=f"tcp://{host}:{replay_port}"),
        latency=LatencyConfig(prefill_tokens_per_s=prefill_tokens_per_s, time_scale=time_scale),
    )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with SimulatedFleet(engines, config) as fleet:
        if as_json:
            shown = [_Engine(e.base_url, e.events_endpoint, e.replay_endpoint, e.pid) for e in fleet.engines]
            print_json(_Started(shown, fleet.tokenizer))
        else:
            click.echo(f"{engines} engines serve {model}; put a gateway in front of them with:")
            workers = " \\\n  ".join(
                f"--worker {worker_option(e.base_url, e.events_endpoint, e.replay_endpoint)}" for e in fleet.engines
            )
            click.echo(f"kvatlas serve --tokenizer {fleet.tokenizer} \\\n  {workers}")
        stop.wait()


def worker_option(url: str, events: str | None, replay: str | None) -> str:
    """The text of `kvatlas serve --worker` for an engine."""
    parts = [url]
    if events is not None:
        parts.append(f"events={events}")
    if replay is not None:
        parts.append(f"replay={replay}")
    return ",".join(parts)
