"""The shape every benchmark reports in."""

import os
import platform
from pathlib import Path

import msgspec

__all__ = ["BenchReport", "BenchRow", "machine_name"]


class BenchRow(msgspec.Struct, frozen=True):
    """One measurement of ours, beside one peer's of the same work when there is a peer."""

    work: str
    unit: str
    """What `ours` and `peer_value` count; less is better unless it ends in `/s`, or is an area under a curve."""
    ours: float
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    """How many times better ours is."""


class BenchReport(msgspec.Struct, frozen=True):
    """What `kvatlas bench --json` prints."""

    machine: str
    rows: list[BenchRow]


def machine_name() -> str:
    """Processor, its usable cores and the interpreter, in one line."""
    try:
        model = next(
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines()
            if line.startswith("model name")
        )
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"
