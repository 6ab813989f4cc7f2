"""What the parts of the routed path cost, one by one: the fleet's planner without the moving of bytes.

The parts are called in turns, so that each finds the processor's caches as the others left them: called alone again and
again it would cost half.
"""

import asyncio
import random
import time
from collections.abc import Callable
from statistics import median

from kvatlas.bench.backend import CACHED_TOKENS, PROMPT_TOKENS
from kvatlas.bench.load import TURN_BYTES, conversations, request_bytes
from kvatlas.bench.processes import child
from kvatlas.bench.report import BenchReport, BenchRow, machine_name
from kvatlas.bench.routed_planner import RoutedParts, routed_parts
from kvatlas.errors import ConfigError
from kvatlas.gateway import GatewayRequest, Outcome, Plan, Target
from kvatlas.gateway.candidates import candidates_of
from kvatlas.rendering import ParsedRequest, parse_request
from kvatlas.routing import RoutingRequest

__all__ = ["run_gateway_parts_bench"]

_PATH = "/v1/chat/completions"
_TALK_TURNS = 8
_OUTCOME = Outcome("ok", 200, 0.01, 0.01, CACHED_TOKENS, PROMPT_TOKENS, 16)
_Part = tuple[str, Callable[[], object]]


def run_gateway_parts_bench(turns: int = 2000) -> BenchReport:
    """Measure the parts: medians of so many turns.

    Raises:
        ConfigError: the planner promises something else than the stand-in engine reports.
    """
    with child("kvatlas.bench.backend") as backend:
        return asyncio.run(_measure(backend.port, turns))


async def _measure(port: int, turns: int) -> BenchReport:
    routed = await routed_parts(Target("w1", "127.0.0.1", port))
    try:
        parts: list[_Part] = [("", lambda: None), *_parts(routed), *_talk_parts(routed, turns)]
        costs_ns: list[list[int]] = [[] for _ in parts]
        for _ in range(turns):
            for (_, call), taken_ns in zip(parts, costs_ns, strict=True):
                start_ns = time.thread_time_ns()
                call()
                taken_ns.append(time.thread_time_ns() - start_ns)
    finally:
        await routed.close()
    nothing_ns, *medians_ns = [median(taken_ns) for taken_ns in costs_ns]
    return BenchReport(
        machine_name(),
        [
            BenchRow(f"part: {name}", "cpu us", round((taken_ns - nothing_ns) / 1000, 1))
            for (name, _), taken_ns in zip(parts[1:], medians_ns, strict=True)
        ],
    )


def _parts(routed: RoutedParts) -> list[_Part]:
    """Of the load's repeated request; the last two hold all before them."""
    planner, renderer, index = routed.planner, routed.renderer, routed.index
    head, _, body = request_bytes(stream=False).partition(b"\r\n\r\n")
    request = GatewayRequest("r", "POST", _PATH.encode(), _PATH, head[head.index(b"\r\n") :], body)
    parsed = parse_request(_PATH, body)
    (prompt,) = renderer.render_now(parsed)
    workers = routed.fleet.candidates(parsed.model)
    ids = [worker.worker_id for worker in workers]
    match = index.match(prompt.token_ids, worker_ids=ids)
    asked = RoutingRequest("r", PROMPT_TOKENS, parsed.max_tokens)

    candidates = candidates_of(workers, match)

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
        ("chat template, and tokens of turns seen before", lambda: renderer.render_now(parsed)),
        ("hash 53 blocks, look them up for 8 workers", lambda: index.match(prompt.token_ids, worker_ids=ids)),
        ("judge 8 workers", lambda: candidates_of(workers, match)),
        ("score them, pick, keep the decision", lambda: routed.picker.decide(asked, candidates)),
        ("all of a plan", plan),
        ("plan, dispatch, audit, settle", whole),
    ]


def _talk_parts(routed: RoutedParts, turns: int) -> list[_Part]:
    """Of conversations, whose turns come in order."""
    whole = iter(_talk(1, turns))
    # Other words than those: a tokenizer remembers words, too.
    texts = iter([_new_texts(request) for request in _talk(2, turns)])
    encode = routed.renderer.tokenizer.encode_many
    size = f"{2 * TURN_BYTES} B"
    return [
        (f"chat template and tokens of a next turn, {size} new", lambda: routed.renderer.render_now(next(whole))),
        (f"the tokenizer alone, {size} new", lambda: encode(next(texts), add_special_tokens=False)),
    ]


def _talk(seed: int, turns: int) -> list[ParsedRequest]:
    requests = conversations(_TALK_TURNS, random.Random(seed))
    return [parse_request(_PATH, next(requests).partition(b"\r\n\r\n")[2]) for _ in range(turns)]


def _new_texts(request: ParsedRequest) -> list[str]:
    messages = () if request.chat is None else request.chat.messages[-2:]
    return [message["content"] for message in messages]
