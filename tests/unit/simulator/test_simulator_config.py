"""What cannot work is refused before anything starts."""

import msgspec
import pytest

from kvatlas.errors import ConfigError
from kvatlas.simulator import EngineConfig, EventsConfig, LatencyConfig, SimulatedFleet, config_for_engine


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"block_size": 0}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"model": ""}, "model"),
        ({"port": 70_000}, "port"),
        ({"num_blocks": 10}, "num_blocks >= 1025"),
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


def test_config_survives_the_trip_to_the_process():
    """Encoded and decoded it is the same value; an unknown field is refused."""
    config = EngineConfig(model="m", hash_algo="xxhash_cbor", hash_seed="0", latency=LatencyConfig(jitter=0.1))
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
