"""What the gateway costs: processor time per JSON request and per SSE event, beside a peer in the same run.

Processor time of the proxy process is reported and not requests per second, because on a shared machine only the former
says something about the proxy. Backend, proxy and load are three processes on loopback. Ours and the peers take turns;
of several rounds the smallest value counts, as the one least disturbed.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from kvatlas.bench.load import TURN_BYTES, LoadResult
from kvatlas.bench.processes import Child, child, run_module
from kvatlas.bench.proxies import PEERS, planner_factory
from kvatlas.bench.report import BenchReport, BenchRow, machine_name
from kvatlas.errors import ConfigError

__all__ = ["run_gateway_bench"]

_MAX_DURATION_S = 30.0
_WARM_UP_S = 0.5
_OURS = "kvatlas"
_JSON_CONNECTIONS = 32
_SSE_STREAMS = 64
_JSON_WORK = f"gateway: JSON, 1 kB in, 500 B out, {_JSON_CONNECTIONS} connections"
_TURNS_WORK = (
    "gateway: JSON, conversations of {turns} turns, "
    f"{2 * TURN_BYTES} B new in each, 500 B out, {_JSON_CONNECTIONS} connections"
)
_SSE_WORK = f"gateway: SSE, {_SSE_STREAMS} streams, one event per 5 ms each"


def run_gateway_bench(
    duration_s: float = 3.0,
    *,
    json: bool = True,
    sse: bool = True,
    turns: int = 0,
    against: Sequence[str] = ("aiohttp",),
    planner: str = "kvatlas.gateway:FixedPlanner",
    rounds: int = 2,
) -> BenchReport:
    """Measure the gateway and its peers.

    Args:
        duration_s: of each measured run; there are `rounds` x works x (ours, peers) of them, each after half a
            second of warm-up.
        json: measure JSON requests.
        sse: measure event streams.
        turns: with 1 or more, measure conversations of so many turns, each of which brings text never seen before.
        against: peers by name; `aiohttp` is a pass-through proxy of the same duties and none of the safety.
        planner: `module:callable` given a tuple of targets (one, the stand-in engine); it returns a planner or an
            awaitable of one. The default is the trivial planner.
        rounds: how often each measurement is repeated.

    Raises:
        ConfigError: an unknown peer or planner, a duration outside (0, 30] s, or a request that failed.
    """
    if not 0 < duration_s <= _MAX_DURATION_S or rounds < 1:
        raise ConfigError(
            f"{rounds} rounds of {duration_s} s were asked: expected 1 or more of at most {_MAX_DURATION_S} s"
        )
    unknown = [name for name in against if name not in PEERS]
    if unknown:
        raise ConfigError(f"unknown peer {unknown[0]!r}: expected one of {', '.join(sorted(PEERS))}")
    planner_factory(planner)
    costs: dict[tuple[str, str], float] = {}
    choices = (
        ("json", _JSON_WORK, json),
        ("turns", _TURNS_WORK.format(turns=turns), turns),
        ("sse", _SSE_WORK, sse),
    )
    works = [(mode, work) for mode, work, wanted in choices if wanted]
    with ExitStack() as running:
        backend = running.enter_context(child("kvatlas.bench.backend"))
        proxies = {
            name: running.enter_context(child("kvatlas.bench.proxies", name, str(backend.port), planner))
            for name in (_OURS, *against)
        }
        for _ in range(rounds):
            for mode, work in works:
                for name, proxy in proxies.items():
                    cost_us = _cost_us(proxy, mode, duration_s, turns)
                    costs[work, name] = min(cost_us, costs.get((work, name), cost_us))
    return BenchReport(machine_name(), [row for mode, work in works for row in _rows(mode, work, costs, against)])


def _cost_us(proxy: Child, mode: str, duration_s: float, turns: int) -> float:
    """Processor microseconds of the proxy per request or event."""
    _load(proxy.port, mode, _WARM_UP_S, turns)
    before_us = proxy.cpu_us()
    result = _load(proxy.port, mode, duration_s, turns)
    used_us = proxy.cpu_us() - before_us
    return used_us / (result.events if mode == "sse" else result.requests)


def _load(port: int, mode: str, seconds: float, turns: int) -> LoadResult:
    connections = _SSE_STREAMS if mode == "sse" else _JSON_CONNECTIONS
    arguments = [str(port), mode, str(connections), str(seconds), str(turns)]
    printed = run_module("kvatlas.bench.load", arguments, timeout_s=seconds * 5 + 40)
    result = msgspec.json.decode(printed, type=LoadResult)
    if result.errors or not result.requests:
        raise ConfigError(f"{result.errors} of {connections} connections of the load failed: there are no figures")
    return result


def _rows(mode: str, work: str, costs: dict[tuple[str, str], float], against: Sequence[str]) -> list[BenchRow]:
    unit = "cpu us/event" if mode == "sse" else "cpu us/request"
    ours = costs[work, _OURS]
    if not against:
        return [BenchRow(work, unit, round(ours, 2))]
    return [
        BenchRow(work, unit, round(ours, 2), name, round(costs[work, name], 2), round(costs[work, name] / ours, 2))
        for name in against
    ]
