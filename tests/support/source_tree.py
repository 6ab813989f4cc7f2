"""The repository as data: modules of the package, tracked files, functions of a module. For the contract tests."""

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.golden import PROJECT_ROOT

PACKAGE = "kvatlas"
PACKAGE_DIR = PROJECT_ROOT / "src" / PACKAGE

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    """One module's dotted name and text; `is_package` when it is an `__init__`."""

    name: str
    source: str
    is_package: bool = False

    @property
    def tree(self) -> ast.Module:
        """The parsed text."""
        return ast.parse(self.source)


def package_modules() -> list[Module]:
    """Every module under src/kvatlas, in path order. Never empty."""
    modules = []
    for path in sorted(PACKAGE_DIR.rglob("*.py")):
        parts = path.relative_to(PACKAGE_DIR.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules.append(Module(name, path.read_text(encoding="utf-8"), is_package))
    if not modules:
        raise FileNotFoundError(f"no module under {PACKAGE_DIR}")
    return modules


def functions(tree: ast.AST) -> Iterator[Function]:
    """Every function and method, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def tracked_files() -> list[Path]:
    """Files under version control that exist, relative to the project's root; every file where there is no git."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z"], cwd=PROJECT_ROOT, capture_output=True, check=True, text=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        skipped = {".venv", ".venv-real", "__pycache__", ".hypothesis"}
        everything = (path.relative_to(PROJECT_ROOT) for path in PROJECT_ROOT.rglob("*") if path.is_file())
        return sorted(path for path in everything if not skipped & set(path.parts))
    names = [Path(name) for name in listing.stdout.split("\0") if name]
    return [name for name in names if (PROJECT_ROOT / name).is_file()]
