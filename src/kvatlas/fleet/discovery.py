"""Where does an engine publish its KV events? Asked of the engine itself, so that a URL is all an operator gives.

vLLM answers `GET /kv_event_sources`, SGLang `GET /server_info`. Both tell where they *bind*: a wildcard host there
means the host of the engine's URL. What is answered is checked and never taken for more than an address.
"""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import aiohttp
import msgspec

from kvatlas.config import is_endpoint
from kvatlas.errors import ConfigError
from kvatlas.fleet.failures import describe_failure
from kvatlas.fleet.worker import EventAddress, split_url
from kvatlas.stream import offset_endpoint

__all__ = ["EventDiscovery", "EventSources", "describe_unanswered", "reachable_endpoint"]

_MAX_ANSWER_BYTES = 4 * 1024 * 1024
_MAX_RANKS = 1024
_WILDCARDS = frozenset({"*", "0.0.0.0", "::", ""})  # noqa: S104 - compared, not bound
_NO_ROUTE = frozenset({404, 405, 501})
_HOW_TO_ENABLE = (
    'start it with --kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": '
    '"tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\''
)


@dataclass(frozen=True, slots=True)
class EventSources:
    """An engine's answer.

    Attributes:
        ranks: data-parallel rank -> where it publishes, as we reach it; a rank without events is missing.
        reason: where this was learnt; when a rank is missing, why, and what to do.
        block_size: tokens per block, where the engine tells it here.
    """

    ranks: dict[int, EventAddress] = field(default_factory=dict)
    reason: str = ""
    block_size: int | None = None


_Reader: TypeAlias = Callable[[str, bytes, str], EventSources]


class _VllmSource(msgspec.Struct):
    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None


class _SglangEvents(msgspec.Struct):
    endpoint_host: str
    endpoint_port_base: int
    block_size: int | None = None
    dp_size: int = 1
    replay_endpoint_port_base: int | None = None


class _SglangConfig(msgspec.Struct):
    """The engine's `--kv-events-config`: what older releases tell instead."""

    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None


class _ServerInfo(msgspec.Struct):
    kv_events: _SglangEvents | None = None
    kv_events_config: str | _SglangConfig | None = None
    page_size: int | None = None
    dp_size: int = 1


class EventDiscovery:
    """Asks engines where their events are.

    Args:
        session: for the calls.
        timeout_s: of each of them.
    """

    def __init__(self, session: aiohttp.ClientSession, *, timeout_s: float) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def ask(self, base_url: str) -> EventSources:
        """One or two GETs.

        Raises:
            aiohttp.ClientError, OSError, TimeoutError: no answer; nothing follows from that.
        """
        status, body = await self._get(base_url + "/kv_event_sources")
        if status == 200:
            return _read("GET /kv_event_sources", body, base_url, _read_vllm)
        if status not in _NO_ROUTE:
            return EventSources(reason=f"GET /kv_event_sources answered {status}: give events=tcp://HOST:PORT")
        other, body = await self._get(base_url + "/server_info")
        if other == 200:
            return _read("GET /server_info", body, base_url, _read_sglang)
        return EventSources(
            reason=f"GET /kv_event_sources answered {status} and /server_info {other}: the engine does not tell where "
            "its KV events are; give events=tcp://HOST:PORT, or events=none if it has none"
        )

    async def _get(self, url: str) -> tuple[int, bytes]:
        async with self._session.get(url, timeout=self._timeout, allow_redirects=False) as response:
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > _MAX_ANSWER_BYTES:
                    raise aiohttp.ClientPayloadError(f"{url} answers more than {_MAX_ANSWER_BYTES} bytes")
            return response.status, bytes(body)


def describe_unanswered(error: BaseException) -> str:
    """Why an engine could not be asked, as a worker's reason."""
    return f"the engine could not be asked where its KV events are: {describe_failure(error)}; it will be again"


