"""`kvatlas serve` stopped and started again, or started beside a running one: what the index still knows, and is sure of."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvatlas.cli.main import cli
from kvatlas.simulator import EngineConfig, EventsConfig, LatencyConfig, SimulatedFleet
from support.real_prompts import metric
from support.serve import Gateway, post_json, running_gateway

pytestmark = pytest.mark.e2e

MODEL = "kvatlas-sim"
BUFFER_STEPS = 12
NO_PROMISE = -1


def prompt(number: int) -> list[int]:
    """Five blocks of their own, the last one not complete: a repeated prompt hits 64 tokens."""
    return [1000 + number, *range(100, 178)]


@pytest.fixture(name="fleet")
def _fleet() -> Iterator[SimulatedFleet]:
    """One engine whose replay reaches 12 batches back."""
    config = EngineConfig(
        num_blocks=1024,
        max_model_len=4096,
        latency=LatencyConfig(time_scale=0.05),
        events=EventsConfig(buffer_steps=BUFFER_STEPS),
    )
    with SimulatedFleet(1, config) as fleet:
        yield fleet


def options(
    fleet: SimulatedFleet, folder: Path, *, found: bool = False, replay: bool = True, **settings: str
) -> list[str]:
    """How to start a gateway; `found` leaves it to the engine to say where its events are."""
    engine = fleet.engines[0]
    text = "health_interval_s = 0.2\n" + "".join(f'{name} = "{value}"\n' for name, value in settings.items())
    config = folder / "kvatlas.toml"
    config.write_text(text)
    worker = engine.base_url if found else f"{engine.base_url},events={engine.events_endpoint}"
    if replay and not found:
        worker += f",replay={engine.replay_endpoint}"
    return ["--config", str(config), "--tokenizer", fleet.tokenizer, "--worker", worker]


def complete(url: str, number: int) -> tuple[int, int]:
    """Send a prompt; what the gateway promised of it, and what the engine then had cached."""
    body = {"model": MODEL, "prompt": prompt(number), "max_tokens": 1}
    status, headers, answer = post_json(url + "/v1/completions", body)
    assert status == 200, answer
    cached = answer["usage"]["prompt_tokens_details"] or {}
    return int(headers.get("x-kvatlas-predicted-tokens", NO_PROMISE)), cached.get("cached_tokens", 0)


def held(gateway: Gateway, number: int) -> int:
    """Tokens of a prompt that the index holds beyond doubt."""
    _, _, answer = post_json(gateway.admin_url + "/api/index/query", {"token_ids": prompt(number)})
    (hit,) = answer["workers"].values()
    return hit["hit_tokens"]


def settle(gateway: Gateway) -> None:
    """Wait until every event of the engine's last steps has been applied."""

    def quiet(worker: dict) -> bool:
        age_s = worker["stream"]["last_batch_age_s"]
        return worker["load"]["in_flight"] == 0 and age_s is not None and age_s > 0.2

    gateway.await_workers(quiet)


def await_trust(gateway: Gateway, level: str) -> dict:
    workers = gateway.await_workers(lambda worker: worker["healthy"] and worker["trust"]["level"] == level)
    return next(iter(workers.values()))


def fill(gateway: Gateway, count: int = 20) -> None:
    """So much that replay no longer reaches to the beginning."""
    await_trust(gateway, "synced")
    for number in range(count):
        assert complete(gateway.base_url, number)[0] == 0
    settle(gateway)


@pytest.mark.parametrize("found", [False, True])
def test_an_outage_within_the_replay_window(fleet: SimulatedFleet, tmp_path: Path, found: bool) -> None:
    """The first request after the start is predicted exactly: from the snapshot, and from what was replayed."""
    arguments = options(fleet, tmp_path, found=found, snapshot_path=str(tmp_path / "index.snapshot"))
    with running_gateway(tmp_path / "log1", *arguments) as gateway:
        fill(gateway)
    engine = fleet.engines[0].base_url
    for number in (50, 51, 52):
        complete(engine, number)
    with running_gateway(tmp_path / "log2", *arguments) as gateway:
        worker = await_trust(gateway, "synced")
        assert worker["stream"]["gaps"] == 0
        assert worker["stream"]["batches"] <= BUFFER_STEPS
        assert [complete(gateway.base_url, number) for number in (0, 51, 19, 77)] == [(64, 64)] * 3 + [(0, 0)]
    assert "restored from" in (tmp_path / "log2").read_text()


def test_an_outage_longer_than_the_replay_window(fleet: SimulatedFleet, tmp_path: Path) -> None:
    """What lies between is lost: the worker is partial, nothing is over-claimed, and a report ends the doubt."""
    arguments = options(fleet, tmp_path, snapshot_path=str(tmp_path / "index.snapshot"))
    with running_gateway(tmp_path / "log1", *arguments) as gateway:
        fill(gateway)
    engine = fleet.engines[0].base_url
    for number in range(50, 90):
        complete(engine, number)
    with running_gateway(tmp_path / "log2", *arguments) as gateway:
        worker = await_trust(gateway, "partial")
        assert worker["stream"]["gaps"] == 1
        assert [held(gateway, number) for number in (89, 3)] == [64, 0]
        assert complete(gateway.base_url, 3) == (NO_PROMISE, 64)
        settle(gateway)
        assert held(gateway, 3) == 64


