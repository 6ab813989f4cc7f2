"""The admin port of a running gateway and the commands that ask it."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from kvatlas import __version__
from kvatlas.simulator import EngineConfig, LatencyConfig, SimulatedFleet
from support.serve import Gateway, get_json, post_json, running_gateway

pytestmark = pytest.mark.e2e


@pytest.fixture(name="gateway", scope="module")
def _gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway over one engine that lives, and an address where nobody listens; three requests are served."""
    folder = tmp_path_factory.mktemp("admin")
    config = EngineConfig(num_blocks=512, max_model_len=4096, latency=LatencyConfig(time_scale=0.1))
    with SimulatedFleet(1, config) as fleet:
        (engine,) = fleet.engines
        arguments = ["--tokenizer", fleet.tokenizer, "--worker", "http://127.0.0.1:9"]
        arguments += ["--worker", f"{engine.base_url},events={engine.events_endpoint},replay={engine.replay_endpoint}"]
        with running_gateway(folder / "log", *arguments) as gateway:
            gateway.await_workers(lambda view: view["url"].endswith(":9") or view["trust"]["level"] == "synced")
            for number in range(3):
                body = {"model": "kvatlas-sim", "prompt": [number] * 40, "max_tokens": 2}
                headers = {"x-request-id": f"admin-{number}"}
                assert post_json(gateway.base_url + "/v1/completions", body, headers)[0] == 200
            yield gateway


def kvatlas(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "kvatlas", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def refusal(url: str) -> tuple[int, dict[str, str]]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        get_json(url)
    with caught.value as error:
        return error.code, json.loads(error.read())["error"]


def test_root_lists_the_endpoints(gateway: Gateway) -> None:
    """Who opens the admin port finds its way: every path that is listed answers."""
    index = get_json(gateway.admin_url + "/")
    assert index["version"] == __version__
    paths = [one["path"] for one in index["endpoints"] if one["method"] == "GET" and "{" not in one["path"]]
    assert "/api/workers" in paths
    for path in paths:
        with urllib.request.urlopen(gateway.admin_url + path, timeout=10) as response:
            assert response.status == 200


def test_newest_decisions_come_first(gateway: Gateway) -> None:
    """As many as asked for, the last request on top."""
    decisions = get_json(gateway.admin_url + "/api/decisions?limit=2")["decisions"]
    assert [record["request_id"] for record in decisions] == ["admin-2", "admin-1"]
    assert len(get_json(gateway.admin_url + "/api/decisions")["decisions"]) == 3


@pytest.mark.parametrize(
    ("path", "status", "code", "says"),
    [
        ("/api/decisions?limit=x", 400, "bad_request", "limit 'x'"),
        ("/api/decisions?limit=0", 400, "bad_request", "expected 1 or more"),
        ("/api/decisions/never", 404, "decision_not_found", "'never'"),
        ("/nothing", 404, "http_404", "GET /nothing"),
        ("/api/index/query", 405, "http_405", "Method Not Allowed"),
    ],
)
def test_client_mistakes_have_the_gateways_type(gateway: Gateway, path: str, status: int, code: str, says: str) -> None:
    """`type` and `code` follow one rule on both ports."""
    found, error = refusal(gateway.admin_url + path)
    assert (found, error["type"], error["code"]) == (status, "invalid_request_error", code)
    assert says in error["message"]


def test_workers_tell_since_when_they_are_healthy(gateway: Gateway) -> None:
    """The living one has a time, the dead one its failed checks and a reason in plain words."""
    views = {view["url"]: view for view in gateway.workers().values()}
    dead = views.pop("http://127.0.0.1:9")
    (living,) = views.values()
    assert living["healthy_since_s"] > 1_600_000_000
    assert living["failed_checks"] == 0
    assert dead["healthy_since_s"] is None
    assert dead["failed_checks"] >= 1
    assert dead["health_reason"] == "connection refused (127.0.0.1:9)"


def test_scrape_has_version_and_start_time(gateway: Gateway) -> None:
    """What dashboards join on to see restarts and roll-outs."""
    with urllib.request.urlopen(gateway.admin_url + "/metrics", timeout=10) as response:
        samples = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines() if line[0] != "#")
    assert samples[f'kvatlas_build_info{{version="{__version__}"}}'] == "1.0"
    assert float(samples["kvatlas_start_time_seconds"]) > 1_600_000_000


def test_workers_command_prints_a_table(gateway: Gateway) -> None:
    """One line a worker, and why the dead one gets nothing."""
    done = kvatlas("workers", "--admin", gateway.admin_url)
    assert done.returncode == 0, done.stderr
    living = next(line for line in done.stdout.splitlines() if "synced" in line)
    assert "yes" in living
    assert "3/0/0" in living
    assert "127.0.0.1:9 gets no traffic: connection refused (127.0.0.1:9)" in done.stdout


def test_workers_command_prints_json(gateway: Gateway) -> None:
    """The same fields as /api/workers."""
    answer = json.loads(kvatlas("workers", "--admin", gateway.admin_url, "--json").stdout)
    assert set(answer["workers"][0]) == set(get_json(gateway.admin_url + "/api/workers")["workers"][0])


@pytest.mark.parametrize("arguments", [("workers",), ("index", "query", "--tokens", "1")])
def test_the_gateways_own_port_is_told_apart(gateway: Gateway, arguments: tuple[str, ...]) -> None:
    """Asking the wrong port of the right gateway hints at --admin."""
    done = kvatlas(*arguments, "--admin", gateway.base_url)
    assert done.returncode == 2
    assert "is --admin the admin port" in done.stderr
    assert "Traceback" not in done.stderr
