"""`kvatlas serve --worker URL`, and nothing else: what an operator types first."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvatlas.simulator import EngineConfig, EventsConfig, SimulatedFleet
from support.serve import post_json, running_gateway

pytestmark = pytest.mark.e2e


def test_a_url_is_all_that_is_needed(tmp_path: Path) -> None:
    """The stream is found and synced, and the second of two equal prompts is promised what it gets."""
    with SimulatedFleet(1) as engines:
        (engine,) = engines.engines
        arguments = ("--worker", engine.base_url, "--tokenizer", engines.tokenizer)
        with running_gateway(tmp_path / "log", *arguments) as gateway:
            gateway.await_workers(lambda worker: worker["trust"]["level"] == "synced")
            body = {"model": "kvatlas-sim", "prompt": list(range(1, 101)), "max_tokens": 1}
            post_json(gateway.base_url + "/v1/completions", body)
            gateway.await_workers(lambda worker: worker["index"]["resident_blocks"] >= 6)
            _, headers, answer = post_json(gateway.base_url + "/v1/completions", body)
            assert headers["x-kvatlas-predicted-tokens"] == "96"
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        assert f"events {engine.events_endpoint}" in (tmp_path / "log").read_text()


def test_workers_says_why_one_has_no_events(tmp_path: Path) -> None:
    """An engine that runs without events: `kvatlas workers` tells what it answered and what to do."""
    config = EngineConfig(events=EventsConfig(enabled=False))
    with (
        SimulatedFleet(1, config) as engines,
        running_gateway(tmp_path / "log", "--worker", engines.engines[0].base_url) as gateway,
    ):
        gateway.await_workers(lambda worker: worker["healthy"])
        command = [sys.executable, "-m", "kvatlas", "workers", "--admin", gateway.admin_url]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
        assert "is routed by load alone: GET /kv_event_sources answered that KV events are off" in shown
        assert "--kv-events-config" in shown
