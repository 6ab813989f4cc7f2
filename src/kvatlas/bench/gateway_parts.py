"""What the parts of the routed path cost, each alone: the fleet's planner without the moving of bytes.

Alone a part finds its code and data in the processor's caches; between socket calls of other connections it does not,
so the parts add up to less than `kvatlas bench gateway` shows. They tell where the time goes.
"""

import asyncio
import time
from collections.abc import Callable

from kvatlas.bench.backend import CACHED_TOKENS, PROMPT_TOKENS
from kvatlas.bench.load import request_bytes
from kvatlas.bench.processes import child
from kvatlas.bench.report import BenchReport, BenchRow, machine_name
from kvatlas.bench.routed_planner import RoutedParts, routed_parts
from kvatlas.errors import ConfigError
from kvatlas.gateway import GatewayRequest, Outcome, Plan, Target
from kvatlas.gateway.candidates import candidate_of, promises_of
from kvatlas.rendering import parse_request
from kvatlas.routing import RoutingRequest

__all__ = ["run_gateway_parts_bench"]

_PATH = "/v1/chat/completions"
_CALLS = 100
_TURNS = 40
_OUTCOME = Outcome("ok", 200, 0.01, 0.01, CACHED_TOKENS, PROMPT_TOKENS, 16)
_Part = tuple[str, Callable[[], object]]


def run_gateway_parts_bench() -> BenchReport:
    """Measure the parts; of 40 turns of 100 calls each, the cheapest counts.

    Raises:
        ConfigError: the planner promises something else than the stand-in engine reports.
    """
    with child("kvatlas.bench.backend") as backend:
        return asyncio.run(_measure(backend.port))


async def _measure(port: int) -> BenchReport:
    routed = await routed_parts(Target("w1", "127.0.0.1", port))
    parts = _parts(routed)
    costs = {name: [_cpu_us(call) for _ in range(_TURNS)] for name, call in parts}
    return BenchReport(
        machine_name(), [BenchRow(f"part: {name}", "cpu us", round(min(each), 1)) for name, each in costs.items()]
    )


def _cpu_us(call: Callable[[], object]) -> float:
    start_ns = time.process_time_ns()
    for _ in range(_CALLS):
        call()
    return (time.process_time_ns() - start_ns) / _CALLS / 1000


def _parts(routed: RoutedParts) -> list[_Part]:
    planner, renderer, index = routed.planner, routed.renderer, routed.index
    head, _, body = request_bytes(stream=False).partition(b"\r\n\r\n")
    request = GatewayRequest("r", "POST", _PATH.encode(), _PATH, head[head.index(b"\r\n") :], body)
    parsed = parse_request(_PATH, body)
    assert parsed.chat is not None  # noqa: S101 - the load's own request
    chat = parsed.chat
    text = renderer.apply_chat_template(chat)
    (prompt,) = renderer.render_now(parsed)
    workers = routed.fleet.candidates(parsed.model)
    ids = [worker.worker_id for worker in workers]
    match = index.match(prompt.token_ids, worker_ids=ids)
    promised = promises_of(workers, match)
    asked = RoutingRequest("r", PROMPT_TOKENS, parsed.max_tokens)

    def judge() -> object:
        return [candidate_of(w, match[w.worker_id].hit_tokens, 0, promised.get(w.worker_id)) for w in workers]

    candidates = [candidate_of(w, match[w.worker_id].hit_tokens, 0, promised.get(w.worker_id)) for w in workers]

    def plan() -> Plan:
        made = planner.plan(request)
        if not isinstance(made, Plan) or made.predicted_tokens != CACHED_TOKENS:
            raise ConfigError(f"the plan is {made}: expected one that promises {CACHED_TOKENS} cached tokens")
        return made

    def whole() -> None:
        made = plan()
        planner.dispatched(request, made, made.targets[0])
        planner.first_byte(request, made, made.targets[0])
        planner.finished(request, made, made.targets[0], _OUTCOME)

    return [
        ("read the body", lambda: parse_request(_PATH, body)),
        ("chat template", lambda: renderer.apply_chat_template(chat)),
        ("template and tokens of a text seen before", lambda: renderer.render_now(parsed)),
        ("tokenising that text, were it new", lambda: renderer.tokenize(text, add_special_tokens=False)),
        ("hash 53 blocks and look them up for 8 workers", lambda: index.match(prompt.token_ids, worker_ids=ids)),
        ("judge 8 workers", judge),
        ("score them, pick, keep the decision", lambda: routed.picker.decide(asked, candidates)),
        ("the whole plan", plan),
        ("plan, dispatch, audit and settle", whole),
    ]
