"""`kvatlas serve` as an operator meets it: its log, its end, what it forwards and what it times."""

import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from pathlib import Path

import pytest

from kvatlas import __version__
from kvatlas.simulator import EngineConfig, LatencyConfig, SimulatedFleet
from support.serve import Gateway, post_json, running_gateway

pytestmark = pytest.mark.e2e

MODEL = "kvatlas-sim"
PROMPT = list(range(100, 148))
ENDLESS_TOKENS = 2000


@pytest.fixture(name="fleet", scope="module")
def _fleet() -> Iterator[SimulatedFleet]:
    """One engine that decodes slowly: 2000 tokens take 100 s, three take a moment."""
    config = EngineConfig(num_blocks=512, max_model_len=4096, latency=LatencyConfig(decode_step_s=0.05))
    with SimulatedFleet(1, config) as fleet:
        yield fleet


@contextlib.contextmanager
def serving(fleet: SimulatedFleet, folder: Path, *more: str, settings: str = "") -> Iterator[tuple[Gateway, Path]]:
    """A gateway in front of the engine, and its log."""
    config, log = folder / "kvatlas.toml", folder / "log"
    config.write_text(settings)
    (engine,) = fleet.engines
    worker = f"{engine.base_url},events={engine.events_endpoint},replay={engine.replay_endpoint}"
    with running_gateway(log, "--config", str(config), "--worker", worker, *more) as gateway:
        yield gateway, log


def open_stream(gateway: Gateway, max_tokens: int) -> HTTPResponse:
    """A completion stream whose first bytes are here."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        gateway.base_url + "/v1/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    response = urllib.request.urlopen(request, timeout=30)
    response.readline()
    return response


def status_of(url: str) -> int:
    """HTTP status of a GET; 0 when nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


def has_ended(gateway: Gateway) -> bool:
    """Whether the process is over; it is left to be reaped."""
    return os.waitid(os.P_PID, gateway.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def soon(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether a condition became true in time."""
    end_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


class TestStart:
    def test_the_log_says_what_was_started(self, fleet: SimulatedFleet, tmp_path: Path) -> None:
        """Version, policy, and each worker with its URL, events and health or why it has none."""
        with serving(fleet, tmp_path, "--worker", "http://127.0.0.1:9") as (_, log):
            lines = log.read_text().splitlines()
        (engine,) = fleet.engines
        assert any(line.endswith(f"kvatlas {__version__} starts: policy cost, 2 workers") for line in lines)
        (good,) = [line for line in lines if f"worker 127.0.0.1:{engine.port}: {engine.base_url}, events " in line]
        assert f"events {engine.events_endpoint}, replay {engine.replay_endpoint}, healthy: GET /health" in good
        (dead,) = [line for line in lines if "worker 127.0.0.1:9: http://127.0.0.1:9, events no" in line]
        assert "not healthy yet: " in dead


class TestForwardedPaths:
    def test_admin_routes_are_closed_by_default(self, fleet: SimulatedFleet, tmp_path: Path) -> None:
        """A client cannot empty the engine's cache through the public port; the answer names the setting."""
        with serving(fleet, tmp_path) as (gateway, _):
            for path in ("/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/%6coad_lora_adapter", "/metrics"):
                status, headers, body = post_json(gateway.base_url + path, {})
                assert (status, body["error"]["code"]) == (404, "path_not_forwarded")
                assert body["error"]["type"] == "invalid_request_error"
                assert "forward_all_paths" in body["error"]["message"]
                assert "x-kvatlas-worker" not in headers
            assert status_of(gateway.base_url + "/version") == 200
            assert status_of(gateway.base_url + "/v1/models") == 200

    def test_one_setting_opens_them(self, fleet: SimulatedFleet, tmp_path: Path) -> None:
        """With forward_all_paths the engine answers whatever it is asked."""
        with serving(fleet, tmp_path, settings="forward_all_paths = true\n") as (gateway, _):
            status, headers, _ = post_json(gateway.base_url + "/reset_prefix_cache", {})
            assert status == 200
            assert headers["x-kvatlas-worker"]
            assert status_of(gateway.base_url + "/metrics") == 200


def test_only_generation_streams_have_a_time_to_first_token(fleet: SimulatedFleet, tmp_path: Path) -> None:
    """Of a stream, a whole answer, a plain GET and a 400: one time to first token, three durations."""
    with serving(fleet, tmp_path) as (gateway, _):
        with open_stream(gateway, 3) as stream:
            stream.read()
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
        assert post_json(gateway.base_url + "/v1/completions", body)[0] == 200
        assert status_of(gateway.base_url + "/version") == 200
        assert post_json(gateway.base_url + "/v1/completions", {**body, "max_tokens": 9999, "stream": True})[0] == 400
        with urllib.request.urlopen(gateway.admin_url + "/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
    counts = {
        line.partition("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(("kvatlas_worker_ttft_seconds_count", "kvatlas_worker_duration_seconds_count"))
    }
    assert counts == {"kvatlas_worker_ttft_seconds_count": 1.0, "kvatlas_worker_duration_seconds_count": 3.0}


class TestShutdown:
    def test_load_balancers_are_given_time(self, fleet: SimulatedFleet, tmp_path: Path) -> None:
        """With a delay, /readyz says 503 while requests are still served; then the port closes and the process ends."""
        with serving(fleet, tmp_path, settings="shutdown_delay_s = 1.0\n") as (gateway, log):
            assert status_of(gateway.base_url + "/readyz") == 200
            os.kill(gateway.pid, signal.SIGTERM)
            assert soon(lambda: status_of(gateway.base_url + "/readyz") == 503)
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
            assert post_json(gateway.base_url + "/v1/completions", body)[0] == 200
            assert status_of(gateway.base_url + "/health") == 200
            assert soon(lambda: status_of(gateway.base_url + "/readyz") == 0)
            assert soon(lambda: has_ended(gateway))
            text = log.read_text()
        assert "/readyz answers 503 now; requests are taken for 1 s more" in text
        assert "shutting down: the port is closed, 0 requests in flight get 30 s" in text
        assert "INFO kvatlas.gateway.server drain over: 0 requests in flight were cut" in text

    @pytest.mark.parametrize("delay_s", [0.0, 60.0])
    @pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
    def test_a_second_signal_does_not_wait(
        self, fleet: SimulatedFleet, tmp_path: Path, delay_s: float, second: signal.Signals
    ) -> None:
        """In the drain or in the delay before it: what runs is cut, and the log says how many that were."""
        with (
            serving(fleet, tmp_path, settings=f"shutdown_delay_s = {delay_s}\n") as (gateway, log),
            open_stream(gateway, ENDLESS_TOKENS),
        ):
            os.kill(gateway.pid, signal.SIGTERM)
            expected = "the port is closed, 1 requests in flight" if not delay_s else "/readyz answers 503 now"
            assert soon(lambda: expected in log.read_text())
            assert not has_ended(gateway)
            os.kill(gateway.pid, second)
            assert soon(lambda: has_ended(gateway))
            text = log.read_text()
        assert f"{second.name} again: running requests are cut" in text
        assert "WARNING kvatlas.gateway.server drain over: 1 requests in flight were cut" in text
