"""Which kernels run, and how one is told."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvatlas._native import _pure, backend_name, select
from kvatlas.errors import ConfigError


def stand_in(**names):
    """A backend with every name."""
    return SimpleNamespace(**dict.fromkeys(select.NAMES) | names)


@pytest.mark.parametrize("wish", [None, "", "0"])
def test_without_an_extension_python_runs(monkeypatch, wish):
    """No extension is no fault."""
    monkeypatch.setattr(select, "load_native", lambda: None)
    assert select.choose(wish) is _pure


def test_a_missing_extension_can_be_an_error(monkeypatch):
    """KVATLAS_NATIVE=1 says what to do when there is none."""
    monkeypatch.setattr(select, "load_native", lambda: None)
    with pytest.raises(ConfigError, match="install a C compiler"):
        select.choose("1")


def test_a_built_extension_runs_unless_python_is_wished_for(monkeypatch):
    """The faster one by default, Python with 0."""
    native = stand_in()
    monkeypatch.setattr(select, "load_native", lambda: native)
    assert select.choose(None) is select.choose("1") is native
    assert select.choose("0") is _pure


def test_another_wish_is_refused():
    """A typing error does not pass as a default."""
    with pytest.raises(ConfigError, match="must be 0"):
        select.choose("yes")


def test_an_extension_that_lacks_a_name_is_not_used(monkeypatch):
    """One that was built from older sources would fail at the first call."""
    monkeypatch.setattr(select.importlib, "import_module", lambda name: SimpleNamespace(BACKEND="native"))
    assert select.load_native() is None
    monkeypatch.setattr(select.importlib, "import_module", lambda name: stand_in(BACKEND="native"))
    assert select.load_native().BACKEND == "native"


def test_the_version_says_which_kernels_run(monkeypatch):
    """`kvatlas --version` names the backend, and the environment decides it."""

    def version():
        command = [sys.executable, "-m", "kvatlas", "--version"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert version().rstrip().endswith(f", {backend_name()} kernels")
    monkeypatch.setenv("KVATLAS_NATIVE", "0")
    assert version().rstrip().endswith(", pure kernels")
