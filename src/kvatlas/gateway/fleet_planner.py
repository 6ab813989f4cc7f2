"""The planner of a real fleet: render the prompt, ask the index, let the policy pick, keep the books.

A request that cannot be rendered, or whose path carries no prompt, is still served: it is routed by load alone, makes
no prediction, and its decision record says why.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Mapping
from dataclasses import replace

import aiohttp
import msgspec

from kvatlas.config import ServeConfig
from kvatlas.errors import ModelNotFound, NoWorkerAvailable, PathNotForwarded, RenderError
from kvatlas.fleet import Fleet, Trust, Worker
from kvatlas.gateway.candidates import HitUse, Promises, UncachedTokens, candidates_of
from kvatlas.gateway.forwarded_paths import FORWARDED_PATHS, FORWARDED_PREFIXES, is_forwarded
from kvatlas.gateway.settlement import Books, Settlement
from kvatlas.gateway.values import GatewayRequest, Outcome, Plan, Reply, Target
from kvatlas.hashing import Lora
from kvatlas.index import PrefixIndex, WorkerMatch
from kvatlas.rendering import (
    EngineRenderer,
    LocalRenderer,
    ParsedRequest,
    RenderedPrompt,
    TokenCache,
    extras_of,
    parse_request,
    with_report_mode,
    without_report_mode,
)
from kvatlas.routing import Decision, DecisionLog, DecisionRecord, Picker, RoutingRequest

__all__ = ["ANY_MODEL", "FleetPlan", "FleetPlanner"]

_log = logging.getLogger(__name__)

ANY_MODEL = "*"
"""Key of the tokenizer that serves every model without one of its own."""
_INLINE_RENDER_BYTES = 8192
"""Bodies up to this size are rendered on the event loop; larger ones in a thread."""
_INLINE_PARSE_BYTES = 262_144
"""Bodies up to this size are read on the event loop (about 1 us per kB); larger ones in a thread."""
_MAX_MATCHED_TOKENS = 131_072
"""Tokens of a prompt that are looked up (about 20 ms); what lies beyond counts as not cached."""
_MAX_REMOTE_TEXTS = 16
"""Texts of one request that an engine's /tokenize is asked for, one call each."""
_PROMPT_PATHS = frozenset(("/v1/chat/completions", "/v1/completions"))
_GENERATES = frozenset(("completions", "chat"))
_UNRENDERED_BYTES_PER_TOKEN = 4
_MAX_GUESSED_TOKENS = 4096
"""Guess of a prompt's length where it could not be tokenised: only its share of the load rests on it."""


class _Rendered(msgspec.Struct, frozen=True, gc=False):
    """A request's prompts, or why there are none."""

    prompts: tuple[RenderedPrompt, ...] = ()
    without_index: str | None = None


class FleetPlan(Plan, frozen=True, gc=True):
    """A plan with its decision and its books."""

    decision: Decision | None = None
    books: Books | None = None

    @property
    def record(self) -> DecisionRecord | None:
        """The decision as it is shown; made anew."""
        return None if self.decision is None else self.decision.record()


