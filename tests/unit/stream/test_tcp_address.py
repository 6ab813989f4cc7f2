"""Which endpoints are read over a TCP socket of our own."""

import pytest

from kvatlas.stream.tcp_link import tcp_address


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("tcp://127.0.0.1:5557", ("127.0.0.1", 5557)),
        ("tcp://0.0.0.0:1", ("0.0.0.0", 1)),
        ("tcp://localhost:65535", ("localhost", 65535)),
        ("tcp://engine-0.engines.svc.cluster.local:5557", ("engine-0.engines.svc.cluster.local", 5557)),
        ("tcp://under_score:5557", ("under_score", 5557)),
        ("tcp://[::1]:5557", ("::1", 5557)),
        ("tcp://[2001:db8::A]:5557", ("2001:db8::A", 5557)),
        ("tcp://[fe80::1%eth0]:5557", ("fe80::1%eth0", 5557)),
        ("tcp://[::ffff:10.0.0.1]:5557", ("::ffff:10.0.0.1", 5557)),
    ],
)
def test_plain_tcp(endpoint, address):
    """A host by name or number, brackets round an IPv6 address, and a port."""
    assert tcp_address(endpoint) == address


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "nonsense",
        "tcp://",
        "tcp://host",
        "tcp://host:",
        "tcp://:5557",
        "tcp://host:port",
        "tcp://host:0",
        "tcp://host:65536",
        "tcp://host:100000",
        "tcp://host:05557",
        "tcp://host:-1",
        "tcp://*:5557",
        "tcp://127.0.0.1:*",
        "tcp://[*]:5557",
        "tcp://::1:5557",
        "tcp://[]:5557",
        "tcp://[::1]",
        "tcp://eth0;127.0.0.1:5557",
        "tcp://127.0.0.1:0;127.0.0.1:5557",
        "tcp://host:5557/path",
        "tcp://user host:5557",
        " tcp://host:5557",
        "tcp://host:5557\n",
        "TCP://host:5557",
        "udp://host:5557",
        "ipc:///run/events",
        "inproc://events",
    ],
)
def test_all_else_is_left_to_libzmq(endpoint):
    """What it reads in its own way, or refuses: wildcards, source addresses, other transports, and what is malformed."""
    assert tcp_address(endpoint) is None
