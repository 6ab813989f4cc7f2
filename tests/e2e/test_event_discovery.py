"""Engines given as a URL only: their event streams are found, followed when they move, and told apart by rank."""

import json

import pytest

from kvatlas.config import WorkerConfig
from kvatlas.fleet import Fleet, Trust, follower
from kvatlas.index import PrefixIndex
from kvatlas.simulator import EngineConfig, EventsConfig, ServedEngine
from support.engines import BLOCK, Pages, Stream, fleet_of, serving, until

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]


def hit(index: PrefixIndex, worker_id: str, number: int) -> int:
    """Tokens of `number`'s one block that the worker is known to hold."""
    match = index.match([*[number] * BLOCK, 7]).get(worker_id)
    return match.hit_tokens if match else 0


def trust_of(fleet: Fleet) -> dict[str, Trust]:
    return {worker.worker_id: worker.trust.level for worker in fleet.workers}


async def test_vllm_tells_where_its_events_are() -> None:
    """Wildcard hosts mean the URL's host; events and replay are followed without a word of configuration."""
    engine, stream = Pages(), Stream()
    engine.sources = {"0": stream.source}
    stream.store(1)
    async with serving(engine), fleet_of(WorkerConfig(url=engine.url)) as (fleet, index):
        (worker,) = fleet.workers
        await until(lambda: worker.trust.level is Trust.SYNCED, "synced")
        assert worker.events_at is not None
        assert worker.events_at.events == f"tcp://127.0.0.1:{stream.port}"
        assert hit(index, worker.worker_id, 1) == BLOCK
        assert worker.config.rank is None
    stream.close()


async def test_a_simulated_engine_is_found_and_followed() -> None:
    """The simulator's own /kv_event_sources is enough."""
    async with ServedEngine(EngineConfig()) as engine:
        assert engine.address is not None
        async with fleet_of(WorkerConfig(url=engine.address.base_url)) as (fleet, _):
            await until(lambda: fleet.workers[0].trust.level is Trust.SYNCED, "synced")
            assert fleet.workers[0].events_at is not None


@pytest.mark.parametrize("older", [False, True])
async def test_sglang_tells_by_server_info(older: bool) -> None:
    """Newer releases name host, ports and block size; older ones only repeat their --kv-events-config."""
    engine, stream = Pages(), Stream()
    if older:
        config = {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{stream.port}",
            "replay_endpoint": f"tcp://*:{stream.replay_port}",
        }
        engine.server_info = {"kv_events_config": json.dumps(config), "page_size": 32, "dp_size": 1, "version": "x"}
    else:
        engine.server_info = {
            "kv_events": {
                "publisher": "zmq",
                "endpoint_host": "*",
                "endpoint_port_base": stream.port,
                "replay_endpoint_port_base": stream.replay_port,
                "topic": "",
                "block_size": 32,
                "dp_size": 1,
            }
        }
    async with serving(engine), fleet_of(WorkerConfig(url=engine.url), health_interval_s=30.0) as (fleet, index):
        (worker,) = fleet.workers
        await until(lambda: worker.trust.level is Trust.SYNCED, "synced")
        assert index.block_size(worker.worker_id) == 32
        assert worker.events_at is not None
        assert worker.events_at.replay == f"tcp://127.0.0.1:{stream.replay_port}"
    stream.close()


async def test_sglang_ranks_are_so_many_ports_further() -> None:
    """Three ranks behind one URL: base port plus rank, for replay too."""
    engine = Pages()
    engine.server_info = {
        "kv_events": {
            "endpoint_host": "0.0.0.0",
            "endpoint_port_base": 21_000,
            "replay_endpoint_port_base": 21_100,
            "dp_size": 3,
        }
    }
    async with serving(engine), fleet_of(WorkerConfig(url=engine.url)) as (fleet, _):
        assert [
            (worker.config.rank, worker.events_at.events, worker.events_at.replay)  # type: ignore[union-attr]
            for worker in fleet.workers
        ] == [(rank, f"tcp://127.0.0.1:{21_000 + rank}", f"tcp://127.0.0.1:{21_100 + rank}") for rank in range(3)]


