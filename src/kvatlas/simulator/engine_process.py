"""One engine process as its parent sees it."""

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from typing import IO

import msgspec

from kvatlas.errors import ConfigError
from kvatlas.simulator.address import EngineAddress
from kvatlas.simulator.config import EngineConfig

__all__ = ["EngineProcess"]

_STOP_TIMEOUT_S = 5.0
_LAST_WORDS_TIMEOUT_S = 2.0
_MOST_SAID_BYTES = 4000


class EngineProcess:
    """A started `python -m kvatlas.simulator`. It ends with its parent: its standard input is the parent's hand.

    Args:
        config: its own, ports included.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `wait`
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "kvatlas.simulator", "--follow-stdin"),
                *("--config", msgspec.json.encode(config).decode()),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
        )
        self._address: EngineAddress | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is alive."""
        return self._process.poll() is None

    @property
    def exit_status(self) -> int | None:
        """How it ended: its status, or minus the signal that ended it; None while it runs."""
        return self._process.poll()

    @property
    def address(self) -> EngineAddress:
        """Where it serves, known after `await_address`."""
        if self._address is None:
            raise ConfigError(f"the engine process {self.pid} has not said where it serves")
        return self._address

    @property
    def settled_config(self) -> EngineConfig:
        """Its configuration with the ports it got: another process started from it takes its place.

        Several ranks on free ports get free ports again: theirs do not follow one another.
        """
        if self._config.data_parallel_size > 1:
            return msgspec.structs.replace(self._config, port=self.address.port)
        events = msgspec.structs.replace(
            self._config.events,
            endpoint=self.address.events_endpoint or self._config.events.endpoint,
            replay_endpoint=self.address.replay_endpoint,
        )
        return msgspec.structs.replace(self._config, port=self.address.port, events=events)

    def await_address(self, deadline_s: float) -> EngineAddress:
        """Wait until it serves.

        Args:
            deadline_s: on the monotonic clock.

        Raises:
            ConfigError: it ended, or said nothing in time; the message holds its last words.
        """
        line = self._read_line(deadline_s)
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_WORDS_TIMEOUT_S)  # it said nothing more: it may be on its way out
            self.kill()
            status = self._process.returncode
            raise ConfigError(f"a simulated engine did not start (exit status {status}): {self._last_words()}")
        self._address = msgspec.json.decode(line, type=EngineAddress)
        return self._address

    def ask_to_stop(self) -> None:
        """Send SIGTERM and go on; `wait` for the end."""
        if self.is_running:
            self._process.terminate()

    def kill(self) -> None:
        """End it at once and wait for it."""
        self._process.kill()
        self._process.wait()

    def wait(self) -> None:
        """Wait for the end, some seconds long, then enforce it. Releases the pipes."""
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _read_line(self, deadline_s: float) -> bytes:
        if self._process.stdout is None:
            return b""
        handle = self._process.stdout.fileno()
        line = b""
        while not line.endswith(b"\n"):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([handle], [], [], left_s)[0]:
                return b""
            piece = os.read(handle, 4096)
            if not piece:
                return b""
            line += piece
        return line

    def _last_words(self) -> str:
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - _MOST_SAID_BYTES))
        return self._said.read().decode(errors="replace").strip() or "it said nothing"
