"""A peer in a process of its own: an interpreter that has it runs one of our files and answers JSON lines."""

import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.errors import ConfigError

__all__ = ["PeerProcess", "peer_process"]


class PeerProcess:
    """One JSON line asks, one answers.

    Args:
        process: the child, with pipes for stdin and stdout.
        needs: what its interpreter must have, for the error when it ends.
    """

    def __init__(self, process: subprocess.Popen[bytes], needs: str) -> None:
        self._process = process
        self._needs = needs

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The whole process stands still until the block ends; what is sent to it waits."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def ask(self, **command: Any) -> Any:
        """Return the answer to a command.

        Raises:
            ConfigError: the process ended.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise ConfigError("the peer's process has no pipes")
        try:
            stdin.write(msgspec.json.encode(command) + b"\n")
            stdin.flush()
            line = stdout.readline()
        except OSError:
            line = b""
        if not line:
            raise ConfigError(
                f"the peer's process ended: its own error says why (does its interpreter have {self._needs}?)"
            )
        return msgspec.json.decode(line)


@contextmanager
def peer_process(
    interpreter: str | Path, script: str, *, needs: str, environment: Mapping[str, str]
) -> Iterator[PeerProcess]:
    """Run a file under another interpreter until the block ends.

    Raises:
        ConfigError: there is no such interpreter.
    """
    try:
        process = subprocess.Popen(
            [str(interpreter), script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(environment)
        )
    except OSError as error:
        raise ConfigError(
            f"the interpreter {str(interpreter)!r} cannot be started ({error.strerror}): run `make test-real` first, "
            "which installs one with vLLM, or give --interpreter"
        ) from error
    try:
        yield PeerProcess(process, needs)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # what was written to a process that is gone
                if pipe is not None:
                    pipe.close()
