"""`kvatlas chaos`: shape of its output, exit codes."""

import json

import pytest
from click.testing import CliRunner, Result

from kvatlas.cli.main import cli
from kvatlas.errors import ConfigError
from kvatlas.fleet import EventSource


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["chaos", "--requests", "150", *arguments])


def test_json_has_a_row_for_each_fault() -> None:
    """Nothing where a figure does not apply; 0 for what must not be."""
    result = run("--fault", "duplicate", "--fault", "cut", "--seed", "3", "--workers", "2", "--json")
    assert result.exit_code == 0, result.output
    duplicate, cut = json.loads(result.stdout)["rows"]
    assert duplicate == {
        "fault": "duplicate",
        "seed": 3,
        "detect_s": None,
        "overclaimed_blocks_before_detection": 0,
        "overclaimed_blocks_after_detection": 0,
        "unconfirmed_gone_after_turnovers": None,
        "recall_99_after_turnovers": None,
        "broken": [],
    }
    assert (cut["fault"], cut["detect_s"], cut["overclaimed_blocks_after_detection"]) == ("cut", 0.0, 0)


def test_the_table_says_what_it_counts() -> None:
    """One line for each run and an explanation of the columns."""
    output = run("--fault", "restart").stdout
    assert "restart" in output
    assert "turnovers of the pool" in output


def test_a_broken_guarantee_ends_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that CI can use it; what was broken is on standard error."""
    monkeypatch.setattr(EventSource, "on_gap", lambda *_: None)
    result = run("--fault", "drop:p=0.3+no_replay", "--requests", "300")
    assert result.exit_code == 1
    assert "over-claimed after detection, first at" in result.stderr


def test_an_unknown_fault_is_named() -> None:
    """Before anything runs."""
    result = run("--fault", "none", "--fault", "dorp")
    assert isinstance(result.exception, ConfigError)
    assert "dorp" in str(result.exception)
