"""JSON over HTTP about a running gateway. Errors have the gateway's shape: {"error": {"message", "type", "code"}}."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvatlas import __version__
from kvatlas.admin.metrics import MetricsCollector
from kvatlas.admin.views import WorkerView, view_worker
from kvatlas.clock import Clock
from kvatlas.errors import BadRequest, DecisionNotFound, KvAtlasError
from kvatlas.fleet import SNAPSHOT_PATH, Fleet, SnapshotStats, fleet_snapshot
from kvatlas.gateway import GatewayStats
from kvatlas.gateway.fleet_planner import FleetPlanner
from kvatlas.gateway.responses import error_body
from kvatlas.hashing import Lora, RequestExtras
from kvatlas.index import PrefixIndex
from kvatlas.routing import DecisionLog, DecisionRecord

__all__ = ["AdminState", "make_admin_app"]

_MAX_QUERY_BYTES = 16 * 1024 * 1024
_DECISIONS_SHOWN = 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdminState:
    """What the admin app shows."""

    fleet: Fleet
    index: PrefixIndex
    decisions: DecisionLog
    planner: FleetPlanner
    gateway: GatewayStats
    policy: str
    clock: Clock
    snapshots: SnapshotStats | None = None


class _Workers(msgspec.Struct):
    policy: str
    workers: list[WorkerView]


class _Query(msgspec.Struct, forbid_unknown_fields=True):
    token_ids: list[int]
    lora: str | None = None
    cache_salt: str | None = None


class _Hit(msgspec.Struct):
    hit_tokens: int
    trust: str
    tiers: dict[str, int]


class _Hits(msgspec.Struct):
    workers: dict[str, _Hit]


class _Decisions(msgspec.Struct):
    decisions: list[DecisionRecord]


class _Endpoint(msgspec.Struct):
    method: str
    path: str
    shows: str


class _Index(msgspec.Struct):
    version: str
    endpoints: list[_Endpoint]


_ENDPOINTS = [
    _Endpoint("GET", "/metrics", "Prometheus metrics"),
    _Endpoint("GET", "/health", "200 while the gateway runs"),
    _Endpoint("GET", "/api/workers", "health, trust, event stream, load and predictions of each worker"),
    _Endpoint("GET", "/api/decisions", "the newest routing decisions; ?limit=N, 20 unless given"),
    _Endpoint("GET", "/api/decisions/{request_id}", "why one request went where it went"),
    _Endpoint("POST", "/api/index/query", 'who holds a prompt: {"token_ids": [...], "lora": ..., "cache_salt": ...}'),
    _Endpoint("GET", SNAPSHOT_PATH, "the whole index as bytes, for `bootstrap_from` and `kvatlas index`"),
]


def make_admin_app(state: AdminState) -> web.Application:
    """The admin app over a running gateway's state. Serve it on a private address: it has no authentication."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(
        MetricsCollector(
            state.fleet,
            state.index,
            state.gateway,
            state.planner,
            started_s=state.clock.wall_s(),
            snapshots=state.snapshots,
        )
    )
    handlers = _Handlers(state, registry)
    app = web.Application(middlewares=[_errors_as_json], client_max_size=_MAX_QUERY_BYTES)
    app.router.add_get("/", handlers.endpoints)
    app.router.add_get("/metrics", handlers.metrics)
    app.router.add_get("/health", handlers.health)
    app.router.add_get("/api/workers", handlers.workers)
    app.router.add_get("/api/decisions", handlers.decisions)
    app.router.add_get("/api/decisions/{request_id}", handlers.decision)
    app.router.add_post("/api/index/query", handlers.query)
    app.router.add_get(SNAPSHOT_PATH, handlers.snapshot)
    return app


class _Handlers:
    def __init__(self, state: AdminState, registry: CollectorRegistry) -> None:
        self._state = state
        self._registry = registry

    async def endpoints(self, _: web.Request) -> web.Response:
        return _json(_Index(__version__, _ENDPOINTS))

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def workers(self, _: web.Request) -> web.Response:
        state = self._state
        now_s = state.clock.monotonic_s()
        return _json(_Workers(state.policy, [view_worker(w, state.index, now_s) for w in state.fleet.workers]))

    async def decisions(self, request: web.Request) -> web.Response:
        text = request.query.get("limit", str(_DECISIONS_SHOWN))
        if not text.isdecimal() or not int(text):
            raise BadRequest(f"limit {text!r} is not a number of decisions: expected 1 or more")
        return _json(_Decisions(self._state.decisions.recent(int(text))))

    async def decision(self, request: web.Request) -> web.Response:
        request_id = request.match_info["request_id"]
        record = self._state.decisions.get(request_id)
        if record is None:
            raise DecisionNotFound(
                f"no decision for request {request_id!r}: never routed here, or replaced by newer records; "
                "/api/decisions lists the newest"
            )
        return _json(record)

    async def query(self, request: web.Request) -> web.Response:
        try:
            query = msgspec.json.decode(await request.read(), type=_Query)
        except msgspec.DecodeError as error:
            raise BadRequest(f'the body is not an index query: {error}; expected {{"token_ids": [...]}}') from error
        extras = RequestExtras(lora=Lora(query.lora) if query.lora else None, cache_salt=query.cache_salt)
        matches = self._state.index.match(query.token_ids, extras=extras)
        hits = {}
        for worker in self._state.fleet.workers:
            match = matches.get(worker.worker_id)
            trust = worker.trust.level.value
            hits[worker.worker_id] = _Hit(match.hit_tokens, trust, match.tiers) if match else _Hit(0, trust, {})
        return _json(_Hits(hits))

    async def snapshot(self, request: web.Request) -> web.StreamResponse:
        state = self._state
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        await response.prepare(request)
        for part in fleet_snapshot(state.fleet, state.index, state.clock):
            await response.write(part)
            await asyncio.sleep(0)  # the next worker is another turn
        await response.write_eof()
        return response


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except KvAtlasError as error:
        return _error(error.http_status, error.message, error.code)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _error(error.status, f"{request.method} {request.path}: {error.reason}", f"http_{error.status}")
    except Exception:  # noqa: BLE001 - whatever failed, the answer has the one shape
        _log.exception("%s %s failed: a bug", request.method, request.path)
        message = "the admin app failed on this request; the gateway's log has the details"
        return _error(KvAtlasError.http_status, message, KvAtlasError.code)


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _error(status: int, message: str, code: str) -> web.Response:
    return web.Response(status=status, body=error_body(status, code, message), content_type="application/json")