class FleetPlanner:
    """Plans requests over a fleet.

    Args:
        renderers: model name (or `ANY_MODEL`) -> local renderer; where none fits, the engine's own /tokenize is asked.
        session: for those calls; stays the caller's.
        config: how long rendering off the event loop may take, whether engines' admin routes are for everybody, and how
            often a worker whose cache is not wholly known is asked for a report.

    The planner's own cost per request is the rendering, one walk of the index per distinct block size and one policy
    call.
    """

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        picker: Picker,
        decisions: DecisionLog,
        *,
        renderers: Mapping[str, LocalRenderer],
        session: aiohttp.ClientSession,
        config: ServeConfig,
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._picker = picker
        self._decisions = decisions
        self._renderers = dict(renderers)
        self._session = session
        self._render_timeout_s = config.render_timeout_s
        self._forward_all_paths = config.forward_all_paths
        self._full_report_share = config.full_report_share
        self._random = random.Random()
        self._engine_renderers: dict[str, EngineRenderer] = {}
        self._targets: dict[str, Target] = {}
        self._turn = 0
        self._settlement = Settlement(fleet, index)
        self.render_errors = 0

    def plan(self, request: GatewayRequest) -> Plan | Reply | Awaitable[Plan]:
        """Choose workers for a request.

        Raises:
            PathNotForwarded: the path is not for clients.
            BadRequest: the body is not what its path asks for.
            ModelNotFound: nobody serves the model.
            NoWorkerAvailable: nobody is healthy.
        """
        if request.path not in _PROMPT_PATHS and not self._forward_all_paths and not is_forwarded(request.path):
            raise PathNotForwarded(_not_forwarded(request.path))
        if request.path == "/v1/models" and (reply := self._all_models()) is not None:
            return reply
        if len(request.body) > _INLINE_PARSE_BYTES:
            return self._plan_large(request)
        return self._plan_parsed(request, parse_request(request.path, request.body))

    def _plan_parsed(self, request: GatewayRequest, parsed: ParsedRequest) -> Plan | Awaitable[Plan]:
        workers = self._candidates(parsed.model)
        if parsed.api == "other":
            return self._decide(request, parsed, workers, _Rendered(without_index="no prompt on this path"))
        if parsed.unsupported is not None:
            return self._unrendered(request, parsed, workers, parsed.unsupported)
        if parsed.chat is None and all(not isinstance(prompt, str) for prompt in parsed.prompts):
            extras = extras_of(parsed)
            prompts = tuple(RenderedPrompt(prompt, extras) for prompt in parsed.prompts if not isinstance(prompt, str))
            return self._decide(request, parsed, workers, _Rendered(prompts))
        renderer = self._renderers.get(parsed.model or ANY_MODEL) or self._renderers.get(ANY_MODEL)
        if renderer is None:
            if len(parsed.prompts) > _MAX_REMOTE_TEXTS:
                why = f"{len(parsed.prompts)} texts are too many to ask an engine for; configure a tokenizer"
                return self._unrendered(request, parsed, workers, why)
            return self._plan_later(request, parsed, self._engine_renderer(workers), workers)
        if parsed.body_bytes > _INLINE_RENDER_BYTES:
            return self._plan_later(request, parsed, renderer, workers)
        try:
            prompts = renderer.render_now(parsed)
        except RenderError as error:
            return self._unrendered(request, parsed, workers, error.message)
        return self._decide(request, parsed, workers, _Rendered(prompts))

    async def _plan_large(self, request: GatewayRequest) -> Plan:
        parsed = await asyncio.to_thread(parse_request, request.path, request.body)
        planned = self._plan_parsed(request, parsed)
        return planned if isinstance(planned, Plan) else await planned

    def dispatched(self, request: GatewayRequest, plan: Plan, target: Target) -> None:
        """Charge the worker before its connection is even made, so that the next decision sees it."""
        books = _books_of(plan)
        if books is not None:
            self._settlement.dispatched(books, target)

    def first_byte(self, request: GatewayRequest, plan: Plan, target: Target) -> None:
        """The first token of a stream: the worker's prefill is over. Other answers come whole and tell nothing."""
        books = _books_of(plan)
        if books is not None:
            self._settlement.first_byte(books, target)

    def finished(self, request: GatewayRequest, plan: Plan, target: Target | None, outcome: Outcome) -> None:
        """Settle the books, note the engine's word in the decision, look at engines that failed."""
        if target is None:
            return
        books = _books_of(plan)
        if books is not None:
            self._settlement.finished(books, target, outcome)
        if outcome.kind in ("connect_error", "upstream_error", "timeout"):
            self._fleet.check_soon(target.worker_id)
        if outcome.cached_tokens is not None and isinstance(plan, FleetPlan) and plan.decision is not None:
            self._decisions.note_outcome(
                plan.decision.request_id, actual_tokens=outcome.cached_tokens, served_by=target.worker_id
            )

    def ready(self) -> bool:
        """Whether any worker is healthy."""
        return self._fleet.ready

    @property
    def token_caches(self) -> frozenset[TokenCache]:
        """What the renderers remember of turns."""
        return frozenset(renderer.cache for renderer in self._renderers.values())

    async def _plan_later(
        self,
        request: GatewayRequest,
        parsed: ParsedRequest,
        renderer: LocalRenderer | EngineRenderer,
        workers: list[Worker],
    ) -> Plan:
        try:
            prompts = await asyncio.wait_for(renderer.render(parsed), self._render_timeout_s)
        except TimeoutError:
            why = f"tokenising took longer than {self._render_timeout_s} s"
            return self._unrendered(request, parsed, workers, why)
        except RenderError as error:
            return self._unrendered(request, parsed, workers, error.message)
        # Workers may have died while the prompt was rendered: ask again.
        return self._decide(request, parsed, self._candidates(parsed.model), _Rendered(prompts))

    def _unrendered(self, request: GatewayRequest, parsed: ParsedRequest, workers: list[Worker], why: str) -> Plan:
        self.render_errors += 1
        return self._decide(request, parsed, workers, _Rendered(without_index=why))

    def _candidates(self, model: str | None) -> list[Worker]:
        workers = self._fleet.candidates(model)
        if workers:
            return workers
        concerned = [worker for worker in self._fleet.workers if worker.serves(model)]
        if self._fleet.ready and not concerned:
            served = ", ".join(self._fleet.models) or "unknown"
            raise ModelNotFound(f"The model `{model}` does not exist. Models served here: {served}.")
        reasons = "; ".join(f"{w.worker_id}: {w.health_reason}" for w in concerned) or "none is configured"
        raise NoWorkerAvailable(f"no healthy worker: {reasons}. Try again later.")

    def _decide(
        self, request: GatewayRequest, parsed: ParsedRequest, workers: list[Worker], rendered: _Rendered
    ) -> FleetPlan:
        prompts = [self._as_cached(prompt, parsed.model, workers) for prompt in rendered.prompts]
        matches = [] if parsed.skips_cache else [self._match(prompt, workers) for prompt in prompts]
        if rendered.without_index is None:
            prompt_tokens = 0
            for prompt in rendered.prompts:
                prompt_tokens += len(prompt.token_ids)
        else:
            prompt_tokens = min(parsed.body_bytes // _UNRENDERED_BYTES_PER_TOKEN, _MAX_GUESSED_TOKENS)
        found = matches[0] if len(matches) == 1 else _together(matches)
        promised = _promises(parsed, rendered.prompts, workers)
        use = HitUse(self._index, prompts[0]) if len(matches) == 1 else None
        candidates = candidates_of(workers, found, promised=promised, use=use)
        asked = RoutingRequest(request.request_id, prompt_tokens, parsed.max_tokens)
        decision = self._picker.decide(asked, candidates, without_index=rendered.without_index)
        alone = len(matches) == 1 and parsed.unpredictable is None
        chosen_first = (decision.candidates[decision.best], *candidates)
        books = Books(
            UncachedTokens(prompt_tokens, chosen_first),
            Promises(chosen_first),
            prompt_tokens if len(prompts) == 1 else None,
            parsed.stream,
            prompts[0] if alone else None,
            matches[0] if alone else {},
        )
        targets = self._targets_of(decision.order, workers)
        if len(targets) == 1:  # a second target, should the only one refuse the connection
            spare = self._fleet.left_out(parsed.model)[:1]
            targets += self._targets_of(tuple(worker.worker_id for worker in spare), spare)
        return FleetPlan(
            targets=targets,
            predicted_tokens=decision.predicted_tokens,
            body=self._changed_body(request, parsed, decision.chosen),
            decision=decision,
            books=books,
            measures_ttft=parsed.stream and parsed.api in _GENERATES,
        )

    def _changed_body(self, request: GatewayRequest, parsed: ParsedRequest, chosen: str) -> bytes | None:
        """The body to send instead of the client's; None for almost every request."""
        share = self._full_report_share
        if (
            share
            and parsed.api != "other"
            and (worker := self._fleet.get(chosen)) is not None
            and worker.trust.level.is_credited
            and self._index.may_ask_for_report(chosen)
            and self._random.random() < share
        ):
            return with_report_mode(request.body)
        return without_report_mode(request.body) if parsed.asks_full_report else None

    def _as_cached(self, prompt: RenderedPrompt, model: str | None, workers: list[Worker]) -> RenderedPrompt:
        """The prompt with the adapter that is part of its blocks, cut to what is looked up."""
        extras, token_ids = prompt.extras, prompt.token_ids
        for worker in workers:
            if worker.adapters and model in worker.adapters:
                extras = replace(extras, lora=Lora(model or ""))
                break
        if extras is prompt.extras and len(token_ids) <= _MAX_MATCHED_TOKENS:
            return prompt
        return RenderedPrompt(token_ids[:_MAX_MATCHED_TOKENS], extras)

    def _match(self, prompt: RenderedPrompt, workers: list[Worker]) -> dict[str, WorkerMatch]:
        worker_ids = [worker.worker_id for worker in workers]
        return self._index.match(prompt.token_ids, extras=prompt.extras, worker_ids=worker_ids)

    def _all_models(self) -> Reply | None:
        """The models of all healthy workers, each once; None where any one worker can answer for all."""
        workers = [worker for worker in self._fleet.workers if worker.healthy]
        if len({worker.models for worker in workers}) < 2:
            return None
        plain = {
            model: b'{"id":%b,"object":"model"}' % msgspec.json.encode(model) for w in workers for model in w.models
        }
        cards = plain | {model: card for w in workers for model, card in w.model_cards.items() if model in plain}
        return Reply(200, b'{"object":"list","data":[%b]}' % b",".join(cards[model] for model in sorted(cards)))

    def _engine_renderer(self, workers: list[Worker]) -> EngineRenderer:
        self._turn += 1
        url = workers[self._turn % len(workers)].base_url
        renderer = self._engine_renderers.get(url)
        if renderer is None:
            renderer = EngineRenderer(url, self._session, timeout_s=self._render_timeout_s)
            self._engine_renderers[url] = renderer
        return renderer

    def _targets_of(self, order: tuple[str, ...], workers: list[Worker]) -> tuple[Target, ...]:
        targets = self._targets
        try:
            return tuple([targets[worker_id] for worker_id in order])
        except KeyError:
            targets.update({w.worker_id: _target_of(w) for w in workers if w.worker_id not in targets})
            return tuple([targets[worker_id] for worker_id in order])


def _target_of(worker: Worker) -> Target:
    rank = worker.config.rank
    headers = () if rank is None else ((b"X-data-parallel-rank", b"%d" % rank),)
    return Target(worker.worker_id, worker.host.strip("[]"), worker.port, worker.base_path, headers)


def _not_forwarded(path: str) -> str:
    return (
        f"path {path[:100]!r} is not forwarded to engines: {', '.join(FORWARDED_PREFIXES)}... (less LoRA loading), "
        f"{', '.join(sorted(FORWARDED_PATHS))} are; forward_all_paths = true in the gateway's settings opens the rest"
    )


def _books_of(plan: Plan) -> Books | None:
    return plan.books if isinstance(plan, FleetPlan) else None


def _together(matches: list[dict[str, WorkerMatch]]) -> dict[str, WorkerMatch]:
    """What each worker holds, and may hold, of several prompts."""
    found: dict[str, WorkerMatch] = {}
    for match in matches:
        for worker_id, each in match.items():
            sums = found.setdefault(worker_id, WorkerMatch(0, 0, each.block_size, exact=False))
            sums.hit_tokens += each.hit_tokens
            sums.doubted_tokens += each.doubted_tokens
    return found


def _promises(
    parsed: ParsedRequest, prompts: tuple[RenderedPrompt, ...], workers: list[Worker]
) -> dict[str, int] | None:
    """Cached tokens each worker will report, where matches do not say; None where they do.

    Nobody promises where the engine's count depends on more than the cache as it is now: several prompts or sequences
    hit each other's blocks, and a prompt beyond what is looked up may hit further.
    """
    if len(prompts) != 1 or parsed.unpredictable is not None or len(prompts[0].token_ids) > _MAX_MATCHED_TOKENS:
        return {}
    if parsed.skips_cache:
        return {worker.worker_id: 0 for worker in workers if worker.trust.level is Trust.SYNCED}
    return None
