"""Several simulated engines, each a process of its own: what demos and tests put behind a gateway.

Not asyncio: starting and stopping block. From an event loop call them in a thread.
"""

import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from kvatlas.errors import ConfigError
from kvatlas.rendering import write_tiny_model
from kvatlas.simulator.address import EngineAddress
from kvatlas.simulator.config import EngineConfig, config_for_engine
from kvatlas.simulator.engine_process import EngineProcess
from kvatlas.simulator.fault_specs import parse_fault

__all__ = ["SimulatedFleet"]

_START_TIMEOUT_S = 30.0


class SimulatedFleet:
    """`num_engines` engine processes. A context manager: they run inside the `with` block and no longer.

    All engines share the configuration; fixed ports count up from it (engine i: port + i, for events and replay
    too), port 0 gives each its own free ports. Without a tokenizer, one is made on the spot and shared: `tokenizer`
    says where.

    Args:
        num_engines: >= 1.
        config: what they have in common.

    Raises:
        ConfigError: no engines, ports that collide, or a fault of an engine that there is not.
    """

    def __init__(self, num_engines: int, config: EngineConfig | None = None) -> None:
        if num_engines < 1:
            raise ConfigError(f"a fleet needs at least one engine, {num_engines} were asked for")
        self._num_engines = num_engines
        self._config = config or EngineConfig()
        self._processes: dict[int, EngineProcess] = {}
        self._model_folder: tempfile.TemporaryDirectory[str] | None = None
        _check_faults(self._config.faults, num_engines)
        _check_ports([config_for_engine(self._config, index) for index in range(num_engines)])

    @property
    def engines(self) -> tuple[EngineAddress, ...]:
        """Addresses of the engines, by index; those of killed engines stay."""
        return tuple(self._processes[index].address for index in sorted(self._processes))

    @property
    def exit_statuses(self) -> tuple[int | None, ...]:
        """How each engine ended, by index: its status, or minus the signal that ended it; None while it runs."""
        return tuple(self._processes[index].exit_status for index in sorted(self._processes))

    @property
    def tokenizer(self) -> str:
        """Folder (or hub name) of the tokenizer all engines use; a folder made on the spot lives until `stop`.

        Raises:
            ConfigError: there is none before `start`.
        """
        if self._config.tokenizer is not None:
            return self._config.tokenizer
        if self._model_folder is None:
            raise ConfigError("the fleet's tokenizer is made when it starts: start it first")
        return self._model_folder.name

    def start(self) -> None:
        """Start all engines side by side and wait until every one serves.

        Raises:
            ConfigError: an engine did not start; the message holds what it said. The others are stopped.

        Cost: about 1.5 s for 4 engines on 2 cores.
        """
        if self._config.tokenizer is None:
            self._model_folder = tempfile.TemporaryDirectory(prefix="kvatlas-sim-")
            write_tiny_model(Path(self._model_folder.name))
        shared = msgspec.structs.replace(self._config, tokenizer=self.tokenizer)
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        try:
            for index in range(self._num_engines):
                self._processes[index] = EngineProcess(config_for_engine(shared, index))
            for process in self._processes.values():
                process.await_address(deadline_s)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop all engines: a signal, some seconds, then the hard way. Safe to call again."""
        processes = list(self._processes.values())
        self._processes.clear()
        for process in processes:
            process.ask_to_stop()
        for process in processes:
            process.wait()
        if self._model_folder is not None:
            self._model_folder.cleanup()
            self._model_folder = None

    def kill(self, index: int) -> None:
        """End one engine at once, as a crash would; its clients see broken connections."""
        self._processes[index].kill()

    def restart(self, index: int) -> EngineAddress:
        """Start engine `index` again on the ports it had, killing it first if it still runs. Its cache is empty."""
        old = self._processes[index]
        settled = old.settled_config
        old.kill()
        old.wait()
        self._processes[index] = EngineProcess(settled)
        return self._processes[index].await_address(time.monotonic() + _START_TIMEOUT_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _check_faults(specs: tuple[str, ...], num_engines: int) -> None:
    for text in specs:
        engine = parse_fault(text).engine or 0
        if engine >= num_engines:
            raise ConfigError(f"fault {text!r} is of engine {engine}: the fleet has engines 0 to {num_engines - 1}")


def _check_ports(configs: list[EngineConfig]) -> None:
    taken: dict[int, str] = {}
    for index, config in enumerate(configs):
        for use, port in _ports_of(config):
            if port in taken:
                raise ConfigError(
                    f"engine {index}'s {use} port {port} is {taken[port]} already: engine i takes every port + i, so "
                    "set the ports further apart, or 0 for free ones"
                )
            taken[port] = f"engine {index}'s {use} port"


def _ports_of(config: EngineConfig) -> list[tuple[str, int]]:
    """The fixed ports an engine takes, each with its use; every rank has its own event ports."""
    ports = [("HTTP", config.port)] if config.port else []
    if config.events.enabled:
        for use, endpoint in (("events", config.events.endpoint), ("replay", config.events.replay_endpoint)):
            text = (endpoint or "").rpartition(":")[2]
            if text.isdecimal() and text != "0":
                ports += [(use, int(text) + rank) for rank in range(config.data_parallel_size)]
    return ports
