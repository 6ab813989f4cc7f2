"""The planner a fleet really uses, for the gateway benchmark: parse, render, hash, look up, pick, keep the books.

The one stand-in engine plays eight workers (eight ranks of one address), each of which holds the load's prompt, so that
every request walks the whole index and every candidate is scored.
"""

import tempfile
from pathlib import Path

import aiohttp

from kvatlas.bench.load import request_bytes
from kvatlas.clock import SystemClock
from kvatlas.config import ServeConfig, WorkerConfig
from kvatlas.events import BlockStored
from kvatlas.fleet import Fleet
from kvatlas.gateway import Target
from kvatlas.gateway.fleet_planner import ANY_MODEL, FleetPlanner
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex
from kvatlas.rendering import LocalRenderer, parse_request, write_tiny_model
from kvatlas.routing import DecisionLog, Picker, make_policy

__all__ = ["routed_planner"]

_WORKERS = 8
_BLOCK_SIZE = 16


async def routed_planner(targets: tuple[Target, ...]) -> FleetPlanner:
    """A `cost` planner over eight workers at the address of the first target."""
    target = targets[0]
    url = f"http://{target.host}:{target.port}"
    workers = tuple(WorkerConfig(url=url, rank=rank, block_size=_BLOCK_SIZE) for rank in range(_WORKERS))
    config = ServeConfig(workers=workers, seed=1, health_interval_s=3600.0)
    clock = SystemClock()
    index = PrefixIndex(BlockKeyHasher(1))
    fleet = Fleet(config, index, clock)
    await fleet.start()
    renderer = _tiny_renderer()
    _fill(index, renderer)
    log = DecisionLog(config.decision_log_size)
    picker = Picker(make_policy(config.policy, seed=1), clock, log)
    return FleetPlanner(
        fleet,
        index,
        picker,
        log,
        renderers={ANY_MODEL: renderer},
        session=aiohttp.ClientSession(),
        config=config,
    )


def _tiny_renderer() -> LocalRenderer:
    with tempfile.TemporaryDirectory(prefix="kvatlas-bench-") as folder:
        write_tiny_model(Path(folder))
        return LocalRenderer.load(folder)


def _fill(index: PrefixIndex, renderer: LocalRenderer) -> None:
    """Every worker holds all whole blocks of the load's prompt."""
    body = request_bytes(stream=False).partition(b"\r\n\r\n")[2]
    (prompt,) = renderer.render_now(parse_request("/v1/chat/completions", body))
    blocks = len(prompt.token_ids) // _BLOCK_SIZE
    event = BlockStored(
        block_hashes=list(range(1, blocks + 1)),
        parent_block_hash=None,
        token_ids=prompt.token_ids[: blocks * _BLOCK_SIZE],
        block_size=_BLOCK_SIZE,
        medium="GPU",
    )
    for worker_id in index.worker_ids:
        index.apply(worker_id, event)
