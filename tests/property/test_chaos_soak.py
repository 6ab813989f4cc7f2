"""Three days under faults that come again and again, in virtual time: nothing grows.

With `KVATLAS_CHAOS_REQUESTS` of 1000 or more the load is about sixteen times as dense.
"""

import os
from dataclasses import astuple, fields

import pytest

from kvatlas.chaos import ChaosRun, ChaosSettings, Levels

HOURS = 72
REQUESTS = 20_000 if int(os.environ.get("KVATLAS_CHAOS_REQUESTS", "300")) >= 1000 else 1200
WORKERS = 4

FAULTS = {
    "mended losses": "drop:every=10m,for=1m,p=0.3+lost_tail:every=30m,for=5m,quiet=3s+cut:every=1h,for=2m"
    "+duplicate:p=0.05+reorder:p=0.05+restart:every=7h,engine=0",
    "losses for good": "cut:every=8h,for=2h+drop:every=10m,for=1m,p=0.3+replay:mode=truncated,keep=5"
    "+crash:every=13h,engine=1",
    "no replay": "drop:every=10m,for=1m,p=0.3+cut:every=5h,for=30m+restart:every=11h,overtaking=true+no_replay",
}


@pytest.mark.parametrize("name", FAULTS)
def test_three_days_leave_nothing_behind(name: str) -> None:
    """Index, orphans, reports, held batches and timers stay within what the first half showed; claims stay true."""
    rate = REQUESTS / (HOURS * 3600 * WORKERS)
    settings = ChaosSettings(
        workers=WORKERS, requests=REQUESTS, requests_per_s=rate, quiet_s=0.0, num_blocks=200, buffer_steps=100
    )
    run = ChaosRun(settings, FAULTS[name])
    seen: list[tuple[float, Levels]] = []

    def look() -> None:
        seen.append((run.timeline.now_s / 3600, run.levels()))
        run.timeline.after(1800, look)

    run.timeline.after(1800, look)
    outcome = run.run()
    assert outcome.virtual_s > 0.9 * HOURS * 3600
    assert outcome.answered == REQUESTS
    assert max(f.overclaimed_after for f in outcome.findings.values()) == 0
    first = [astuple(levels) for hour, levels in seen if hour <= HOURS / 2]
    second = [astuple(levels) for hour, levels in seen if hour > HOURS / 2]
    room = Levels(index_bytes=200_000, entries=200, orphans=1024, reported=200, held_batches=16, timers=512)
    for place, field in enumerate(fields(Levels)):
        before = max(levels[place] for levels in first)
        after = max(levels[place] for levels in second)
        assert after <= 1.25 * before + astuple(room)[place], f"{field.name} grew from {before} to {after}"
