"""Benchmarks that put ours beside a peer in the same run, on the same machine, over loopback.

What lives here: the workloads and their measurement, as library functions that return a `BenchReport`. What must not:
printing and command-line options, which belong to the command.
"""

from kvatlas.bench.gateway import run_gateway_bench
from kvatlas.bench.report import BenchReport, BenchRow, machine_name

__all__ = ["BenchReport", "BenchRow", "machine_name", "run_gateway_bench"]