def reachable_endpoint(endpoint: str, base_url: str) -> str:
    """An endpoint as the engine binds it, turned into one that we can connect to.

    Raises:
        ConfigError: nobody here can connect to it; the message says why and what to do.
    """
    host = split_url(base_url)[0]
    if endpoint.startswith("ipc://"):
        if not _is_loopback(host) or "*" in endpoint:
            raise ConfigError(f"{endpoint} is on the engine's machine only: give it a tcp:// endpoint")
        return endpoint
    if not endpoint.startswith("tcp://"):
        raise ConfigError(f"{endpoint!r} is no endpoint that can be connected to: expected tcp://HOST:PORT")
    bound, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    name = bound.strip("[]")
    if name in _WILDCARDS:
        reachable = f"tcp://{host}:{port}"
    elif _is_loopback(name) and not _is_loopback(host):
        raise ConfigError(f"{endpoint} is on the engine's own loopback: bind tcp://*:{port} there")
    else:
        reachable = endpoint
    if not is_endpoint(reachable):
        raise ConfigError(f"{endpoint!r} is no endpoint that can be connected to: expected tcp://HOST:PORT")
    return reachable


def _is_loopback(host: str) -> bool:
    name = host.strip("[]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def _read(asked: str, body: bytes, base_url: str, read: _Reader) -> EventSources:
    try:
        return read(asked, body, base_url)
    except (msgspec.DecodeError, ConfigError, ValueError) as error:
        text = error.message if isinstance(error, ConfigError) else str(error)
        return EventSources(reason=f"{asked} answered what cannot be used: {text}; or give events=tcp://HOST:PORT")


def _read_vllm(asked: str, body: bytes, base_url: str) -> EventSources:
    answer = msgspec.json.decode(body, type=dict[str, _VllmSource])
    if len(answer) > _MAX_RANKS:
        raise ConfigError(f"{len(answer)} ranks")
    ranks: dict[int, EventAddress] = {}
    for rank, source in answer.items():
        if not rank.isdecimal():
            raise ConfigError(f"rank {rank!r}, expected a number")
        if not source.enable_kv_cache_events or source.publisher == "null" or not source.endpoint:
            continue
        replay = source.replay_endpoint
        ranks[int(rank)] = EventAddress(
            reachable_endpoint(source.endpoint, base_url),
            reachable_endpoint(replay, base_url) if replay else None,
        )
    if not ranks:
        return EventSources(reason=f"{asked} answered that KV events are off in the engine: {_HOW_TO_ENABLE}")
    return EventSources(ranks, asked)


def _read_sglang(asked: str, body: bytes, base_url: str) -> EventSources:
    info = msgspec.json.decode(body, type=_ServerInfo)
    if info.kv_events is not None:
        events = info.kv_events
        endpoint = f"tcp://{events.endpoint_host}:{events.endpoint_port_base}"
        port = events.replay_endpoint_port_base
        replay = None if port is None else f"tcp://{events.endpoint_host}:{port}"
        return EventSources(_ranks_of(endpoint, replay, events.dp_size, base_url), asked, _positive(events.block_size))
    config = info.kv_events_config
    if isinstance(config, str):
        config = msgspec.json.decode(config, type=_SglangConfig) if config else None
    if config is None or config.publisher != "zmq":
        return EventSources(
            reason=f"{asked} names no KV event stream: start the engine with --kv-events-config "
            '\'{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\''
        )
    ranks = _ranks_of(config.endpoint, config.replay_endpoint, info.dp_size, base_url)
    return EventSources(ranks, asked, _positive(info.page_size))


def _ranks_of(endpoint: str, replay: str | None, count: int, base_url: str) -> dict[int, EventAddress]:
    """Every rank publishes `rank` ports further. Source: vLLM 0.32.0 and SGLang 0.5.23."""
    if not 1 <= count <= _MAX_RANKS:
        raise ConfigError(f"{count} data-parallel ranks")
    events = reachable_endpoint(endpoint, base_url)
    replay = reachable_endpoint(replay, base_url) if replay else None
    return {
        rank: EventAddress(offset_endpoint(events, rank), offset_endpoint(replay, rank) if replay else None)
        for rank in range(count)
    }


def _positive(number: int | None) -> int | None:
    return number if number and number > 0 else None
