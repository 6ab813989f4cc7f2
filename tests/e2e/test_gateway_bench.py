"""The gateway benchmark runs, reports in the agreed shape and refuses what it cannot measure."""

import msgspec
import pytest

from kvatlas.bench import run_gateway_bench
from kvatlas.bench.gateway_parts import run_gateway_parts_bench
from kvatlas.errors import ConfigError

pytestmark = pytest.mark.e2e


def test_the_report_has_the_agreed_shape():
    """One row per work and peer: our figure, the peer's, and how many times better ours is."""
    report = run_gateway_bench(0.3, against=("aiohttp",), rounds=1)
    wire = msgspec.json.decode(msgspec.json.encode(report))
    assert sorted(wire) == ["machine", "rows"]
    assert [(row["unit"], row["peer"]) for row in wire["rows"]] == [
        ("cpu us/request", "aiohttp"),
        ("cpu us/event", "aiohttp"),
    ]
    for row in wire["rows"]:
        assert sorted(row) == ["ours", "peer", "peer_value", "ratio", "unit", "work"]
        assert row["ours"] > 0
        assert row["ratio"] == pytest.approx(row["peer_value"] / row["ours"], rel=0.02)


def test_without_a_peer_the_row_says_so():
    """No peer is null and not zero."""
    (row,) = run_gateway_bench(0.2, sse=False, against=(), rounds=1).rows
    assert (row.peer, row.peer_value, row.ratio) == (None, None, None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"against": ("nobody",)}, "unknown peer 'nobody': expected one of aiohttp"),
        ({"planner": "no.such.module:make"}, "cannot be loaded"),
        ({"planner": "kvatlas.gateway"}, "expected 'module:callable'"),
        ({"duration_s": 0}, "expected 1 or more"),
        ({"rounds": 0}, "expected 1 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(arguments: dict[str, object], says: str):
    """A clear error before any process is started."""
    with pytest.raises(ConfigError, match=says):
        run_gateway_bench(**arguments)


def test_conversations_are_routed_as_promised():
    """Turns with new text go through the planner of a real fleet; no request fails."""
    planner = "kvatlas.bench.routed_planner:routed_planner"
    (row,) = run_gateway_bench(0.2, json=False, sse=False, turns=2, against=(), planner=planner, rounds=1).rows
    assert "conversations of 2 turns" in row.work
    assert row.ours > 0


def test_parts_cost_something_and_promises_are_kept():
    """Every part has a figure, and the whole costs more than any part of it."""
    rows = run_gateway_parts_bench(turns=20).rows
    costs = {row.work: row.ours for row in rows}
    assert min(costs.values()) > 0
    assert costs["part: all of a plan"] > costs["part: judge 8 workers"]
