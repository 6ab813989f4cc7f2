"""How commands end: by signals, by taken ports, by engines that die; and what they leave behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from kvatlas.stream import PublisherConfig, ZmqEventPublisher

pytestmark = pytest.mark.e2e


def _heed_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def started(cache: Path, *arguments: str, **pipes: IO[bytes] | int) -> Iterator["subprocess.Popen[str]"]:
    """A command of ours; killed when the test leaves it running."""
    command = [sys.executable, "-m", "kvatlas", *arguments]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "TMPDIR": str(cache)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes
    # A shell that runs these tests in the background has SIGINT ignored, and so would the command.
    options = {"env": environment, "text": True, "preexec_fn": _heed_sigint, **pipes}
    with subprocess.Popen(command, **options) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def children(pid: int) -> dict[int, str]:
    """Command lines of the processes a process has started."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if parent == pid:
            found[int(entry.name)] = line
    return found


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to that in time"
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds children in /proc")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_demo_takes_its_processes_along(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """However the demo ends, gateway and engines end with it, and no temporary folder stays."""
    with started(tmp_path, "demo", "--engines", "2") as demo:
        until(lambda: any("serve --follow-stdin" in line for line in children(demo.pid).values()))
        family = children(demo.pid)
        assert len(family) == 3
        demo.send_signal(number)
        assert demo.wait(30) == status
        until(lambda: not any(runs(pid) for pid in family))
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("kvatlas-sim-")] == []
        if number is not signal.SIGKILL:
            assert demo.stderr is not None
            assert "Traceback" not in demo.stderr.read()


def test_interrupted_start_of_the_gateway_is_quiet(tmp_path: Path) -> None:
    """Ctrl-C while an engine has not answered its first health check: no traceback, exit code 130, no waiting for it."""
    config = tmp_path / "kvatlas.toml"
    config.write_text("health_timeout_s = 100\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        worker = f"http://127.0.0.1:{silent.getsockname()[1]}"
        arguments = ("--config", str(config), "--worker", worker, "--port", "0", "--admin-port", "0")
        with started(tmp_path, "serve", *arguments) as serve:
            connection, _ = silent.accept()
            with connection:
                serve.send_signal(signal.SIGINT)
                assert "Traceback" not in serve.communicate(timeout=30)[1]
                assert serve.returncode == 130


def test_an_engine_that_dies_is_told_once(tmp_path: Path) -> None:
    """The others go on; when none is left, so ends the command, with 1."""
    with started(tmp_path, "sim", "--engines", "2", "--port", "0", "--json") as sim:
        assert sim.stdout is not None
        assert sim.stderr is not None
        text = ""
        while not text.endswith("\n}\n"):
            text += sim.stdout.readline()
        engines = json.loads(text)["engines"]
        os.kill(engines[0]["pid"], signal.SIGKILL)
        said = sim.stderr.readline()
        assert said == f"engine {engines[0]['url']} (pid {engines[0]['pid']}) ended: signal SIGKILL; 1 left\n"
        assert sim.poll() is None
        os.kill(engines[1]["pid"], signal.SIGKILL)
        assert "; 0 left" in sim.stderr.readline()
        assert sim.wait(20) == 1
        assert sim.stderr.read() == ""


def test_simulated_engines_keep_their_tokenizer(tmp_path: Path) -> None:
    """The printed line is in the singular for one engine, and its tokenizer folder outlives the command."""
    with started(tmp_path, "sim", "--engines", "1", "--port", "0") as sim:
        assert sim.stdout is not None
        first, second = sim.stdout.readline(), sim.stdout.readline()
        sim.terminate()
        assert sim.wait(20) == 0
    assert first.startswith("1 engine serves kvatlas-sim; put a gateway in front of it")
    folder = Path(second.split()[3])
    assert folder.parent == tmp_path / "kvatlas"
    assert (folder / "tokenizer.json").is_file()


def test_each_rank_is_a_worker_of_its_own(tmp_path: Path) -> None:
    """The printed line names every data-parallel rank with its own event stream."""
    with started(tmp_path, "sim", "--engines", "1", "--port", "0", "--data-parallel-size", "2") as sim:
        assert sim.stdout is not None
        lines = [sim.stdout.readline() for _ in range(4)]
        sim.terminate()
        assert sim.wait(20) == 0
    workers = [line.split()[1] for line in lines[2:]]
    assert [worker.rpartition(",")[2] for worker in workers] == ["rank=0", "rank=1"]
    assert len({worker.split(",")[1] for worker in workers}) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("sim", "--engines", "1", "--port"),
        ("sim", "--engines", "1", "--port", "0", "--events-port"),
        ("serve", "--worker", "http://127.0.0.1:9", "--host", "127.0.0.1", "--admin-port", "0", "--port"),
    ],
)
def test_a_taken_port_is_one_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """The system's text, once, and what to do; no traceback of any process."""
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        started(tmp_path, *arguments, str(taken.getsockname()[1])) as command,
    ):
        error = command.communicate(timeout=30)[1]
    assert command.returncode == 2
    line = next(line for line in error.splitlines() if line.startswith("kvatlas:"))
    assert line.lower().count("address already in use") == 1
    assert "Traceback" not in error


def test_a_connected_stream_without_batches_is_explained(tmp_path: Path) -> None:
    """Connected and nothing to show is told apart from not connected."""
    with (
        ZmqEventPublisher(PublisherConfig(endpoint="tcp://127.0.0.1:0", bind=True)) as publisher,
        started(tmp_path, "events", "tail", publisher.endpoint, "--topic", "kv") as tail,
    ):
        assert tail.stderr is not None
        said = tail.stderr.readline()
        tail.terminate()
    assert said.startswith(f"kvatlas: connected to {publisher.endpoint}, waiting: no batch of topic 'kv' yet")


def test_an_unreachable_stream_is_explained(tmp_path: Path) -> None:
    """After some seconds without a batch the tail says whether it is connected; Ctrl-C then ends it with 130."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    with started(tmp_path, "events", "tail", f"tcp://127.0.0.1:{port}") as tail:
        assert tail.stderr is not None
        assert tail.stderr.readline().startswith(f"kvatlas: no connection to tcp://127.0.0.1:{port} yet")
        tail.send_signal(signal.SIGINT)
        assert tail.wait(30) == 130
        assert "Traceback" not in tail.stderr.read()
