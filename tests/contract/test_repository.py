"""The repository as others get it: complete, free of traces of the machine it was written on, with tests that can fail."""

import ast
import os
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from support.golden import PROJECT_ROOT
from support.source_tree import Function, functions, tracked_files

NEEDED_FILES = (
    ".ci/run",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
    "src/kvatlas/py.typed",
    "tests/README.md",
)
SAMPLE_LIMIT_BYTES = 200_000

# Spelt in pieces, so that this file does not report itself.
MACHINE_FOLDERS = ("work", "root", "tmp", "home", "opt")
MACHINE_PATH = re.compile(r"(?<![\w.:~$}/-])/(?:" + "|".join(MACHINE_FOLDERS) + r")/[\w.]")
REGISTRY_HOSTS = (
    "pypi" + ".org",
    "python" + "hosted.org",
    "download." + "pytorch.org",
    "registry." + "npmjs",
    "crates" + ".io",
)
REGISTRY = re.compile("|".join(map(re.escape, REGISTRY_HOSTS)) + "|--(?:extra-)?index" + "-url")

ASSERTING_CALL = re.compile(r"_*(?:assert|check|verify|expect|compare|raises|warns|fail\b|run_state_machine)")


def traces(name: str, text: str) -> list[str]:
    """Lines that name a folder of one machine or a package registry."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if match := MACHINE_PATH.search(line) or REGISTRY.search(line):
            found.append(f"{name}:{number} {match[0]}")
    return found


def is_test(function: Function) -> bool:
    """Whether pytest would run it."""
    return function.name.startswith("test")


def asserts_something(function: Function) -> bool:
    """Whether a body can fail: an assert statement, or a call of something that checks."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if ASSERTING_CALL.match(called):
                return True
    return False


def problems_of_tests(name: str, source: str) -> list[str]:
    """Tests of one file that say nothing or check nothing."""
    found = []
    for function in filter(is_test, functions(ast.parse(source))):
        place = f"{name}:{function.lineno} {function.name}"
        if not ast.get_docstring(function):
            found.append(f"{place} has no docstring: say which behaviour it pins")
        if not asserts_something(function):
            found.append(f"{place} asserts nothing")
    return found


def files_with_tests() -> list[Path]:
    """Every test module of the tree, tracked or not yet."""
    return sorted((PROJECT_ROOT / "tests").rglob("test_*.py"))


def unpinned(pyproject: str, constraints: str) -> list[str]:
    """Packages a fresh clone would install in whatever version is newest today."""

    def canonical(requirement: str) -> str:
        return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()

    document = tomllib.loads(pyproject)
    groups = document.get("dependency-groups", {}).values()
    wanted = [*document["project"]["dependencies"], *(one for group in groups for one in group if isinstance(one, str))]
    pinned = {canonical(line) for line in constraints.splitlines() if "==" in line}
    return sorted({canonical(requirement) for requirement in wanted} - pinned)


@pytest.mark.parametrize("name", NEEDED_FILES)
def test_a_file_every_reader_looks_for_is_there(name: str):
    """The file exists and is not empty (a type marker may be)."""
    path = PROJECT_ROOT / name
    assert path.is_file()
    assert path.stat().st_size > 0 or name.endswith("py.typed")


def test_scripts_may_be_run():
    """What is called by path carries the executable bit."""
    scripts = [path for path in tracked_files() if path.suffix == ".sh" or path.as_posix() == ".ci/run"]
    assert [str(path) for path in scripts if not os.access(PROJECT_ROOT / path, os.X_OK)] == []
    assert len(scripts) >= 2


def test_no_tracked_file_shows_the_machine_it_was_written_on():
    """No absolute path of one machine, no package registry, in any tracked text."""
    found = []
    for path in tracked_files():
        raw = (PROJECT_ROOT / path).read_bytes()
        if b"\0" not in raw:
            found += traces(str(path), raw.decode("utf-8", errors="replace"))
    assert found == []


def test_every_test_says_what_it_pins_and_can_fail():
    """Each test function has a docstring and checks something."""
    problems = []
    for path in files_with_tests():
        problems += problems_of_tests(str(path.relative_to(PROJECT_ROOT)), path.read_text(encoding="utf-8"))
    assert problems == []


def test_files_with_tests_have_unique_names():
    """A file's name alone says which file failed."""
    names = Counter(path.name for path in files_with_tests())
    assert [name for name, count in names.items() if count > 1] == []


def test_committed_samples_stay_small():
    """Recordings in tests/vectors are samples: at most 200 kB each."""
    vectors = PROJECT_ROOT / "tests" / "vectors"
    sizes = {str(path.relative_to(vectors)): path.stat().st_size for path in vectors.rglob("*") if path.is_file()}
    assert {name: size for name, size in sizes.items() if size > SAMPLE_LIMIT_BYTES} == {}


def test_every_direct_dependency_is_pinned():
    """Two clones made a year apart install the same versions."""
    pyproject = (PROJECT_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert unpinned(pyproject, (PROJECT_ROOT / "constraints.txt").read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("folder", MACHINE_FOLDERS)
@pytest.mark.parametrize("before", ["", '"', "cd ", "=", "("])
def test_the_checker_sees_a_machine_path(folder: str, before: str):
    """An absolute path is found wherever it begins."""
    assert traces("a.md", f"x\n{before}/{folder}/main/x") == [f"a.md:2 /{folder}/m"]


@pytest.mark.parametrize("folder", MACHINE_FOLDERS)
@pytest.mark.parametrize("before", ["src", "https://host", "~", "$HOME", "..", "."])
def test_the_checker_lets_a_relative_path_pass(folder: str, before: str):
    """Paths inside the project, of a user's own home, and of a URL are fine."""
    assert traces("a.md", f"see {before}/{folder}/x") == []


@pytest.mark.parametrize(
    "text", [*REGISTRY_HOSTS, "pip install --extra-index" + "-url X", "pip install --index" + "-url X"]
)
def test_the_checker_sees_a_registry(text: str):
    """Where packages come from is the reader's configuration, not ours."""
    assert len(traces("a.md", text)) == 1


def test_the_checker_sees_a_test_that_says_or_checks_nothing():
    """No docstring, no assertion: both are reported, helpers are not."""
    source = """
def test_silent(): assert 1
def test_idle(): "Says."; print(1)
async def test_good(): "Says."; assert 1
class TestGroup:
    def test_raises(self):
        "Says."
        with pytest.raises(ValueError): int("x")
def helper(): pass
"""
    assert problems_of_tests("t.py", source) == [
        "t.py:2 test_silent has no docstring: say which behaviour it pins",
        "t.py:3 test_idle asserts nothing",
    ]


def test_the_checker_sees_an_unpinned_dependency():
    """A dependency of the package or of a group without a pin is reported; spelling differences are not."""
    pyproject = (
        '[project]\ndependencies = ["Foo_Bar>=1", "baz"]\n[dependency-groups]\nt = ["new>=2", {include-group = "x"}]'
    )
    assert unpinned(pyproject, "foo-bar==1.0\nbaz==2\n") == ["new"]
