"""What a room exports: a sorted `__all__` of names that exist and explain themselves."""

import ast
import importlib
import inspect
import re
from types import ModuleType

import pytest

from support.source_tree import PACKAGE, Module, package_modules

MIN_DOCSTRING_WORDS = 3


def all_of(module: Module) -> list[str] | None:
    """The literal `__all__` of a module, None when there is none."""
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "__all__":
            return list(ast.literal_eval(node.value)) if node.value else None
    return None


def sort_key(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Ruff's order (RUF022): CONSTANTS, then Classes, then the rest; numbers inside a name compare as numbers."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    pieces = [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]
    return kind, pieces


def order_problems(module: Module) -> list[str]:
    """What is wrong with the `__all__` of a room, as text, from its source alone."""
    names = all_of(module)
    if names is None:
        return [f"{module.name}: no literal __all__"]
    found = [f"{module.name}: {name!r} is in __all__ twice" for name in sorted(set(names)) if names.count(name) > 1]
    if names != sorted(names, key=sort_key):
        found.append(f"{module.name}: __all__ is not sorted: {sorted(names, key=sort_key)}")
    return found


def runtime_problems(module: ModuleType, names: list[str]) -> list[str]:
    """Names that are promised and missing, and public classes and functions without a docstring of their own."""
    found = []
    for name in names:
        if not hasattr(module, name):
            found.append(f"{module.__name__}: __all__ names {name!r}, which does not exist")
            continue
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            text = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
            # dataclasses write the signature as docstring when there is none
            if not text or text.startswith(f"{name}(") or len(text.split()) < MIN_DOCSTRING_WORDS:
                found.append(f"{module.__name__}: {name} has no docstring")
    return found


def rooms() -> list[Module]:
    """Every package below kvatlas, and the modules of floor 0, which are rooms of one module."""
    found = [module for module in package_modules() if module.is_package or module.name.count(".") == 1]
    return [module for module in found if module.name not in {PACKAGE, f"{PACKAGE}.__main__"}]


@pytest.mark.parametrize("room", rooms(), ids=lambda room: room.name)
def test_a_room_exports_sorted_names_that_exist_and_are_explained(room: Module):
    """`__all__` is literal, sorted, without repeats; every name is there and has a docstring; so has the room."""
    assert order_problems(room) == []
    loaded = importlib.import_module(room.name)
    assert runtime_problems(loaded, all_of(room) or []) == []
    assert ast.get_docstring(room.tree), f"{room.name} does not say what lives in it"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1", "no literal __all__"),
        ("__all__ = ['b', 'a']", "not sorted"),
        ("__all__ = ['Block', 'MAX']", "not sorted"),
        ("__all__ = ['hash64', 'hash8']", "not sorted"),
        ("__all__ = ['a', 'a']", "twice"),
    ],
)
def test_the_checker_sees_a_bad_all(source: str, expected: str):
    """Each way to get `__all__` wrong is reported."""
    (problem,) = order_problems(Module("kvatlas.example", source))
    assert expected in problem


def test_the_checker_accepts_the_order_that_ruff_writes():
    """Constants, classes, functions; hash8 before hash64."""
    source = "__all__ = ['LIMIT_BYTES', 'Block', 'Pool', '__version__', 'hash8', 'hash64']"
    assert order_problems(Module("kvatlas.example", source)) == []


def test_the_checker_sees_a_missing_name_and_a_missing_docstring():
    """A promised name that does not exist and a public class without a docstring are both reported."""
    example = ModuleType("example")
    exec("class Silent: pass\nclass Told:\n    'Says what it is.'\ndef quiet(): pass", example.__dict__)
    problems = runtime_problems(example, ["Absent", "Silent", "Told", "quiet"])
    assert problems == [
        "example: __all__ names 'Absent', which does not exist",
        "example: Silent has no docstring",
        "example: quiet has no docstring",
    ]
