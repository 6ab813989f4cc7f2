"""The addresses of libzmq's calls, and when they are better not used."""

import ctypes
import importlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import zmq

from kvatlas.stream import libzmq
from kvatlas.stream.libzmq import libzmq_calls

USUAL_BACKEND = "zmq.backend.cython._zmq"


def has_usual_backend() -> bool:
    try:
        return zmq.backend.Socket is importlib.import_module(USUAL_BACKEND).Socket
    except ImportError:
        return False


needs_usual_backend = pytest.mark.skipif(not has_usual_backend(), reason="pyzmq has another backend here")


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    """The answer is kept for the life of the process; here it is found anew, and what a test found is forgotten."""
    libzmq_calls.cache_clear()
    yield
    libzmq_calls.cache_clear()


@needs_usual_backend
def test_the_addresses_are_libzmq_s() -> None:
    """Seven of them, none 0, each that of the call of its name: those of messages work when called through them."""
    calls = libzmq_calls()
    assert calls is not None
    assert (calls.typecode, len(set(calls))) == ("Q", 7)
    assert 0 not in calls
    message = ctypes.create_string_buffer(64)
    of_message = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    init, more, close = (of_message(calls[place]) for place in (0, 2, 5))
    size = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p)(calls[4])
    assert [init(message), more(message), size(message), close(message), close(message)] == [0, 0, 0, 0, -1]
    error = ctypes.CFUNCTYPE(ctypes.c_int)(calls[6])
    assert error() == 14  # EFAULT: closed twice


@needs_usual_backend
def test_the_answer_is_kept() -> None:
    """Every reader asks; the search is made once."""
    assert libzmq_calls() is libzmq_calls()


@pytest.mark.parametrize("version", [(3, 2, 5), (5, 0, 0)])
def test_another_libzmq_is_not_called(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]) -> None:
    """A message of another major version may need more room."""
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: version)
    assert libzmq_calls() is None


def test_another_backend_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sockets belong to a libzmq of its own, though the usual backend may be installed beside it."""
    monkeypatch.setattr(zmq.backend, "Socket", type("Socket", (), {}))
    assert libzmq_calls() is None


def test_no_usual_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under PyPy, where it cannot be imported."""

    def nothing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", nothing)
    assert libzmq_calls() is None


@pytest.mark.parametrize(
    ("library", "error"), [("no such file", OSError), ("without the calls", AttributeError)], ids=["gone", "nameless"]
)
def test_calls_that_are_not_found(monkeypatch: pytest.MonkeyPatch, library: str, error: type[Exception]) -> None:
    """A library that cannot be opened, or keeps its names for itself, is no error: pyzmq's own calls remain."""

    class Library:
        def __init__(self, path: str) -> None:
            if error is OSError:
                raise OSError(path)

    socket = type("Socket", (), {})
    backend = SimpleNamespace(Socket=socket, __file__=library)
    monkeypatch.setattr(zmq.backend, "Socket", socket)
    monkeypatch.setattr(importlib, "import_module", lambda name: backend)
    monkeypatch.setattr(libzmq.ctypes, "CDLL", Library)
    assert libzmq_calls() is None
