"""A real vLLM server on the CPU as a test fixture: one process group, free loopback ports, a tiny model, KV events on.

The recipe (versions, flags, environment) is explained in CONTRIBUTING.md. An engine takes 20 to 60 s to start and 2 GB of memory.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Self

from kvatlas.rendering import write_tiny_model
from support.golden import PROJECT_ROOT

MODEL_NAME = "tiny"
BLOCK_SIZE_TOKENS = 32
NUM_BLOCKS = 300
MAX_MODEL_TOKENS = 4096
VOCAB_SIZE = 1000
TOPIC = "kv-events"
DEFAULT_BUFFER_STEPS = 10_000  # vLLM's own

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 20.0
START_ATTEMPTS = 2
LOG_TAIL_LINES = 40

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the block count below is what the engine really uses
    "HF_HUB_OFFLINE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # gives /reset_prefix_cache
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two engines share the cores; pinning would put both on the same ones
    "VLLM_NO_USAGE_STATS": "1",
}


class EngineStartError(RuntimeError):
    """The engine ended, or did not answer in time; the message carries the end of its log."""


def real_python() -> Path | None:
    """The Python that has vLLM: `KVATLAS_REAL_PYTHON`, else `.venv-real` of the project, else None."""
    named = os.environ.get("KVATLAS_REAL_PYTHON")
    if named:
        if not Path(named).is_file():
            raise FileNotFoundError(f"KVATLAS_REAL_PYTHON names {named}, which is not a file")
        return Path(named)
    python = PROJECT_ROOT / ".venv-real" / "bin" / "python"
    return python if python.is_file() else None


def write_model(directory: Path, python: Path) -> Path:
    """Write a model folder an engine can serve: kvatlas's tiny tokenizer plus seeded random weights."""
    write_tiny_model(directory, vocab_size=VOCAB_SIZE)
    script = Path(__file__).with_name("make_tiny_vllm_model.py")
    command = [str(python), str(script), str(directory), "--vocab-size", str(VOCAB_SIZE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise EngineStartError(f"{script.name} ended with {done.returncode}:\n{done.stderr}")
    return directory


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; held open together, so no two are the same."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class RealVllm:
    """One engine. `start` returns at once, `wait_ready` blocks until it serves, `stop` leaves no process behind.

    Ports stay the same over `stop` and `start`, so that a restarted engine is found where the old one was.

    Attributes:
        buffer_steps: batches that the engine keeps for replay, from its next start on.
    """

    def __init__(self, model_dir: Path, log_path: Path, python: Path, *, extra_arguments: tuple[str, ...] = ()) -> None:
        self.model_dir = model_dir
        self.log_path = log_path
        self.python = python
        self.extra_arguments = extra_arguments
        self.ready_after_s = 0.0
        self.buffer_steps = DEFAULT_BUFFER_STEPS
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._pick_ports()

    def __enter__(self) -> Self:
        self.start()
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def base_url(self) -> str:
        """Where HTTP is served."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def events_endpoint(self) -> str:
        """Where to connect a SUB socket."""
        return f"tcp://127.0.0.1:{self.events_port}"

    @property
    def replay_endpoint(self) -> str:
        """Where to connect a DEALER socket that asks for old batches."""
        return f"tcp://127.0.0.1:{self.replay_port}"

    @property
    def pid(self) -> int | None:
        """Process id of the API server, None when stopped."""
        return self._process.pid if self._process else None

    def is_running(self) -> bool:
        """Whether the API server's process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Launch the server; call `wait_ready` before using it."""
        if self.is_running():
            raise RuntimeError(f"the engine of port {self.port} already runs as pid {self.pid}; stop it first")
        self._started_s = time.monotonic()
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,  # one group for the API server, the engine core and its worker
            )

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for /health. A failed start is tried once more, on other ports.

        Raises:
            EngineStartError: every attempt failed; the message ends with the last lines of the log.
        """
        for attempt in range(1, START_ATTEMPTS + 1):
            problem = self._wait_healthy(timeout_s)
            if problem is None:
                self.ready_after_s = time.monotonic() - self._started_s
                return
            self.stop()
            if attempt == START_ATTEMPTS:
                raise EngineStartError(f"{problem} ({attempt} attempts)\n--- {self.log_path}\n{self.log_tail()}")
            self._pick_ports()
            self.start()

    def stop(self) -> None:
        """Ask the server to end, then kill whatever is left of its process group. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        _kill_group(process)

    def kill(self) -> None:
        """SIGKILL to every process of the engine at once: no farewell, no last batch. Returns when all are gone."""
        process, self._process = self._process, None
        if process is not None:
            _kill_group(process)

    def call(self, method: str, path: str, body: object | None = None, *, timeout_s: float = 60.0) -> tuple[int, Any]:
        """One HTTP request to the engine itself.

        Returns:
            The status and the decoded JSON (None when the answer has no body).
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"content-type": "application/json"})
            answer = connection.getresponse()
            raw = answer.read()
            return answer.status, json.loads(raw) if raw else None
        finally:
            connection.close()

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines the engine wrote."""
        if not self.log_path.is_file():
            return "(no log)"
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def _pick_ports(self) -> None:
        self.port, self.events_port, self.replay_port = free_ports(3)

    def _wait_healthy(self, timeout_s: float) -> str | None:
        """Poll /health; the text of what went wrong, or None."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if self._process is None:
                return "the engine was not started"
            if (code := self._process.poll()) is not None:
                return f"the engine ended with exit status {code} before it was ready"
            with contextlib.suppress(OSError, http.client.HTTPException):
                status, _ = self.call("GET", "/health", timeout_s=5.0)
                if status == http.HTTPStatus.OK:
                    return None
            time.sleep(0.25)
        return f"the engine did not answer /health with 200 within {timeout_s:.0f} s"

    def _command(self) -> list[str]:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",  # vLLM binds only for "*"; a host name would make it connect
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "topic": TOPIC,
            "buffer_steps": self.buffer_steps,
        }
        options = {
            "--model": str(self.model_dir),
            "--served-model-name": MODEL_NAME,
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--block-size": str(BLOCK_SIZE_TOKENS),
            "--max-model-len": str(MAX_MODEL_TOKENS),
            "--num-gpu-blocks-override": str(NUM_BLOCKS),
            "--prefix-caching-hash-algo": "sha256_cbor",
            "--kv-events-config": json.dumps(events),
        }
        flags = ["--enforce-eager", "--enable-prompt-tokens-details"]
        pairs = [text for pair in options.items() for text in pair]
        module = "vllm.entrypoints.openai.api_server"
        return [str(self.python), "-m", module, *pairs, *flags, *self.extra_arguments]


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill until nobody of the process's group is left."""
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    with contextlib.suppress(ProcessLookupError):  # raised when nobody of the group is left
        while time.monotonic() < deadline_s:
            os.killpg(process.pid, signal.SIGKILL)  # the group's id is the pid: start_new_session
            process.poll()
            time.sleep(0.05)
