"""ZMQ endpoint strings as engines read them: who binds, and where the ports of data-parallel ranks lie."""

from typing import Final

import zmq

from kvatlas.errors import ConfigError

__all__ = ["LAST_PORT", "bind_or_connect", "binds", "offset_endpoint"]

LAST_PORT: Final = 65_535


def binds(endpoint: str) -> bool:
    """Whether an engine binds its PUB socket to `endpoint`; it connects to any other, `tcp://0.0.0.0:5557` included.

    Source: vLLM 0.32.0, distributed/kv_events.py.
    """
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def offset_endpoint(endpoint: str, data_parallel_rank: int) -> str:
    """The endpoint of one rank: port + rank for tcp, a suffix for inproc; rank 0 and port 0 stay as they are.

    Source: vLLM 0.32.0, distributed/kv_events.py (offset_endpoint_port).

    Raises:
        ConfigError: the endpoint has no room for a rank (ipc), or no port.
    """
    if not endpoint or data_parallel_rank == 0:
        return endpoint
    if "inproc" in endpoint:
        return f"{endpoint}_dp{data_parallel_rank}"
    if "tcp" not in endpoint:
        raise ConfigError(
            f"endpoint {endpoint!r} has no place for rank {data_parallel_rank}: expected 'inproc' or 'tcp'"
        )
    host, _, port = endpoint.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"endpoint {endpoint!r} has no port: expected tcp://HOST:PORT")
    return endpoint if int(port) == 0 else f"{host}:{int(port) + data_parallel_rank}"


def bind_or_connect(socket: "zmq.Socket[bytes]", endpoint: str, *, bind: bool) -> str:
    """Attach the socket and return the endpoint with its real port when port 0 was asked for.

    Raises:
        ConfigError: the endpoint is malformed, taken, or asks to connect to port 0.
    """
    if not bind and endpoint.endswith(":0"):
        raise ConfigError(f"cannot connect to {endpoint!r}: port 0 means 'any free port' and needs bind=True")
    port = endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp://") and port.isdecimal() and int(port) > LAST_PORT:
        raise ConfigError(f"{endpoint!r} has no such port: expected tcp://HOST:PORT with a port up to {LAST_PORT}")
    if "::" in endpoint or "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        if not bind:
            socket.connect(endpoint)
            return endpoint
        socket.bind(endpoint)
    except (zmq.ZMQError, OSError) as error:
        verb = "bind" if bind else "connect to"
        raise ConfigError(f"cannot {verb} {endpoint!r}: {error}; expected tcp://HOST:PORT with a free port") from error
    if not endpoint.endswith(":0"):
        return endpoint
    bound_port = socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return f"{endpoint.rpartition(':')[0]}:{bound_port}"
