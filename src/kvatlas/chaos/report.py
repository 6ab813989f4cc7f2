"""Runs side by side, and what each showed in one row."""

import math
from collections.abc import Callable, Iterable, Sequence

import msgspec

from kvatlas.chaos.run import ChaosRun, ChaosSettings, Outcome
from kvatlas.chaos.scenarios import DEFAULT_SCENARIOS, scenario

__all__ = ["ChaosReport", "ChaosRow", "run_chaos"]

_LATE_S = 0.1
"""Room for the question after a poll falls due and for its answer."""
_SLACK_TURNOVERS = 0.25
"""The batch that completes a turnover may be a large one."""


class ChaosRow(msgspec.Struct, frozen=True):
    """One run; the worst of its workers. None where it does not apply.

    Attributes:
        fault: as it was asked for.
        seed: of traffic, engines and faults.
        detect_s: longest time from the first batch that did not arrive, or from the end of a life, until the worker had
            no credit, its claims were in doubt, or the batch was applied after all. None: nothing was lost.
        overclaimed_blocks_before_detection: most blocks claimed at full credit and not held, at an instant when nothing
            had arrived from which anybody could know of the loss.
        overclaimed_blocks_after_detection: the same at all other instants. A guarantee: 0.
        unconfirmed_gone_after_turnovers: turnovers of the worker's pool from the last loss until no claim of before it
            was left that nothing had confirmed. None: no claim came in doubt. A guarantee: within one, as the index
            counts the stores it hears of.
        recall_99_after_turnovers: turnovers from the last loss until, of the leading prompt blocks that a worker held,
            weighted by being asked for, at least 99 % were claimed with credit from then on. None: nothing was lost,
            or it did not come so far, or the run was over before one turnover was.
        broken: guarantees that did not hold, in words.
    """

    fault: str
    seed: int
    detect_s: float | None
    overclaimed_blocks_before_detection: int
    overclaimed_blocks_after_detection: int
    unconfirmed_gone_after_turnovers: float | None
    recall_99_after_turnovers: float | None
    broken: tuple[str, ...] = ()


class ChaosReport(msgspec.Struct, frozen=True):
    """All runs. Attributes: rows: one for each."""

    rows: tuple[ChaosRow, ...]

    @property
    def is_kept(self) -> bool:
        """Whether every guarantee held in every run."""
        return not any(row.broken for row in self.rows)


def run_chaos(
    settings: ChaosSettings,
    faults: Sequence[str] = DEFAULT_SCENARIOS,
    *,
    on_row: Callable[[ChaosRow], None] = lambda _: None,
) -> ChaosReport:
    """Make one run for each set of faults. Cost: about 1.5 ms of processor time for each request.

    Args:
        on_row: told of every run that ended.

    Raises:
        ConfigError: faults that do not parse; before the first run.
    """
    for name in faults:
        scenario(name, settings.duration_s)
    rows: list[ChaosRow] = []
    for name in faults:
        run = ChaosRun(settings, name)
        rows.append(_row(run.scenario.name, settings.seed, run.run()))
        on_row(rows[-1])
    return ChaosReport(tuple(rows))


def _row(fault: str, seed: int, outcome: Outcome) -> ChaosRow:
    findings = list(outcome.findings.values())
    lossy = [each for each in findings if each.losses]
    recalls = [each.recall_99_after_turnovers for each in lossy]
    row = ChaosRow(
        fault=fault,
        seed=seed,
        detect_s=_worst(each.detect_s for each in findings),
        overclaimed_blocks_before_detection=max(each.overclaimed_before for each in findings),
        overclaimed_blocks_after_detection=max(each.overclaimed_after for each in findings),
        unconfirmed_gone_after_turnovers=_worst(each.doubts_gone_after_turnovers for each in findings),
        recall_99_after_turnovers=None if math.inf in recalls else _worst(recalls),
    )
    late_s = max(each.late_s for each in findings)
    return msgspec.structs.replace(row, broken=_broken(row, late_s, outcome))


def _broken(row: ChaosRow, late_s: float, outcome: Outcome) -> tuple[str, ...]:
    broken = []
    if row.overclaimed_blocks_after_detection:
        first = next((f.first_violation for f in outcome.findings.values() if f.first_violation), "")
        broken.append(f"{row.overclaimed_blocks_after_detection} blocks over-claimed after detection, first at {first}")
    if late_s > _LATE_S:
        broken.append(f"a loss was detected {late_s:.1f} s after a poll was due")
    if (row.unconfirmed_gone_after_turnovers or 0.0) > 1 + _SLACK_TURNOVERS:
        broken.append(f"doubts lasted {row.unconfirmed_gone_after_turnovers:.2f} turnovers")
    return tuple(broken)


def _worst(values: Iterable[float | None]) -> float | None:
    return max((round(value, 3) for value in values if value is not None), default=None)
