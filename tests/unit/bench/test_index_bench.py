"""The index benchmark: its work is what it says, every row is made, a peer is measured or missed by name."""

import io
import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvatlas.bench import index_ours
from kvatlas.bench.index import run_index_bench
from kvatlas.bench.index_check import CheckResult
from kvatlas.bench.index_kit import (
    BLOCK_SIZE,
    PATTERNS,
    Works,
    laddered,
    last_prompts,
    local_hashes,
    sessions,
    stores,
    token_ids,
)
from kvatlas.bench.index_kit.serve import answer_all
from kvatlas.bench.index_ours import OurIndex
from kvatlas.cli import bench as bench_command
from kvatlas.cli.main import cli
from kvatlas.errors import ConfigError
from support.fake_dynamo import write_fake_dynamo

QUICK = {"rounds": 1, "scale": 0.001}
FORMS = {"bytes": {}, "decoded": {"decoded": True}, "tokens": {"tokens": True}}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["bench", "index", *arguments])


class TestWorkload:
    def test_same_seed_same_prompts(self) -> None:
        """The peer's process makes the same work from the same numbers."""
        assert laddered(4, 8, "ladder", count=2) == laddered(4, 8, "ladder", count=2)
        assert list(sessions(4, 500, copies=2)) == list(sessions(4, 500, copies=2))

    def test_blocks_are_known_by_their_content(self) -> None:
        """16 token ids a block and one token hash, functions of the block and different for different ones."""
        hashes = laddered(1, 64, "full", count=1)[0].hashes
        ids = token_ids(hashes)
        blocks = {tuple(ids[start : start + BLOCK_SIZE]) for start in range(0, len(ids), BLOCK_SIZE)}
        assert len(ids) == 64 * BLOCK_SIZE
        assert max(ids) < 1 << 17
        assert len(blocks) == len(set(local_hashes(hashes))) == 64

    @pytest.mark.parametrize(
        ("pattern", "depths"), [("full", [32] * 4), ("single", [2, 2, 2, 32]), ("ladder", [16, 20, 24, 32])]
    )
    def test_patterns(self, pattern: str, depths: list[int]) -> None:
        """How many of 32 blocks each of four workers holds."""
        (prompt,) = laddered(4, 32, pattern, count=1)
        assert sorted(prompt.held.values()) == depths

    def test_an_engine_announces_a_block_once(self) -> None:
        """System prompts are announced by a worker with its first conversation only, parents before children."""
        seen: set[tuple[int, int]] = set()
        for event in stores(sessions(3, 2_000, copies=2), 16):
            assert event.parent is None or (event.worker, event.parent) in seen
            new = {(event.worker, block) for block in event.hashes}
            assert not new & seen
            seen |= new
        assert 2_000 <= len(seen) < 2_400

    def test_last_prompts(self) -> None:
        """When every worker's last prompt is there, all is there."""
        prompts = list(sessions(3, 2_000, copies=1))
        last = last_prompts(3, 2_000)
        assert set(last) == {0, 1, 2}
        assert prompts[-1] in last.values()


@pytest.mark.parametrize("form", FORMS)
class TestWorksOnOurs:
    @pytest.mark.parametrize("pattern", PATTERNS)
    def test_find_is_right(self, form: str, pattern: str) -> None:
        """Every pattern is found as it was made, and prompts nobody holds are found nowhere, from every form."""
        works = Works(partial(OurIndex, **FORMS[form]))
        for miss in (False, True):
            answer = works.find(4, 32, pattern, 3, miss=miss)
            assert answer["wrong"] == 0
            assert answer["value"] > 0

    @pytest.mark.parametrize(
        "command",
        [
            {"work": "store", "entries": 300, "per_event": 1},
            {"work": "store", "entries": 300, "per_event": 16},
            {"work": "remove", "entries": 300},
            {"work": "purge", "entries": 300},
        ],
    )
    def test_time_of_events(self, form: str, command: dict) -> None:
        """Events and purges take time, from every form."""
        assert Works(partial(OurIndex, **FORMS[form])).answer(command)["value"] > 0


def test_a_wrong_index_is_seen() -> None:
    """An index that forgets removals or claims too much gives wrong answers, counted."""

    class Boaster(OurIndex):
        def depths(self, found: dict[str, int]) -> dict[int, int]:
            return {worker: blocks + 1 for worker, blocks in super().depths(found).items()}

    assert Works(Boaster).find(4, 32, "full", 3)["wrong"] == 4


