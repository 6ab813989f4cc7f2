"""The picture of a cache, and the told run of a small engine."""

import re

import pytest
from click.testing import CliRunner

from kvatlas.cli.main import cli
from kvatlas.errors import BadRequest, ConfigError
from kvatlas.simulator import (
    EXAMPLE_SCRIPT,
    ContentNames,
    GroupConfig,
    TraceRequest,
    TraceScript,
    draw_cache,
    read_script,
    trace_cache,
)
from kvatlas.simulator.cache_picture import WIDTH


def section(lines, title):
    """The lines under the rule that begins with a title."""
    start = next(index for index, line in enumerate(lines) if line.startswith(f"── {title}"))
    end = next((index for index in range(start + 1, len(lines)) if lines[index] == ""), len(lines))
    return lines[start:end]


class TestDrawing:
    """Boxes, queue and map."""

    def test_a_shared_prefix(self, make_driver):
        """Scenarios 13 to 15: two tables that share two blocks, then the queue the frees leave, cached blocks last."""
        driver = make_driver()
        names = ContentNames()
        driver.add("a", range(13), max_tokens=2)
        driver.step()
        driver.add("b", [*range(8), 50, 51, 52, 53, 54], max_tokens=3)
        driver.scheduler.schedule()
        assert draw_cache(driver.cache, ("a", "b"), names) == [
            "         ┌─────┬─────┬─────┬───┐",
            "a        │ 1 A │ 2 B │ 3 C │ 4 │",
            "         └─────┴─────┴─────┴───┘",
            "         ┌─────┬─────┬─────┬───┐",
            "b        │ 1 A │ 2 B │ 5 D │ 6 │",
            "         └─────┴─────┴─────┴───┘",
            "free     7 · 8 · 9 · 10",
            "map      A=1  B=2  C=3  D=5",
        ]
        driver.scheduler.abort("a")
        driver.scheduler.abort("b")
        assert draw_cache(driver.cache, ("a", "b"), names) == [
            "free     6 · 4 · 7 · 8 · 9 · 10 · 3 C · 5 D · 2 B · 1 A",
            "map      A=1  B=2  C=3  D=5",
        ]

    def test_copies_have_one_name(self, make_driver):
        """Scenario 16: equal content in two blocks is one entry with both (3 is the first request's next block)."""
        driver = make_driver()
        for name in "ab":
            driver.add(name, range(8), max_tokens=9)
            driver.step()
        assert draw_cache(driver.cache, (), ContentNames())[-1] == "map      A=1  B=2+4"

    def test_a_long_table_is_wrapped(self, make_driver):
        """More boxes than fit go on under the first row; no line is wider than the page."""
        driver = make_driver(num_blocks=61, max_model_len=240, budget=240)
        driver.add("long", range(200), max_tokens=2)
        driver.step()
        lines = draw_cache(driver.cache, ("long",), ContentNames())
        assert max(map(len, lines)) <= WIDTH
        assert sum(line.startswith("         │") for line in lines) >= 3
        assert " 50 X1 │" in "".join(lines)


class TestTrace:
    """The told run."""

    def test_example(self):
        """The built-in example shows a hit, an eviction and a prefix that survived it; it fits the page."""
        lines = list(trace_cache(EXAMPLE_SCRIPT))
        assert max(map(len, lines)) <= WIDTH
        assert "bob hits 8 and computes 9 tokens" in section(lines, "step 2")[0]
        assert "event    removed D" in section(lines, "step 5")
        assert "ann2 hits 8 and computes 14 tokens" in section(lines, "step 6")[0]
        assert not any("│" in line for line in section(lines, "nobody is left"))

    def test_two_groups(self):
        """Each group has its table and map; positions behind a window are dashes."""
        groups = (GroupConfig(kind="full_attention"), GroupConfig(kind="sliding_window", window=4))
        script = TraceScript(
            requests=[TraceRequest(id="a", prompt=list(range(16)), max_tokens=4, reply=[100, 101, 102])],
            num_blocks=20,
            groups=groups,
        )
        lines = list(trace_cache(script))
        assert any(line.startswith("a/1      │ -- │") for line in lines)
        assert any(line.startswith("map/1 ") for line in lines)
        assert "event    stored A B C D after the root in group 0: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15" in lines

    def test_reset_and_preemption(self):
        """A reset is refused while blocks are held; a preemption is named."""
        script = TraceScript(
            requests=[
                TraceRequest(id="a", prompt="aaaaaaaa", max_tokens=12),
                TraceRequest(id="b", prompt="bbbbbbbb", max_tokens=12),
                TraceRequest(id="c", prompt="c", at_step=60),
            ],
            num_blocks=9,
            reset_at_steps=[2, 60],
        )
        lines = list(trace_cache(script))
        assert "reset: refused, blocks in use" in lines
        assert any("b is preempted" in line for line in lines)
        assert lines.index("reset: everything is forgotten") < lines.index("event    all blocks cleared")

    def test_a_script_without_end(self):
        """A request that arrives after the last step that is told is an error, not a hang."""
        script = TraceScript(requests=[TraceRequest(id="a", prompt="a", at_step=10**6)])
        with pytest.raises(ConfigError, match="earlier steps"):
            list(trace_cache(script))

    @pytest.mark.parametrize("data", [b"{", b'{"requests": [{"id": "a"}]}', b'{"requests": [], "x": 1}'])
    def test_bad_scripts(self, data):
        """What is no script is refused with what it lacks."""
        with pytest.raises(BadRequest, match="not a trace script"):
            read_script(data)


class TestCommand:
    """`kvatlas sim --trace-cache`."""

    def test_example_and_file(self, tmp_path):
        """Without a file the example is told, with one its script."""
        told = CliRunner().invoke(cli, ["sim", "--trace-cache"])
        assert told.output.splitlines() == list(trace_cache(EXAMPLE_SCRIPT))
        file = tmp_path / "script.json"
        file.write_text('{"requests": [{"id": "me", "prompt": "Hello, world"}]}')
        told = CliRunner().invoke(cli, ["sim", "--trace-cache", str(file)])
        assert re.search(r'stored A B C after the root: "Hello, world"', told.output)
        assert told.exit_code == 0

    def test_missing_file(self, tmp_path):
        """A file that is not there is named."""
        told = CliRunner().invoke(cli, ["sim", "--trace-cache", str(tmp_path / "no.json")])
        assert told.exit_code != 0
        assert "no.json" in told.output + str(told.exception)
