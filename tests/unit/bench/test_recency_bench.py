"""The recency benchmark: its score is an area under a curve, its fleet is repeatable, its rows are made."""

import json
import random

import pytest
from click.testing import CliRunner

from kvatlas.bench.recency import score_recording
from kvatlas.bench.recency_fleet import FleetLoad, simulate_fleet
from kvatlas.bench.recency_score import GUESSES, RemovalScore, ScoredWorker
from kvatlas.cli.main import cli
from kvatlas.errors import EventDecodeError
from kvatlas.events import BlockRemoved, BlockStored
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import BLOCKS_PER_STAMP, PrefixIndex

SMALL = FleetLoad(num_blocks=300, users=24, think_s=2.0, requests=120)


def test_the_area() -> None:
    """A guess that ranks all pairs rightly has 1, one that ranks them wrongly 0, ties half; nothing seen is chance."""
    score = RemovalScore()
    assert score.area("stamp") == 0.5
    score.compare([(9, 9, 1, 5, 2)], [(3, 3, 2, 5, 1), (9, 4, 3, 5, 3)])
    assert [score.area(guess) for guess in GUESSES] == [0.75, 1.0, 0.0, 0.5, 0.5]
    assert (score.pairs, score.removed) == (2, 1)


def test_an_engine_that_gives_up_the_oldest_is_foreseen() -> None:
    """One worker, least recently used goes first, blocks used again in between: own use knows, a stamp does but for ties."""
    index = PrefixIndex(BlockKeyHasher(1))
    index.add_worker("w", block_size=2)
    score = RemovalScore()
    books = ScoredWorker(index, "w", score, random.Random(1))
    used: list[int] = []
    for turn in range(40):
        tokens = [turn, 7] * BLOCKS_PER_STAMP
        hashes = [turn * 1000 + i for i in range(BLOCKS_PER_STAMP)]
        events = [BlockStored(hashes, None, tokens, 2, medium="GPU")]
        if len(used) == 8:
            gone = used.pop(0)
            events.append(BlockRemoved([gone * 1000 + i for i in range(BLOCKS_PER_STAMP)][::-1], medium="GPU"))
        books.before_step(events)
        for event in events:
            index.apply("w", event)
        used.append(turn)
        if turn % 3 == 0:
            again = used.pop(1) if len(used) > 1 else used.pop()
            used.append(again)
            prompt = [again, 7] * BLOCKS_PER_STAMP + [1]
            index.match(prompt)
            books.used(prompt)
    assert score.removed > 1000
    assert score.area("stamp") > 0.97
    assert score.area("own use") > 0.99
    assert score.area("requests") == score.area("stamp")  # nobody told of requests
    assert score.area("birth") < score.area("stamp")
    assert score.area("random") == pytest.approx(0.5, abs=0.02)


def test_a_small_fleet() -> None:
    """The same seed gives the same result; removals happen, and requests tell more than stamps, those than chance."""
    first, second = (simulate_fleet(SMALL, policy="cost", seed=3) for _ in range(2))
    assert first == second
    assert first.score.removed > 200
    assert first.score.area("stamp") > 0.6
    assert first.score.area("requests") > first.score.area("stamp")
    assert first.score.area("random") == pytest.approx(0.5, abs=0.03)


def test_the_command() -> None:
    """A row for each other guess of each load, policy and recording, as JSON."""
    arguments = ["bench", "recency", "--seeds", "1", "--requests", "30", "--policy", "cost", "--json"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    areas = [row for row in rows if row["unit"] == "area"]
    assert len(areas) == (2 + 4) * (len(GUESSES) - 1)
    assert all(0.0 <= row["ours"] <= 1.0 and 0.0 <= row["peer_value"] <= 1.0 for row in areas)
    assert {row["peer"] for row in areas} == set(GUESSES[1:])


def test_another_file(tmp_path) -> None:
    """What is no recording of operations is refused by its name."""
    path = tmp_path / "full-x.jsonl"
    path.write_text('{"no": "operation"}\n')
    with pytest.raises(EventDecodeError, match=r"full-x\.jsonl: expected recorded cache operations"):
        score_recording(path)