def test_all_that_was_stored_can_be_removed() -> None:
    """The removal and churn works leave only what they say: shared prefixes and the newest entries."""
    indexes: list[OurIndex] = []

    def make() -> OurIndex:
        indexes.append(OurIndex())
        return indexes[-1]

    Works(make).remove(300)
    Works(make).churn(400, 3)
    for index, most in zip(indexes, (64 * 16, 400 + 2 * 192 + 64 * 48), strict=True):
        resident = sum(index.index.stats(worker_id).resident_now for worker_id in index.index.worker_ids)
        assert 0 < resident <= most
        assert all(not index.index.stats(worker_id).unknown_removals for worker_id in index.index.worker_ids)


def test_memory_is_growth_per_entry() -> None:
    """Bytes per (block, worker), with the index's own account beside it."""
    answer = Works(OurIndex).memory(20_000, 8)
    assert answer["resident_bytes"] == pytest.approx(answer["value"] * 21_000, rel=0.05)
    assert answer["used_bytes"] > 0


def test_one_line_asks_one_answers() -> None:
    """The protocol of the measuring processes; a command names one of our calls by its form."""
    answers = io.StringIO()
    command = {"work": "find", "workers": 2, "blocks": 4, "pattern": "full", "calls": 2, "form": "tokens"}
    forms = {"tokens": Works(partial(OurIndex, tokens=True))}
    answer_all(partial(index_ours.answer, forms), io.StringIO(json.dumps(command) + "\n"), answers)
    assert sorted(json.loads(answers.getvalue())) == ["value", "wrong"]


class TestRun:
    def test_rows_with_a_peer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nine sizes, a miss, tokens, events, memory, churn; the peer beside all that it can do, and a ratio."""
        write_fake_dynamo(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        report = run_index_bench(**QUICK, against="dynamo", interpreter=sys.executable)
        works = [row.work for row in report.rows]
        assert [work.partition(",")[0] for work in works[:13]] == ["find"] * 10 + ["find_tokens"] * 3
        assert [work.partition(",")[0] for work in works[13:]] == [
            *["stored"] * 4,
            "removed",
            "purge of a worker",
            *["memory"] * 6,
            "memory after 10x churn",
        ]
        alone = [row.work for row in report.rows if row.peer is None]
        assert [work for work in alone if not re.search("find_tokens|own account|a cap of", work)] == []
        first = report.rows[0]
        assert first.unit == "us/find"
        assert first.peer == "dynamo"
        assert first.ratio == pytest.approx(first.peer_value / first.ours, rel=0.05, abs=0.01)

    def test_a_peer_that_answers_wrong_is_no_comparison(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another answer means another work: no ratio is printed."""
        write_fake_dynamo(tmp_path, extra_blocks=1)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(ConfigError, match=r"the peer gave .* wrong answers"):
            run_index_bench(**QUICK, against="dynamo", interpreter=sys.executable)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"against": "vllm"}, "measured against dynamo or nothing"),
            ({"pattern": "stairs"}, "ladder, full, single"),
            ({"rounds": 0}, "at least one round"),
            ({"against": "dynamo", "interpreter": "/nowhere/python"}, "pip install ai-dynamo-runtime==1.6.1"),
            ({"against": "dynamo", "interpreter": "/bin/false"}, "have ai-dynamo-runtime"),
        ],
    )
    def test_what_it_refuses(self, settings: dict, message: str) -> None:
        """Unknown peers and patterns, no rounds, and an interpreter that is absent or has no peer are named."""
        with pytest.raises(ConfigError, match=message):
            run_index_bench(**QUICK | settings)


class TestCommand:
    def test_json(self) -> None:
        """The report in the agreed shape."""
        report = json.loads(run("--scale", "0.001", "--rounds", "1", "--json").stdout)
        assert sorted(report) == ["machine", "rows"]
        assert sorted(report["rows"][0]) == ["ours", "peer", "peer_value", "ratio", "unit", "work"]

    def test_check(self) -> None:
        """A check prints one row and ends with 0 when no answer is wrong."""
        result = run("--check", "200", "--json")
        (row,) = json.loads(result.stdout)["rows"]
        assert (result.exit_code, row["ours"], row["unit"]) == (0, 0, "wrong")
        assert "200 finds" in row["work"]

    def test_check_that_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A wrong answer ends with 1."""
        monkeypatch.setattr(bench_command, "check_index", lambda finds, seed: CheckResult(finds=finds, wrong=3))
        result = run("--check", "5")
        assert result.exit_code == 1
        assert "3.00" in result.stdout
