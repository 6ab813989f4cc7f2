"""What cannot work is refused before anything starts."""

import msgspec
import pytest

from kvatlas.errors import ConfigError
from kvatlas.simulator import (
    ConnectorConfig,
    EngineConfig,
    EngineCore,
    EventsConfig,
    GroupConfig,
    LatencyConfig,
    ReplySampler,
    SimulatedFleet,
    SpeculativeConfig,
    config_for_engine,
)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"block_size": 0}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"model": ""}, "model"),
        ({"port": 70_000}, "port"),
        ({"num_blocks": 10}, "num_blocks >= 1025"),
        ({"data_parallel_size": 0}, "data_parallel_size"),
        ({"max_num_queued_reqs": -1}, "max_num_queued_reqs"),
        ({"watermark": 1.0}, "watermark"),
        ({"model": "m", "lora_modules": {"m": "/path"}}, "adapter 'm'"),
    ],
)
def test_bad_engine_values(values, named):
    """The message names the value and what would do."""
    with pytest.raises(ConfigError, match=named):
        EngineConfig(**values)


@pytest.mark.parametrize("values", [{"prefill_tokens_per_s": 0}, {"jitter": 1.0}, {"time_scale": -1}])
def test_bad_latency_values(values):
    """A rate of nothing, a jitter that stops time, time that runs backwards."""
    with pytest.raises(ConfigError, match=next(iter(values))):
        LatencyConfig(**values)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: GroupConfig(kind="sliding_window"), "window"),
        (lambda: SpeculativeConfig(num_tokens=-1), "num_tokens"),
        (lambda: SpeculativeConfig(acceptance_rate=1.5), "acceptance_rate"),
    ],
)
def test_bad_parts(make, named):
    """Groups and drafts that cannot be."""
    with pytest.raises(ConfigError, match=named):
        make()


def test_groups_that_cannot_work_together():
    """What the cache refuses is refused when the engine is built, with the cache's own words."""
    groups = (GroupConfig(kind="full_attention"), GroupConfig(kind="chunked_local_attention", window=64, block_size=8))
    with pytest.raises(ConfigError, match="one block size"):
        EngineCore(EngineConfig(groups=groups), ReplySampler((1,), eos_token_id=None))


def test_config_survives_the_trip_to_the_process():
    """Encoded and decoded it is the same value; an unknown field is refused."""
    config = EngineConfig(
        model="m",
        hash_algo="xxhash_cbor",
        hash_seed="0",
        latency=LatencyConfig(jitter=0.1),
        groups=(GroupConfig(kind="sliding_window", window=64), GroupConfig(kind="full_attention")),
        connector=ConnectorConfig(kind="host", host_blocks=9),
        speculative=SpeculativeConfig(num_tokens=2, method="eagle"),
        lora_modules={"a": "/a"},
    )
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config
    with pytest.raises(msgspec.ValidationError, match="blocksize"):
        msgspec.json.decode(b'{"blocksize": 16}', type=EngineConfig)


def test_ports_count_up():
    """Engine i gets every fixed port + i; free ports stay free."""
    config = EngineConfig(port=8100, events=EventsConfig(endpoint="tcp://*:5557", replay_endpoint="tcp://*:0"))
    third = config_for_engine(config, 2)
    assert (third.port, third.events.endpoint, third.events.replay_endpoint) == (8102, "tcp://*:5559", "tcp://*:0")
    assert third.engine_index == 2


def test_colliding_ports_are_refused():
    """The usual neighbours 5557 and 5558 collide in a fleet of two."""
    events = EventsConfig(endpoint="tcp://127.0.0.1:5557", replay_endpoint="tcp://127.0.0.1:5558")
    SimulatedFleet(1, EngineConfig(events=events))
    with pytest.raises(ConfigError, match="5558"):
        SimulatedFleet(2, EngineConfig(events=events))


def test_empty_fleet_is_refused():
    """A fleet of none serves nobody."""
    with pytest.raises(ConfigError, match="at least one"):
        SimulatedFleet(0)


def test_faults_of_engines_and_ranks_that_are_not_there_are_refused():
    """A fault that could never come is a mistake; a spec is checked before any engine starts."""
    with pytest.raises(ConfigError, match="no fault 'dorp'"):
        EngineConfig(faults=("dorp",))
    with pytest.raises(ConfigError, match="ranks are 0 to 0"):
        EngineConfig(faults=("drop:rank=1",))
    with pytest.raises(ConfigError, match="engines 0 to 1"):
        SimulatedFleet(2, EngineConfig(faults=("hang:engine=2",)))
    EngineConfig(faults=("drop:rank=1",), data_parallel_size=2)
