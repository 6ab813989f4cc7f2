"""The docs say what the code does: generated tables are fresh, and every command and figure has its place."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path
from types import ModuleType

import pytest

from kvatlas.admin import METRICS
from kvatlas.cli.main import COMMANDS
from kvatlas.hashing import DIALECT_OPTIONS, DIALECTS
from kvatlas.routing import POLICY_NAMES
from support.golden import PROJECT_ROOT

DOCS = PROJECT_ROOT / "docs"


@pytest.fixture(name="generator", scope="module")
def _generator() -> ModuleType:
    """scripts/generate_docs.py as a module."""
    spec = importlib.util.spec_from_file_location("generate_docs", PROJECT_ROOT / "scripts" / "generate_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_tables_are_fresh(generator: ModuleType) -> None:
    """Commands, settings, metrics and errors in docs/ are what the code says; scripts/generate_docs.py renews them."""
    assert [page.name for page in generator.stale_pages()] == []


def test_a_stale_table_is_noticed(generator: ModuleType) -> None:
    """The freshness check can fail."""
    page = "text\n<!-- generated metrics -->\nold\n<!-- end -->\n"
    assert "kvatlas_requests_total" in generator.render(page)
    assert generator.render(page) != page


def test_every_table_has_a_page(generator: ModuleType) -> None:
    """No generated table is left out of the docs."""
    text = "".join(page.read_text() for page in DOCS.glob("*.md"))
    assert [name for name in generator.TABLES if f"<!-- generated {name} -->" not in text] == []


def test_every_setting_has_a_meaning(generator: ModuleType) -> None:
    """No row of the settings tables is blank."""
    for name in ("serve_settings", "worker_settings"):
        rows = generator.TABLES[name]().splitlines()[2:]
        assert rows
        assert [row for row in rows if row.rstrip(" |").endswith("|") or row.split("|")[4].strip() == ""] == []


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_is_documented(name: str) -> None:
    """docs/routing.md tells what each policy does."""
    assert f"`{name}`" in (DOCS / "routing.md").read_text()


@pytest.mark.parametrize(("dialect", "name"), [(d, o) for d in DIALECTS for o in (d, *DIALECT_OPTIONS[d])])
def test_every_hash_option_is_documented(dialect: str, name: str) -> None:
    """docs/hashing.md has a row for each dialect that names its options."""
    rows = [row for row in (DOCS / "hashing.md").read_text().splitlines() if row.startswith(f"| `{dialect}` |")]
    assert any(f"`{name}`" in row for row in rows)


def test_no_placeholder_is_left() -> None:
    """What was to be filled in later is filled in: no page holds a word like THIS_TABLE."""
    pages = [*PROJECT_ROOT.glob("*.md"), *DOCS.glob("*.md")]
    placeholder = re.compile(r"\b[A-Z]+_(?:TABLE|PLACEHOLDER|HERE)\b|\bTBD\b")
    assert placeholder.search("see DEMO_TABLE")
    assert [(page.name, found[0]) for page in pages if (found := placeholder.search(page.read_text()))] == []


def test_readme_commands_exist() -> None:
    """Every `kvatlas X` the README and the docs show is a command."""
    pages = [PROJECT_ROOT / "README.md", *DOCS.glob("*.md")]
    shown = {
        word for page in pages for word in re.findall(r"^\s*(?:\$ )?kvatlas ([a-z-]+)", page.read_text(), re.MULTILINE)
    }
    assert shown
    assert shown - set(COMMANDS) == set()


@pytest.mark.parametrize("page", ["prefix-cache.md", "hashing.md"])
def test_printed_examples_print_what_they_say(page: str) -> None:
    """The Python example of a page prints the lines that stand behind its calls."""
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    expected = re.findall(r"\)  # (.+)$", code, re.MULTILINE)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"docs/{page}", "exec"), {})
    assert printed.getvalue().splitlines() == expected
    assert expected


def test_relative_links_lead_somewhere() -> None:
    """No link of README, CONTRIBUTING, tests/README or docs/ points to a file that is not there."""
    pages = [
        PROJECT_ROOT / "README.md",
        PROJECT_ROOT / "CONTRIBUTING.md",
        PROJECT_ROOT / "tests" / "README.md",
        *DOCS.glob("*.md"),
    ]
    broken = []
    for page in pages:
        targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        broken += [(page.name, target) for target in targets if not (page.parent / Path(target)).exists()]
    assert broken == []


def test_metric_names_are_unique_and_counters_end_in_total() -> None:
    """The metrics follow Prometheus' naming."""
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    assert [m.name for m in METRICS if (m.kind == "counter") != m.name.endswith("_total")] == []
