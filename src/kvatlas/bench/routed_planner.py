"""The planner a fleet really uses, for the gateway benchmark: parse, render, hash, look up, pick, keep the books.

The one stand-in engine plays eight workers (eight ranks of one address), each of which is known to hold the load's
prompt, so that every request walks the whole index, every candidate is scored, and what is promised is reported.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from kvatlas.bench.load import request_bytes
from kvatlas.clock import SystemClock
from kvatlas.config import ServeConfig, WorkerConfig
from kvatlas.events import BlockStored
from kvatlas.fleet import Fleet, Trust
from kvatlas.gateway import Target
from kvatlas.gateway.fleet_planner import ANY_MODEL, FleetPlanner
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex
from kvatlas.rendering import LocalRenderer, parse_request, write_tiny_model
from kvatlas.routing import DecisionLog, Picker, make_policy

__all__ = ["RoutedParts", "routed_parts", "routed_planner"]

_WORKERS = 8
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class RoutedParts:
    """The planner and what it is made of."""

    planner: FleetPlanner
    fleet: Fleet
    index: PrefixIndex
    picker: Picker
    renderer: LocalRenderer
    session: aiohttp.ClientSession

    async def close(self) -> None:
        """Stop what runs in the background."""
        await self.fleet.close()
        await self.session.close()


async def routed_planner(targets: tuple[Target, ...]) -> FleetPlanner:
    """A `cost` planner over eight workers at the address of the first target."""
    return (await routed_parts(targets[0])).planner


async def routed_parts(target: Target) -> RoutedParts:
    """The same with its parts."""
    url = f"http://{target.host}:{target.port}"
    workers = tuple(WorkerConfig(url=url, rank=rank, block_size=_BLOCK_SIZE) for rank in range(_WORKERS))
    config = ServeConfig(workers=workers, seed=1, health_interval_s=3600.0)
    clock = SystemClock()
    index = PrefixIndex(BlockKeyHasher(1))
    fleet = Fleet(config, index, clock)
    await fleet.start()
    for worker in fleet.workers:
        worker.trust.become(Trust.SYNCED, "the benchmark stores its blocks itself", clock.monotonic_s())
    renderer = _tiny_renderer()
    _fill(index, renderer)
    log = DecisionLog(config.decision_log_size)
    picker = Picker(make_policy(config.policy, seed=1), clock, log)
    session = aiohttp.ClientSession()
    planner = FleetPlanner(
        fleet,
        index,
        picker,
        log,
        renderers={ANY_MODEL: renderer},
        session=session,
        config=config,
    )
    return RoutedParts(planner, fleet, index, picker, renderer, session)


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
