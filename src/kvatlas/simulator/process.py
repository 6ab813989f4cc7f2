"""One simulated engine as a process: `python -m kvatlas.simulator --config JSON`.

When it serves, it prints one line of JSON (its address) on standard output. SIGTERM and SIGINT stop it; with
`--follow-stdin` so does the end of standard input, so that no engine outlives a parent that was killed.
"""

import argparse
import asyncio
import gc
import os
import signal
import sys

import msgspec
import uvloop

from kvatlas.errors import KvAtlasError
from kvatlas.simulator.config import EngineConfig
from kvatlas.simulator.served_engine import ServedEngine

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run one engine until told to stop. Returns the exit status: 2 when it cannot work as configured."""
    parser = argparse.ArgumentParser(prog="python -m kvatlas.simulator", description="One simulated vLLM engine.")
    parser.add_argument("--config", default="{}", help="EngineConfig as JSON; what is left out has its default")
    parser.add_argument("--follow-stdin", action="store_true", help="stop when standard input ends")
    options = parser.parse_args(arguments)
    try:
        config = msgspec.json.decode(options.config, type=EngineConfig)
        uvloop.run(_serve(config, follow_stdin=options.follow_stdin))
    except msgspec.DecodeError as error:
        print(f"--config is not an engine configuration: {error}", file=sys.stderr)  # noqa: T201 - a command's output
        return 2
    except KvAtlasError as error:
        print(error.message, file=sys.stderr)  # noqa: T201
        return 2
    return 0


async def _serve(config: EngineConfig, *, follow_stdin: bool) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with ServedEngine(config) as served:
        gc.collect()
        gc.freeze()  # what was built at start stays: the collector need not look at it again
        print(msgspec.json.encode(served.address).decode(), flush=True)  # noqa: T201 - the parent reads it
        if follow_stdin:
            loop.add_reader(sys.stdin.fileno(), _stop_at_end, stop)
        await stop.wait()
        if follow_stdin:
            loop.remove_reader(sys.stdin.fileno())


def _stop_at_end(stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        stop.set()
