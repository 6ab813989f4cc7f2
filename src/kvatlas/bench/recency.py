"""How well the index's stamps tell which block an engine removes next, and what the survival curve foresees.

On simulated fleets in virtual time, and on recorded operations of a real engine's cache manager with their events.
"""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.bench.recency_fleet import FleetLoad, FleetResult, simulate_fleet
from kvatlas.bench.recency_score import GUESSES, RemovalScore, ScoredWorker
from kvatlas.bench.report import BenchReport, BenchRow, machine_name
from kvatlas.errors import EventDecodeError
from kvatlas.events import Event
from kvatlas.hashing import NO_EXTRAS, BlockKeyHasher, RequestExtras
from kvatlas.index import CopyMode, PrefixIndex

__all__ = ["LOADS", "run_recency_bench", "score_recording"]

_UNIT = "area"
_WORKER = "recorded"
_ABSENT = {"parent_block_hash": None}
"""Fields that recordings leave out when they are null."""


LOADS = {"usual": FleetLoad(), "crowded": FleetLoad(num_blocks=513, users=64, think_s=4.0)}
"""crowded: half the room for two thirds of the users, who think half as long."""


def run_recency_bench(
    recordings: Sequence[Path],
    *,
    policies: Sequence[str] = ("cost", "round_robin"),
    seeds: int = 2,
    requests: int = 1500,
) -> BenchReport:
    """Area under the ROC curve of "removed next", by stamp beside each other guess, of each load and recording.

    Args:
        recordings: operations of a real cache manager with their events, of models with one kind of layers.
        policies: who routes on the simulated fleets.
        seeds: runs of each load and policy; the pairs of all count together.
        requests: of each run.

    Raises:
        EventDecodeError: a file is not such a recording.
        OSError: a file cannot be read.

    Cost: 5 to 20 s a run.
    """
    rows: list[BenchRow] = []
    for (name, load), policy in itertools.product(LOADS.items(), policies):
        sized = replace(load, requests=requests)
        results = [simulate_fleet(sized, policy=policy, seed=seed) for seed in range(seeds)]
        rows += _areas(f"{name} load, {policy}", [result.score for result in results])
        rows += _foresight(f"{name} load, {policy}", results)
    for path in recordings:
        rows += _areas(path.name, [score_recording(path)])
    return BenchReport(machine_name(), rows)


class _Operation(msgspec.Struct):
    """A line of a recording of vLLM's cache manager, as far as it matters here."""

    op: str
    tokens: list[int] = []
    cache_salt: str | None = None
    prompt_logprobs: bool = False
    events: list[dict[str, Any]] = []


def score_recording(path: Path) -> RemovalScore:
    """Score the removals in recorded operations of a real cache; prompts are looked up before they are admitted.

    Raises:
        EventDecodeError: a line is not such an operation.
        OSError: the file cannot be read.
    """
    index = PrefixIndex(BlockKeyHasher(0))
    index.add_worker(_WORKER, copy_mode=CopyMode.SET)
    score = RemovalScore()
    books = ScoredWorker(index, _WORKER, score, random.Random(0), counting=False)
    try:
        with path.open("rb") as lines:
            for line in lines:
                _play(msgspec.json.decode(line, type=_Operation), index, books)
    except msgspec.MsgspecError as error:
        raise EventDecodeError(f"{path}: expected recorded cache operations, one JSON object a line: {error}") from None
    return score


def _play(operation: _Operation, index: PrefixIndex, books: ScoredWorker) -> None:
    if operation.op == "admit" and not operation.prompt_logprobs:
        extras = RequestExtras(cache_salt=operation.cache_salt) if operation.cache_salt else NO_EXTRAS
        index.match(operation.tokens, extras=extras)
        books.used(operation.tokens)
    events = [msgspec.convert(_ABSENT | event, Event) for event in operation.events]
    books.before_step(events)
    for event in events:
        index.apply(_WORKER, event)


def _areas(name: str, scores: Sequence[RemovalScore]) -> list[BenchRow]:
    total = RemovalScore()
    for score in scores:
        total.pairs += score.pairs
        total.removed += score.removed
        for guess in GUESSES:
            total.won[guess] += score.won[guess]
    work = f"{name}: removed next of {total.removed} removals, by {GUESSES[0]}"
    ours = total.area(GUESSES[0])
    return [BenchRow(work, _UNIT, ours, other, total.area(other)) for other in GUESSES[1:]]


def _foresight(name: str, results: Sequence[FleetResult]) -> list[BenchRow]:
    claimed = sum(result.claimed_tokens for result in results)
    if not claimed:
        return []
    waited = sum(result.waited for result in results)
    foreseen = sum(result.foreseen_tokens for result in results)
    found = sum(result.found_tokens for result in results)
    work = f"{name}: foreseen share of a hit left behind a queue, {waited} requests"
    ours, stamps, without = (math.sqrt(sum(result.errors[which] for result in results) / claimed) for which in range(3))
    error = f"{name}: root mean square error of that share"
    return [
        BenchRow(work, "share", foreseen / claimed, "found", found / claimed),
        BenchRow(error, "share", ours, "by stamps", stamps),
        BenchRow(error, "share", ours, "no discount", without),
    ]
