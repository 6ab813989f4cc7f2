"""Ends of processes: SIGTERM that cleans up like Ctrl-C, and children that do not outlive their parent."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator

import click

__all__ = ["sigterm_ends_block", "stop_when_stdin_ends"]

_TERMINATED = 128 + signal.SIGTERM


@contextlib.contextmanager
def sigterm_ends_block() -> Iterator[None]:
    """Make SIGTERM leave the block as Ctrl-C does, so that what it holds is released; the exit code is then 143.

    Only in the main thread. A second SIGTERM does not disturb the cleaning up.
    """
    received = False

    def on_sigterm(*_: object) -> None:
        nonlocal received
        received = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells set it for jobs in the background
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)  # asyncio and blocking calls know how to end on this one

    before = signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    except KeyboardInterrupt:
        if received:
            raise click.exceptions.Exit(_TERMINATED) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def stop_when_stdin_ends(stop: asyncio.Event) -> None:
    """Set `stop` when standard input, a pipe that the parent holds, ends: the parent is gone, however it went.

    Call it on the running event loop.
    """
    loop = asyncio.get_running_loop()
    handle = sys.stdin.fileno()

    def look() -> None:
        if not os.read(handle, 4096):
            loop.remove_reader(handle)
            stop.set()

    loop.add_reader(handle, look)
