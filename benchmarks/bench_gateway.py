"""Print what the gateway costs per request and per event beside a peer; fail when it is not worth its name.

    python benchmarks/bench_gateway.py [SECONDS]

The guard is a ratio of processor times within one run, as absolute figures depend on the machine: aiohttp must cost at
least three times as much per JSON request.
"""

import sys

from kvatlas.bench import run_gateway_bench

LEAST_JSON_RATIO = 3.0


def main() -> int:
    report = run_gateway_bench(float(sys.argv[1]) if len(sys.argv) > 1 else 3.0)
    print(report.machine)
    for row in report.rows:
        print(f"{row.work:62} {row.ours:8.2f} {row.unit:14} {row.peer} {row.peer_value:8.2f}  x{row.ratio:.2f}")
    json_ratio = report.rows[0].ratio
    if json_ratio < LEAST_JSON_RATIO:
        print(f"JSON ratio {json_ratio} is below {LEAST_JSON_RATIO}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
