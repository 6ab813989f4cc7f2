"""The floors of the house: a room imports lower floors only, and the sans-IO rooms never touch the outside world."""

import ast
import sys
from collections.abc import Iterator

import pytest

from support.source_tree import PACKAGE, Module, package_modules

# Room -> floor (docs of the layout: CONTRIBUTING.md). A module directly under kvatlas is a room of its own.
FLOORS = {
    "errors": 0,
    "clock": 0,
    "_native": 1,
    "config": 1,
    "telemetry": 1,
    "hashing": 2,
    "events": 2,
    "prefix_cache": 3,
    "index": 3,
    "stream": 3,
    "fleet": 4,
    "keeper": 4,
    "rendering": 4,
    "routing": 5,
    "gateway": 6,
    "endpoint_picker": 6,
    "simulator": 6,
    "replay": 6,
    "admin": 7,
    "bench": 7,
    "chaos": 7,
    "doctor": 7,
    "cli": 8,
    "__main__": 9,
}
SANS_IO_ROOMS = {"hashing", "events", "prefix_cache", "index", "routing"}
OUTSIDE_WORLD = {
    "aiohttp",
    "asyncio",
    "concurrent",
    "datetime",
    "grpc",
    "http",
    "httptools",
    "httpx",
    "multiprocessing",
    "requests",
    "sched",
    "select",
    "selectors",
    "signal",
    "socket",
    "socketserver",
    "ssl",
    "subprocess",
    "threading",
    "time",
    "urllib",
    "uvloop",
    "zmq",
}
ONLY_IN_ROOM = {"zmq": "stream"}


def imported_names(module: Module) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import: at the top, in a function, for type checking, or by importlib."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(module, node)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"importlib.import_module", "__import__"}:
            yield from ((node.lineno, one.value) for one in node.args[:1] if isinstance(one, ast.Constant))


def absolute_base(module: Module, node: ast.ImportFrom) -> str:
    """The package a `from ... import` reads from, relative dots resolved."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    parts = parts[: len(parts) - node.level + (1 if module.is_package else 0)]
    return ".".join([*parts, node.module] if node.module else parts)


def room_of(dotted: str) -> str | None:
    """The room a dotted name lies in; None for other packages and for kvatlas itself."""
    package, _, rest = dotted.partition(".")
    room = rest.split(".")[0]
    return room if package == PACKAGE and (room in FLOORS or (room and not room.startswith("__"))) else None


def breaches(module: Module) -> list[str]:
    """Every import of one module that the layout forbids, as text; empty when it is clean."""
    found = []
    room = room_of(module.name)
    if room is not None and room not in FLOORS:
        return [f"{module.name}: room {room!r} has no floor; add it to FLOORS and to CONTRIBUTING.md"]
    for line, name in imported_names(module):
        place = f"{module.name}:{line} imports {name}"
        other = room_of(name)
        library = name.split(".")[0]
        if other is None:
            if room in SANS_IO_ROOMS and library in OUTSIDE_WORLD:
                found.append(f"{place}: {room} is sans-IO; take time from kvatlas.clock, IO from a higher floor")
            if library in ONLY_IN_ROOM and room != ONLY_IN_ROOM[library]:
                found.append(f"{place}: only kvatlas.{ONLY_IN_ROOM[library]} may use {library}")
            if room is not None and FLOORS[room] == 0 and library not in sys.stdlib_module_names:
                found.append(f"{place}: floor 0 is standard library only")
        elif other not in FLOORS:
            found.append(f"{place}: room {other!r} has no floor; add it to FLOORS and to CONTRIBUTING.md")
        elif room is None:
            if FLOORS[other] > 0 and module.name == PACKAGE:
                found.append(
                    f"{place}: kvatlas/__init__ may import floor 0 only, or importing kvatlas loads everything"
                )
        elif other != room and FLOORS[other] >= FLOORS[room]:
            found.append(f"{place}: {room} is on floor {FLOORS[room]}, {other} on floor {FLOORS[other]}")
        if room in SANS_IO_ROOMS and name == f"{PACKAGE}.clock.SystemClock":
            found.append(f"{place}: a sans-IO room takes a Clock, it does not make one")
    return found


def test_no_module_breaks_the_floors():
    """Every import in src goes down, rooms of one floor do not know each other, sans-IO rooms stay pure."""
    assert [breach for module in package_modules() for breach in breaches(module)] == []


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("kvatlas.index.flat", "from kvatlas.fleet import Worker", "index is on floor 3, fleet on floor 4"),
        ("kvatlas.index.flat", "from kvatlas.prefix_cache import Block", "prefix_cache on floor 3"),
        ("kvatlas.index.flat", "from kvatlas import fleet", "fleet on floor 4"),
        ("kvatlas.index.flat", "def f():\n    import kvatlas.gateway.server", "gateway on floor 6"),
        ("kvatlas.index.flat", "from ..cli.main import main", "cli on floor 8"),
        ("kvatlas.index.flat", "import importlib\nimportlib.import_module('kvatlas.cli')", "cli on floor 8"),
        ("kvatlas.index.flat", "import asyncio", "index is sans-IO"),
        ("kvatlas.routing.cost", "from time import monotonic", "routing is sans-IO"),
        ("kvatlas.events.codec", "import urllib.request", "events is sans-IO"),
        ("kvatlas.hashing.x", "from kvatlas.clock import SystemClock", "takes a Clock"),
        ("kvatlas.gateway.server", "import zmq.asyncio", "only kvatlas.stream may use zmq"),
        ("kvatlas.clock", "import msgspec", "floor 0 is standard library only"),
        ("kvatlas.attic", "import json", "'attic' has no floor"),
        ("kvatlas.cli.main", "from kvatlas.attic import box", "'attic' has no floor"),
    ],
)
def test_the_checker_sees_a_forbidden_import(name: str, source: str, expected: str):
    """Each kind of breach is found, so a clean result means something."""
    (breach,) = breaches(Module(name, source))
    assert expected in breach


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("kvatlas.index.flat", "from kvatlas.hashing import hash64\nfrom kvatlas.index.match import Match"),
        ("kvatlas.index.flat", "from .match import Match\nfrom kvatlas.clock import Clock\nimport random"),
        ("kvatlas.stream.publisher", "import zmq\nimport threading"),
        ("kvatlas.cli.main", "from kvatlas import __version__\nfrom kvatlas.admin import api"),
        ("kvatlas.__main__", "from kvatlas.cli.main import main"),
    ],
)
def test_the_checker_lets_a_proper_import_pass(name: str, source: str):
    """Imports that follow the layout are not reported."""
    assert breaches(Module(name, source)) == []


def test_a_relative_import_inside_a_package_init_resolves_to_the_package():
    """One dot in an `__init__` means the package itself, not its parent."""
    module = Module("kvatlas.index", "from .match import Match", is_package=True)
    assert [name for _, name in imported_names(module)] == ["kvatlas.index.match.Match"]
