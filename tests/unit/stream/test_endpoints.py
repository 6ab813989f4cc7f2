"""Endpoint strings as engines read them."""

import pytest
import zmq

from kvatlas.errors import ConfigError
from kvatlas.stream import binds, offset_endpoint
from kvatlas.stream.endpoints import bind_or_connect


@pytest.mark.parametrize(
    ("endpoint", "binding"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://[::1]:5557", True),
        ("ipc:///run/events", True),
        ("inproc://events", True),
        ("tcp://0.0.0.0:5557", False),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://router:5557", False),
    ],
)
def test_bind_rule(endpoint, binding):
    """Engines bind for wildcards and local transports, and connect to anything else."""
    assert binds(endpoint) is binding


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 2, "tcp://*:5559"),
        ("tcp://[::1]:5557", 3, "tcp://[::1]:5560"),
        ("tcp://*:0", 2, "tcp://*:0"),
        ("inproc://events", 1, "inproc://events_dp1"),
        ("ipc:///run/events", 0, "ipc:///run/events"),
        ("", 4, ""),
    ],
)
def test_rank_offset(endpoint, rank, expected):
    """Each data-parallel rank has its own port or name (scenario 61)."""
    assert offset_endpoint(endpoint, rank) == expected


@pytest.mark.parametrize(("endpoint", "word"), [("ipc:///run/events", "'tcp'"), ("tcp://host", "no port")])
def test_no_room_for_a_rank(endpoint, word):
    """An endpoint that cannot serve a rank is refused with what was expected (scenario 61)."""
    with pytest.raises(ConfigError, match=word):
        offset_endpoint(endpoint, 1)


@pytest.mark.parametrize("port", ["65536", "99999999"])
@pytest.mark.parametrize("bind", [True, False])
def test_no_such_port(port, bind):
    """ZMQ itself would try to connect there for ever."""
    with zmq.Context.instance().socket(zmq.SUB) as socket, pytest.raises(ConfigError, match="up to 65535"):
        bind_or_connect(socket, f"tcp://127.0.0.1:{port}", bind=bind)
