"""The ingest benchmark: engines, a consumer and a peer as real processes; what it refuses; its command."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvatlas.bench.ingest import run_ingest_bench
from kvatlas.cli.main import cli
from kvatlas.errors import ConfigError
from support.fake_dynamo import write_fake_dynamo

pytestmark = pytest.mark.e2e
QUICK = {"rounds": 1, "scale": 0.01, "settle_s": 0.2}


def test_rows_with_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks per second of one core, as sent and from a backlog, 16 blocks an event and one, ours and the peer's."""
    write_fake_dynamo(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rows = run_ingest_bench(**QUICK, against="dynamo", interpreter=sys.executable).rows
    assert [row.unit for row in rows] == ["blocks per core/s"] * 4
    assert all(row.ours > 0 and row.ratio == pytest.approx(row.ours / row.peer_value, abs=0.01) for row in rows)


def test_blocks_that_never_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that does not show what was sent gives no figure."""
    write_fake_dynamo(tmp_path, extra_blocks=1)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match="of 8 of 8 workers were not visible"):
        run_ingest_bench(**QUICK, timeout_s=1.0, against="dynamo", interpreter=sys.executable)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"against": "vllm"}, "measured against dynamo or nothing"),
        ({"rounds": 0}, "at least one round"),
        ({"against": "dynamo", "interpreter": "/nowhere/python"}, "pip install ai-dynamo-runtime==1.6.1"),
    ],
)
def test_what_it_refuses(settings: dict, message: str) -> None:
    """Unknown peers, no rounds, an absent interpreter."""
    with pytest.raises(ConfigError, match=message):
        run_ingest_bench(**QUICK | settings)


def test_the_command_without_a_peer() -> None:
    """JSON in the agreed shape; no peer is null."""
    result = CliRunner().invoke(cli, ["bench", "ingest", "--scale", "0.01", "--rounds", "1", "--json"])
    rows = json.loads(result.stdout)["rows"]
    assert [(row["peer"], row["ratio"]) for row in rows] == [(None, None)] * 4
