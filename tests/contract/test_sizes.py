"""Sizes a reader can hold in the head: modules, functions; and no mark of unfinished work in what ships."""

import re

import pytest

from support.source_tree import Module, functions, package_modules

SOFT_LIMIT_LINES = 400
HARD_LIMIT_LINES = 600
FUNCTION_LIMIT_LINES = 60
# Modules between the limits, each with the reason why it is not split.
LONG_MODULES: dict[str, str] = {}

UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b|Not" + r"ImplementedError")


def size_problems(module: Module, allowed: dict[str, str]) -> list[str]:
    """Limits one module breaks, as text."""
    lines = module.source.count("\n")
    limit = HARD_LIMIT_LINES if module.name in allowed else SOFT_LIMIT_LINES
    found = [f"{module.name}: {lines} lines, limit {limit}"] if lines > limit else []
    for function in functions(module.tree):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        if length > FUNCTION_LIMIT_LINES:
            found.append(f"{module.name}:{function.lineno} {function.name} has {length} lines")
    return found


def unfinished_marks(module: Module) -> list[str]:
    """Lines that admit the work is not done."""
    numbered = enumerate(module.source.splitlines(), start=1)
    return [f"{module.name}:{number} {line.strip()}" for number, line in numbered if UNFINISHED.search(line)]


def test_modules_and_functions_stay_small():
    """A module has at most 400 lines (600 with a reason), a function at most 60."""
    assert [problem for module in package_modules() for problem in size_problems(module, LONG_MODULES)] == []


def test_the_list_of_long_modules_holds_no_dead_entry():
    """An exception that is no longer needed is removed."""
    lines = {module.name: module.source.count("\n") for module in package_modules()}
    assert [name for name in LONG_MODULES if lines.get(name, 0) <= SOFT_LIMIT_LINES] == []


def test_nothing_in_src_is_unfinished():
    """No mark of work left over, no body that only raises."""
    assert [mark for module in package_modules() for mark in unfinished_marks(module)] == []


def test_the_checker_sees_a_long_module():
    """401 lines are too many, unless the module is listed; 601 are too many anyway."""
    long, longest = Module("kvatlas.a", "x = 1\n" * 401), Module("kvatlas.a", "x = 1\n" * 601)
    assert size_problems(long, {}) == ["kvatlas.a: 401 lines, limit 400"]
    assert size_problems(long, {"kvatlas.a": "one table"}) == []
    assert size_problems(longest, {"kvatlas.a": "one table"}) == ["kvatlas.a: 601 lines, limit 600"]


def test_the_checker_sees_a_long_function_also_when_nested():
    """61 lines are too many, in a method as well."""
    body = "        x = 1\n" * 60
    assert size_problems(Module("kvatlas.a", f"class A:\n    def long(self):\n{body}"), {}) == [
        "kvatlas.a:2 long has 61 lines"
    ]


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK", "Not" + "ImplementedError"])
def test_the_checker_sees_a_mark_of_unfinished_work(word: str):
    """Each mark is found as a word, and its line is named."""
    assert unfinished_marks(Module("kvatlas.a", f"x = 1\ny = 2  # {word}: later\n")) == [
        f"kvatlas.a:2 y = 2  # {word}: later"
    ]
