"""Two real vLLM engines for every test of this folder, started once and side by side."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.real_vllm import RealVllm, real_python, write_model

HERE = Path(__file__).parent
_start_times_s: list[float] = []
_figures: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs engines, and the first test pays for their start."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.real_engine)
            item.add_marker(pytest.mark.timeout(900))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how long the engines took: the number decides whether this tier stays affordable."""
    if _start_times_s:
        times = ", ".join(f"{seconds:.0f} s" for seconds in _start_times_s)
        terminalreporter.write_line(f"real vLLM engines ready after {times}")
    for line in _figures:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def figures() -> list[str]:
    """Lines for the end of the run: what a test measured, for the documents."""
    return _figures


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python with vLLM. Without one: skip, or fail when KVATLAS_REQUIRE_REAL=1 (as `make test-real` sets it)."""
    python = real_python()
    if python is None:
        reason = "no .venv-real with vLLM here: run `make test-real`, or set KVATLAS_REAL_PYTHON"
        if os.environ.get("KVATLAS_REQUIRE_REAL") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return python


@pytest.fixture(scope="session")
def tiny_model(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that both vLLM and `LocalRenderer.load` read."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny", vllm_python)


@pytest.fixture(scope="session")
def two_engines(
    vllm_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RealVllm, RealVllm]]:
    """Two engines of the same model, both ready. They live for the whole session; a test may stop one (see below)."""
    logs = tmp_path_factory.mktemp("engine-logs")
    first, second = (RealVllm(tiny_model, logs / f"engine-{number}.log", vllm_python) for number in (1, 2))
    try:
        for engine in (first, second):
            engine.start()
        for engine in (first, second):
            engine.wait_ready()
            _start_times_s.append(engine.ready_after_s)
        yield first, second
    finally:
        for engine in (first, second):
            engine.stop()


@pytest.fixture(autouse=True)
def engines_running(two_engines: tuple[RealVllm, RealVllm]) -> None:
    """Bring back an engine that an earlier test stopped, on the ports it had."""
    stopped = [engine for engine in two_engines if not engine.is_running()]
    for engine in stopped:
        engine.start()
    for engine in stopped:
        engine.wait_ready()
        _start_times_s.append(engine.ready_after_s)
