"""Endpoints as engines bind them, turned into ones to connect to."""

import pytest

from kvatlas.errors import ConfigError
from kvatlas.fleet.discovery import reachable_endpoint


@pytest.mark.parametrize(
    ("endpoint", "url", "expected"),
    [
        ("tcp://*:5557", "http://10.0.0.5:8000", "tcp://10.0.0.5:5557"),
        ("tcp://0.0.0.0:5557", "http://engine.local:8000/base", "tcp://engine.local:5557"),
        ("tcp://[::]:5557", "http://[fd00::5]:8000", "tcp://[fd00::5]:5557"),
        ("tcp://:::5557", "http://10.0.0.5", "tcp://10.0.0.5:5557"),
        ("tcp://10.0.0.9:43211", "http://engine:8000", "tcp://10.0.0.9:43211"),
        ("tcp://127.0.0.1:5557", "http://localhost:8000", "tcp://127.0.0.1:5557"),
        ("ipc:///run/kv", "http://127.0.0.1:8000", "ipc:///run/kv"),
    ],
)
def test_wildcards_mean_the_host_of_the_url(endpoint: str, url: str, expected: str) -> None:
    """A concrete host stays; a wildcard becomes the URL's host."""
    assert reachable_endpoint(endpoint, url) == expected


@pytest.mark.parametrize(
    ("endpoint", "url", "says"),
    [
        ("tcp://127.0.0.1:5557", "http://10.0.0.5:8000", r"own loopback: bind tcp://\*:5557"),
        ("ipc:///run/kv", "http://10.0.0.5:8000", "engine's machine only"),
        ("inproc://kv", "http://127.0.0.1:8000", "expected tcp://HOST:PORT"),
        ("tcp://*:0", "http://10.0.0.5:8000", "expected tcp://HOST:PORT"),
        ("tcp://*:99999", "http://10.0.0.5:8000", "expected tcp://HOST:PORT"),
        ("tcp://a b:1", "http://10.0.0.5:8000", "expected tcp://HOST:PORT"),
    ],
)
def test_what_nobody_can_connect_to_is_refused(endpoint: str, url: str, says: str) -> None:
    """An engine's own loopback is not ours, ports are 1..65535; the message says what to do."""
    with pytest.raises(ConfigError, match=says):
        reachable_endpoint(endpoint, url)