async def test_ranks_of_one_engine_become_workers_of_their_own() -> None:
    """At the first request each rank is a candidate, with its own stream; what one holds the other does not."""
    engine, streams = Pages(), [Stream(), Stream()]
    engine.sources = {str(rank): stream.source for rank, stream in enumerate(streams)}
    for rank, stream in enumerate(streams):
        stream.store(rank + 1, rank=rank)
    async with serving(engine), fleet_of(WorkerConfig(url=engine.url, models=("m",))) as (fleet, index):
        base = engine.url.removeprefix("http://")
        assert [worker.worker_id for worker in fleet.candidates("m")] == [f"{base}#0", f"{base}#1"]
        await until(lambda: set(trust_of(fleet).values()) == {Trust.SYNCED}, "both synced")
        assert [hit(index, f"{base}#{rank}", 1) for rank in (0, 1)] == [BLOCK, 0]
        assert [hit(index, f"{base}#{rank}", 2) for rank in (0, 1)] == [0, BLOCK]
        assert set(index.worker_ids) == {f"{base}#0", f"{base}#1"}
    for stream in streams:
        stream.close()


async def test_ranks_follow_the_engine_when_it_comes_back_with_other_ones() -> None:
    """One rank, then three, then two, then one: the workers are those that the engine names; a removed one stays out."""
    engine, streams = Pages(), [Stream() for _ in range(3)]
    base_config = {str(rank): stream.source for rank, stream in enumerate(streams)}

    def ranks(*names: str) -> None:
        engine.sources = {name: base_config[name] for name in names}
        engine.started_s = (engine.started_s or 0) + 1

    ranks("0")
    async with serving(engine), fleet_of(WorkerConfig(url=engine.url)) as (fleet, index):
        base = engine.url.removeprefix("http://")
        assert list(trust_of(fleet)) == [base]
        ranks("0", "1", "2")
        await until(lambda: set(trust_of(fleet)) == {f"{base}#0", f"{base}#1", f"{base}#2"}, "three ranks")
        await fleet.remove(f"{base}#1")
        ranks("0", "1")
        await until(lambda: set(trust_of(fleet)) == {f"{base}#0"}, "rank 2 is gone, rank 1 stays out")
        ranks("0")
        await until(lambda: set(trust_of(fleet)) == {base}, "one worker again")
        await until(lambda: len(fleet.candidates(None)) == 1)
        assert set(index.worker_ids) == {base}
    for stream in streams:
        stream.close()


