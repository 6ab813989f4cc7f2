"""Routes an engine serves in development mode only: resets, sleep, pause. Source: vLLM 0.32.0, entrypoints/serve."""

from typing import get_args

from aiohttp import web

from kvatlas.errors import BadRequest, KvAtlasError
from kvatlas.simulator.api_errors import engine_error, json_response
from kvatlas.simulator.ranks import EngineRanks, PauseMode

__all__ = ["dev_routes"]

_TRUE = frozenset({"1", "true", "on", "yes"})
_FALSE = frozenset({"0", "false", "off", "no"})
_MAX_SLEEP_LEVEL = 2


def dev_routes(ranks: EngineRanks) -> list[web.RouteDef]:
    """The routes, over all ranks of a server."""
    api = _DevApi(ranks)
    return [
        web.post("/reset_prefix_cache", api.reset_prefix_cache),
        web.post("/sleep", api.sleep),
        web.post("/wake_up", api.wake_up),
        web.get("/is_sleeping", api.is_sleeping),
        web.post("/pause", api.pause),
        web.post("/resume", api.resume),
        web.get("/is_paused", api.is_paused),
    ]


class _DevApi:
    def __init__(self, ranks: EngineRanks) -> None:
        self._ranks = ranks

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Forget the caches; with `reset_running_requests` an impossible reset is an error, else `success` tells."""
        try:
            done = self._ranks.reset_prefix_cache(
                reset_running=_flag(request, "reset_running_requests", default=False),
                reset_connector=_flag(request, "reset_external", default=False),
            )
        except KvAtlasError as error:
            return engine_error(error)
        return json_response({"success": done})

    async def sleep(self, request: web.Request) -> web.Response:
        """Answers when nothing runs any more."""
        try:
            level = _sleep_level(request)
            await self._ranks.sleep(level, _mode(request))
        except KvAtlasError as error:
            return engine_error(error)
        return json_response({"status": "sleeping", "level": level})

    async def wake_up(self, request: web.Request) -> web.Response:
        """Wake wholly, or the parts named by `tags`."""
        tags = request.query.getall("tags", []) or None
        status = "awake" if self._ranks.wake_up(tags) else "sleeping"
        return json_response({"status": status, "tags": tags})

    async def is_sleeping(self, _request: web.Request) -> web.Response:
        """Paused counts as sleeping."""
        return json_response({"is_sleeping": self._ranks.is_sleeping})

    async def pause(self, request: web.Request) -> web.Response:
        """Stop scheduling; the caches are forgotten unless `clear_cache=false` or requests are kept."""
        try:
            mode = _mode(request)
            clear = _flag(request, "clear_cache", default=True) and mode != "keep"
            await self._ranks.pause(mode, clear_cache=clear)
        except KvAtlasError as error:
            return engine_error(error)
        return json_response({"status": "paused"})

    async def resume(self, _request: web.Request) -> web.Response:
        """Schedule again."""
        self._ranks.resume()
        return json_response({"status": "resumed"})

    async def is_paused(self, _request: web.Request) -> web.Response:
        """Whether scheduling is stopped."""
        return json_response({"is_paused": self._ranks.is_paused})


def _flag(request: web.Request, name: str, *, default: bool) -> bool:
    text = request.query.get(name)
    if text is None:
        return default
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise BadRequest(f"{name} must be true or false, {text!r} was given")


def _sleep_level(request: web.Request) -> int:
    text = request.query.get("level", "1")
    if not text.isdecimal() or int(text) > _MAX_SLEEP_LEVEL:
        raise BadRequest(f"level must be 0, 1 or 2, {text!r} was given")
    return int(text)


def _mode(request: web.Request) -> PauseMode:
    text = request.query.get("mode", "abort")
    for mode in get_args(PauseMode):
        if text == mode:
            return mode  # type: ignore[no-any-return] # one of the literals
    raise BadRequest(f"mode must be abort, wait or keep, {text!r} was given")