def test_an_engine_restarted_meanwhile(fleet: SimulatedFleet, tmp_path: Path) -> None:
    """Another life at the same address: nothing of the snapshot is claimed, and the new life is known from its start."""
    arguments = options(fleet, tmp_path, snapshot_path=str(tmp_path / "index.snapshot"))
    with running_gateway(tmp_path / "log1", *arguments) as gateway:
        fill(gateway, 5)
    fleet.restart(0)
    for number in range(50, 58):
        complete(fleet.engines[0].base_url, number)
    with running_gateway(tmp_path / "log2", *arguments) as gateway:
        await_trust(gateway, "synced")
        assert [held(gateway, number) for number in (3, 51)] == [0, 64]
        assert [complete(gateway.base_url, number) for number in (3, 51)] == [(0, 0), (64, 64)]


def test_without_replay_all_is_doubted(fleet: SimulatedFleet, tmp_path: Path) -> None:
    """No endpoint can prove the life: the claims of the snapshot are there, in doubt."""
    arguments = options(fleet, tmp_path, replay=False, snapshot_path=str(tmp_path / "index.snapshot"))
    with running_gateway(tmp_path / "log1", *arguments) as gateway:
        gateway.await_workers(lambda worker: worker["trust"]["level"] in ("syncing", "synced", "partial"))
        time.sleep(0.5)  # the subscription itself must reach the engine
        for number in range(5):
            complete(gateway.base_url, number)
        settle(gateway)
    with running_gateway(tmp_path / "log2", *arguments) as gateway:
        gateway.await_workers(lambda worker: worker["trust"]["level"] == "syncing")
        time.sleep(0.5)
        complete(gateway.base_url, 60)
        worker = await_trust(gateway, "partial")
        assert worker["index"]["resident_blocks"] >= 20
        assert [held(gateway, number) for number in (60, 3)] == [64, 0]
        assert complete(gateway.base_url, 3) == (NO_PROMISE, 64)
        settle(gateway)
        assert held(gateway, 3) == 64


def test_a_new_replica_starts_from_its_peer(fleet: SimulatedFleet, tmp_path: Path) -> None:
    """It takes over the peer's index and seed, and predicts what replay alone could not tell it."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with running_gateway(tmp_path / "log1", *options(fleet, tmp_path / "one")) as peer:
        fill(peer)
        arguments = options(fleet, tmp_path / "two", bootstrap_from=peer.admin_url)
        with running_gateway(tmp_path / "log2", *arguments) as gateway:
            await_trust(gateway, "synced")
            assert [complete(gateway.base_url, number) for number in (0, 19)] == [(64, 64)] * 2


def run(*arguments: str) -> dict:
    result = CliRunner().invoke(cli, ["index", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_snapshots_are_counted(fleet: SimulatedFleet, tmp_path: Path) -> None:
    """The metrics page tells how many snapshots there were, how large the newest is and when it was written."""
    arguments = options(fleet, tmp_path, snapshot_path=str(tmp_path / "index.snapshot"))
    config = tmp_path / "kvatlas.toml"
    config.write_text(config.read_text() + "snapshot_interval_s = 0.2\n")
    with running_gateway(tmp_path / "log", *arguments) as gateway:
        fill(gateway, 3)
        before = metric(gateway, "kvatlas_snapshot_saved_total")
        deadline = time.monotonic() + 20
        while metric(gateway, "kvatlas_snapshot_saved_total") < before + 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert metric(gateway, "kvatlas_snapshot_failed_total") == 0
        assert metric(gateway, "kvatlas_snapshot_bytes") > 1168 + 12 * 18
        assert abs(metric(gateway, "kvatlas_snapshot_timestamp_seconds") - time.time()) < 20
        assert 0 < metric(gateway, "kvatlas_snapshot_longest_turn_seconds") < 5
        assert 0 < metric(gateway, "kvatlas_snapshot_duration_seconds") < 20


def test_commands_write_and_read_a_running_index(fleet: SimulatedFleet, tmp_path: Path) -> None:
    """`dump` writes what `show` and `load` then read: the same blocks, 18 bytes each, and the stream's last batch."""
    with running_gateway(tmp_path / "log", *options(fleet, tmp_path)) as gateway:
        fill(gateway, 5)
        complete(gateway.base_url, 0)  # its blocks are known by now: their use has a time
        settle(gateway)
        file = str(tmp_path / "dumped")
        dumped = run("dump", file, "--admin", gateway.admin_url)
        (worker_id,) = gateway.workers()
        resident = gateway.workers()[worker_id]["index"]["resident_blocks"]
    assert run("show", file) == dumped
    worker = dumped["workers"][worker_id]
    assert worker["blocks"] == dumped["blocks"] == resident
    times_bytes = worker["bytes"] - 1168 - 18 * resident
    assert times_bytes % 8 == 0
    assert 0 < times_bytes <= 8 * 2 * 12  # two blocks of a request have a time, where they were known before it ended
    assert (worker["trust"], worker["loss"]) == ("synced", None)
    assert worker["last_seq"] >= 4
    assert run("load", file)["blocks"] == resident
    for command in ("show", "load"):
        result = CliRunner().invoke(cli, ["index", command, file])
        assert result.exit_code == 0
        assert str(resident) in result.output
