"""Print what the prefix cache costs beside vLLM's own; fail when it is slower on any recording.

    python benchmarks/bench_prefix_cache.py [INTERPRETER [ROUNDS]]

INTERPRETER has vLLM 0.32 (default .venv-real/bin/python); "none" measures ours alone. Recordings are those of
KVATLAS_GOLDEN, else ../shared/golden, else the samples in tests/vectors. The guard is a ratio of processor times within
one run, as absolute figures depend on the machine.
"""

import os
import sys
from pathlib import Path

from kvatlas.bench.prefix_cache import run_prefix_cache_bench

PROJECT_ROOT = Path(__file__).resolve().parents[1]


def recordings() -> list[Path]:
    beside = PROJECT_ROOT.parent / "shared" / "golden"
    roots = [Path(os.environ.get("KVATLAS_GOLDEN", beside)), PROJECT_ROOT / "tests" / "vectors"]
    return next(files for root in roots if (files := sorted((root / "core").glob("*.jsonl"))))


def main() -> int:
    interpreter = sys.argv[1] if len(sys.argv) > 1 else str(PROJECT_ROOT / ".venv-real" / "bin" / "python")
    report = run_prefix_cache_bench(
        recordings(),
        against=None if interpreter == "none" else "vllm",
        interpreter=interpreter,
        rounds=int(sys.argv[2]) if len(sys.argv) > 2 else 9,
    )
    print(report.machine)
    slower = []
    for row in report.rows:
        peer = "" if row.peer is None else f"  {row.peer} {row.peer_value:10.2f}  x{row.ratio:.2f}"
        print(f"{row.work:62} {row.ours:10.2f} {row.unit:14}{peer}")
        if row.ratio is not None and row.ratio < 1:
            slower.append(row.work)
    for work in slower:
        print(f"slower than the peer: {work}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
