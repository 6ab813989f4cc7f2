"""The error tree is an interface: programs match on `code`, the gateway answers with `http_status`, people read the rest."""

import ast
import builtins
import json
import re

import pytest

from kvatlas import errors
from kvatlas.errors import KvAtlasError
from kvatlas.gateway.responses import error_response
from support.source_tree import Module, package_modules

CODE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
BUILTIN_ERRORS = {
    name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
}


def error_classes() -> list[type[KvAtlasError]]:
    """The root and every class below it."""
    found, waiting = [], [KvAtlasError]
    while waiting:
        one = waiting.pop()
        found.append(one)
        waiting.extend(sub for sub in one.__subclasses__() if sub.__module__ == errors.__name__)
    return sorted(found, key=lambda cls: cls.__name__)


def drawn_tree(text: str) -> dict[str, str | None]:
    """Class -> parent, read from the tree drawn in a docstring (four columns of indentation are one level)."""
    parents: dict[str, str | None] = {}
    path: list[str] = []
    for line in text.splitlines():
        match = re.match(r"    ([│├└─ ]*)([A-Z]\w*)", line)
        if not match:
            continue
        depth = len(match[1]) // 4
        path[depth:] = [match[2]]
        parents[match[2]] = path[depth - 1] if depth else None
    return parents


def homeless_errors(module: Module) -> list[str]:
    """Exception classes that a module other than errors.py makes, from a built-in one or from one of ours."""
    known = BUILTIN_ERRORS | set(errors.__all__)
    return [
        f"{module.name}:{node.lineno} {node.name}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).split(".")[-1] in known for base in node.bases)
    ]


@pytest.mark.parametrize("cls", error_classes(), ids=lambda cls: cls.__name__)
def test_every_error_says_what_it_is(cls: type[KvAtlasError]):
    """An error has a code of its own, an HTTP status of the failing kind and a docstring, and is exported."""
    assert "code" in vars(cls)
    assert CODE.fullmatch(cls.code)
    assert 400 <= cls.http_status <= 599
    assert vars(cls).get("__doc__")
    assert cls.__name__ in errors.__all__


def test_no_two_errors_share_a_code():
    """A program that matches on a code gets one kind of error."""
    codes = [cls.code for cls in error_classes()]
    assert sorted(codes) == sorted(set(codes))


def test_the_drawn_tree_is_the_real_tree():
    """The picture in the docstring names every class under its true parent."""
    real = {cls.__name__: cls.__base__.__name__ if cls is not KvAtlasError else None for cls in error_classes()}
    assert drawn_tree(errors.__doc__ or "") == real


@pytest.mark.parametrize("cls", error_classes(), ids=lambda cls: cls.__name__)
def test_the_message_is_what_was_raised(cls: type[KvAtlasError]):
    """`message` is the text given, and never empty even when none was given."""
    assert cls("port 70000 was given, expected 1..65535").message == "port 70000 was given, expected 1..65535"
    assert cls().message == cls.code


@pytest.mark.parametrize("cls", error_classes(), ids=lambda cls: cls.__name__)
def test_gateway_and_admin_port_agree_on_the_type(cls: type[KvAtlasError]):
    """The `type` in the gateway's answer is what `error_type`, which the admin port uses, says of the status."""
    body = json.loads(error_response(cls("x"), "id", close=True).partition(b"\r\n\r\n")[2])
    assert body["error"] == {"message": "x", "type": errors.error_type(cls.http_status), "code": cls.code}
    assert body["error"]["type"] == ("server_error" if cls.http_status >= 500 else "invalid_request_error")


def test_errors_are_made_in_one_place():
    """No room invents an exception class beside the tree."""
    others = (module for module in package_modules() if module.name != "kvatlas.errors")
    assert [found for module in others for found in homeless_errors(module)] == []


def test_the_checker_sees_an_error_beside_the_tree():
    """A class made from a built-in error or from one of ours is reported; any other class is not."""
    source = "class A(Exception): pass\nclass B(ValueError): pass\nclass C(errors.ConfigError): pass\nclass D(Protocol): pass"
    assert homeless_errors(Module("kvatlas.a", source)) == [
        f"kvatlas.a:{line} {name}" for line, name in enumerate("ABC", 1)
    ]


def test_the_reader_of_the_drawn_tree_understands_levels():
    """Indentation decides the parent."""
    text = "::\n\n    Root\n    ├── A   text\n    │   └── B   text\n    └── C   text\n"
    assert drawn_tree(text) == {"Root": None, "A": "Root", "B": "A", "C": "Root"}