async def test_ranks_added_while_the_engine_runs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elastic engines gain ranks without a restart: a followed engine is asked now and then, too."""
    monkeypatch.setattr(follower, "_ASK_AGAIN_MAX_S", 0.1)
    engine, streams = Pages(), [Stream(), Stream()]
    engine.sources = {"0": streams[0].source}
    async with serving(engine), fleet_of(WorkerConfig(url=engine.url)) as (fleet, _):
        await until(lambda: set(trust_of(fleet).values()) == {Trust.SYNCED}, "synced")
        engine.sources = {str(rank): stream.source for rank, stream in enumerate(streams)}
        await until(lambda: len(fleet.candidates(None)) == 2, "two ranks")
        assert [worker.config.rank for worker in fleet.workers] == [0, 1]
    for stream in streams:
        stream.close()


async def test_an_explicit_rank_takes_its_own_stream_and_another_is_refused_with_a_reason() -> None:
    """`rank=` works without events=; one that the engine does not have is routed by load, and says so."""
    engine, other, stream = Pages(), Stream(), Stream()
    engine.sources = {"0": other.source, "1": stream.source}
    async with serving(engine):
        workers = tuple(WorkerConfig(url=engine.url, rank=rank) for rank in (1, 5))
        async with fleet_of(*workers) as (fleet, _):
            one, five = fleet.workers
            assert one.events_at is not None
            assert one.events_at.events.endswith(f":{stream.port}")
            assert (five.trust.level, five.events_at) == (Trust.NONE, None)
            assert "it has ranks 0, 1, not 5; correct rank=" in five.trust.reason
            assert len(fleet.candidates(None)) == 2
    other.close()
    stream.close()


@pytest.mark.parametrize(
    ("sources", "info", "says"),
    [
        (
            None,
            None,
            "answered 404 and /server_info 404: the engine does not tell where its KV events are; give events=",
        ),
        ({}, None, "KV events are off in the engine: start it with --kv-events-config"),
        ({"0": {"enable_kv_cache_events": False}}, None, "KV events are off"),
        ({"0": {"enable_kv_cache_events": True, "publisher": "null", "endpoint": "tcp://*:1"}}, None, "are off"),
        ("<html>hello</html>", None, "answered what cannot be used"),
        ({"zero": {}}, None, "rank 'zero', expected a number"),
        ({"0": {"enable_kv_cache_events": True, "endpoint": "tcp://*:0"}}, None, "expected tcp://HOST:PORT"),
        (None, {"version": "1"}, "names no KV event stream: start the engine with --kv-events-config"),
        (None, {"kv_events_config": "{broken"}, "GET /server_info answered what cannot be used"),
        (
            None,
            {"kv_events": {"endpoint_host": "*", "endpoint_port_base": 65_535, "dp_size": 0}},
            "0 data-parallel ranks",
        ),
    ],
)
async def test_an_engine_without_events_serves_and_the_reason_says_what_to_do(
    sources: object, info: object, says: str
) -> None:
    """Whatever is answered, the worker is a candidate; its trust says what was asked and what helps."""
    engine = Pages()
    engine.sources, engine.server_info = sources, info
    async with serving(engine), fleet_of(WorkerConfig(url=engine.url)) as (fleet, _):
        (worker,) = fleet.candidates(None)
        assert worker.trust.level is Trust.NONE
        assert says in worker.trust.reason
        assert (worker.source, worker.events_at) == (None, None)


@pytest.mark.parametrize("how", ["worker", "fleet"])
async def test_discovery_can_be_turned_off(how: str) -> None:
    """For one worker or for all: then nobody is asked, and the reason says which setting it was."""
    engine, stream = Pages(), Stream()
    engine.sources = {"0": stream.source}
    async with serving(engine):
        worker = WorkerConfig(url=engine.url, events="none" if how == "worker" else None)
        async with fleet_of(worker, discover_events=how == "worker") as (fleet, _):
            trust = fleet.workers[0].trust
            assert trust.level is Trust.NONE
            assert ("events=none" if how == "worker" else "discover_events is off") in trust.reason
            assert engine.asked == 0
    stream.close()


async def test_configured_events_win() -> None:
    """events= is followed and the engine is not asked."""
    engine, stream = Pages(), Stream()
    engine.sources = {"0": {"enable_kv_cache_events": True, "endpoint": "tcp://*:9"}}
    async with serving(engine):
        worker = WorkerConfig(url=engine.url, events=f"tcp://127.0.0.1:{stream.port}")
        async with fleet_of(worker) as (fleet, _):
            assert fleet.workers[0].events_at.events == worker.events  # type: ignore[union-attr]
            assert engine.asked == 0
    stream.close()


async def test_events_of_an_engine_that_starts_late_are_found() -> None:
    """Down at first, then up without events, then restarted with them: found each time, by itself."""
    engine, stream = Pages(), Stream()
    engine.status = 503
    async with serving(engine), fleet_of(WorkerConfig(url=engine.url)) as (fleet, _):
        (worker,) = fleet.workers
        assert "not been asked yet" in worker.trust.reason
        engine.status = 200
        await until(lambda: worker.healthy, "healthy")
        assert "404" in worker.trust.reason
        engine.sources, engine.started_s = {"0": stream.source}, 2_000.0
        await until(lambda: worker.trust.level is Trust.SYNCED, "found after the restart")
    stream.close()


async def test_a_changed_answer_moves_the_subscription_and_forgets_the_old_stream() -> None:
    """New ports after a restart: the old stream's blocks are gone, the new one's are known."""
    engine, old, new = Pages(), Stream(), Stream()
    engine.sources = {"0": old.source}
    old.store(1)
    new.store(2)
    async with serving(engine), fleet_of(WorkerConfig(url=engine.url)) as (fleet, index):
        (worker,) = fleet.workers
        await until(lambda: hit(index, worker.worker_id, 1) == BLOCK, "the old block")
        engine.sources, engine.started_s = {"0": new.source}, 2_000.0
        await until(lambda: hit(index, worker.worker_id, 2) == BLOCK, "the new block")
        await until(lambda: worker.trust.level is Trust.SYNCED, "synced")
        assert hit(index, worker.worker_id, 1) == 0
        old.store(3)  # what the old stream still says reaches nobody
        new.store(4)
        await until(lambda: hit(index, worker.worker_id, 4) == BLOCK, "a live block")
        assert hit(index, worker.worker_id, 3) == 0
    old.close()
    new.close()


async def test_a_stream_whose_ports_moved_is_found_although_nothing_else_tells_of_a_restart() -> None:
    """No start time in the metrics: a stream that cannot be reached is asked for again."""
    engine, old, new = Pages(), Stream(), Stream()
    engine.started_s = None
    engine.sources = {"0": old.source}
    async with serving(engine), fleet_of(WorkerConfig(url=engine.url)) as (fleet, _):
        (worker,) = fleet.workers
        await until(lambda: worker.trust.level is Trust.SYNCED, "synced")
        old.close()
        engine.sources = {"0": new.source}
        await until(lambda: worker.events_at.events.endswith(f":{new.port}"), "moved")  # type: ignore[union-attr]
        await until(lambda: worker.trust.level is Trust.SYNCED, "synced again")
        assert worker.events_at is not None
        assert worker.events_at.replay == f"tcp://127.0.0.1:{new.replay_port}"
    new.close()


async def test_events_switched_off_by_a_restart_are_forgotten() -> None:
    """The engine comes back without events: nothing that was known is claimed any more."""
    engine, stream = Pages(), Stream()
    engine.sources = {"0": stream.source}
    stream.store(1)
    async with serving(engine), fleet_of(WorkerConfig(url=engine.url)) as (fleet, index):
        (worker,) = fleet.workers
        await until(lambda: hit(index, worker.worker_id, 1) == BLOCK, "the block")
        engine.sources, engine.started_s = {}, 2_000.0
        await until(lambda: worker.trust.level is Trust.NONE, "none")
        assert hit(index, worker.worker_id, 1) == 0
        assert "are off" in worker.trust.reason
    stream.close()


async def test_two_engines_that_name_one_stream_are_not_both_believed() -> None:
    """A stream belongs to one worker: the second that names it is routed by load, and says whose it is."""
    one, two, stream = Pages(), Pages(), Stream()
    one.sources = two.sources = {"0": stream.source}
    async with serving(one, two), fleet_of(WorkerConfig(url=one.url), WorkerConfig(url=two.url)) as (fleet, _):
        followed = [worker for worker in fleet.workers if worker.events_at is not None]
        assert len(followed) == 1
        (other,) = [worker for worker in fleet.workers if worker.events_at is None]
        assert f"which {followed[0].worker_id} follows already" in other.trust.reason
        assert len(fleet.candidates(None)) == 2
    stream.close()


async def test_ranks_of_a_simulated_engine() -> None:
    """Two ranks of one simulated engine: two workers, each synced from its own ports."""
    config = EngineConfig(data_parallel_size=2, events=EventsConfig())
    async with ServedEngine(config) as engine:
        assert engine.address is not None
        async with fleet_of(WorkerConfig(url=engine.address.base_url)) as (fleet, _):
            assert [worker.config.rank for worker in fleet.workers] == [0, 1]
            await until(lambda: set(trust_of(fleet).values()) == {Trust.SYNCED}, "both synced")
