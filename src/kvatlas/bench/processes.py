"""Child processes of a benchmark: start one, learn its port, read its processor time, stop it."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kvatlas.errors import ConfigError

__all__ = ["Child", "Ready", "child", "run_module", "yield_to_the_measured"]

_STOP_S = 5.0


class Ready(msgspec.Struct):
    """The line a child prints once it listens."""

    port: int


class Child:
    """A running child process that listens on loopback."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = process
        self.port = port

    def cpu_us(self) -> float:
        """Processor time of the process and all its threads so far, in microseconds.

        Source: /proc/<pid>/task/*/schedstat, first field, nanoseconds.

        Raises:
            ConfigError: this system has no such file.
        """
        total_ns = 0
        try:
            for task in Path(f"/proc/{self._process.pid}/task").iterdir():
                total_ns += int((task / "schedstat").read_text("ascii").split()[0])
        except OSError as error:
            raise ConfigError(f"the benchmark reads processor time from schedstat in /proc: {error}") from error
        return total_ns / 1000


@contextlib.contextmanager
def child(module: str, *arguments: str) -> Iterator[Child]:
    """Run `main()` of a module as a process with these arguments, wait for its `Ready` line, stop it at the end.

    Raises:
        ConfigError: it ended before it was ready.
    """
    command = _command(module, arguments)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            line = process.stdout.readline() if process.stdout is not None else b""
            if not line:
                raise ConfigError(f"benchmark process {module} ended before it listened: its own error says why")
            yield Child(process, msgspec.json.decode(line, type=Ready).port)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            process.kill()


def yield_to_the_measured() -> None:
    """Put this process in the batch class, where the system has one.

    A process of that class does not interrupt a running one when it is woken. Backend and load do this: otherwise every
    write of the proxy on a small machine hands its core to them in the middle of a request, and the cold caches
    afterwards would be charged to the proxy.
    """
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def run_module(module: str, arguments: Sequence[str], timeout_s: float) -> bytes:
    """Run `main()` of a module as a process to its end and return what it printed.

    Raises:
        ConfigError: it failed or took longer than `timeout_s`.
    """
    try:
        done = subprocess.run(_command(module, arguments), stdout=subprocess.PIPE, check=True, timeout=timeout_s)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"benchmark process {module} did not finish: {error}") from error
    return done.stdout


def _command(module: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", f"from {module} import main; main()", *arguments]
