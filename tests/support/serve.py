"""Run `kvatlas serve` as its own process, as users do."""

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Gateway:
    """A running gateway."""

    base_url: str
    admin_url: str
    pid: int

    def workers(self) -> dict[str, dict[str, Any]]:
        """`/api/workers` by worker id."""
        return {worker["id"]: worker for worker in get_json(self.admin_url + "/api/workers")["workers"]}

    def await_workers(
        self, condition: Callable[[dict[str, Any]], bool], timeout_s: float = 20.0
    ) -> dict[str, dict[str, Any]]:
        """Wait until every worker's view meets a condition; the last views otherwise stand in the error."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            workers = self.workers()
            if all(condition(worker) for worker in workers.values()):
                return workers
            if time.monotonic() > deadline_s:
                raise AssertionError(f"workers did not get there in {timeout_s} s: {json.dumps(workers, indent=1)}")
            time.sleep(0.05)


@contextlib.contextmanager
def running_gateway(log_path: Path, *arguments: str) -> Iterator[Gateway]:
    """A gateway on free ports; its log's end is in the error when it does not start."""
    command = [
        sys.executable,
        "-m",
        "kvatlas",
        "serve",
        "--json",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--admin-port",
        "0",
        *arguments,
    ]
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            ports = _read_ports(process, log_path)
            yield Gateway(
                f"http://127.0.0.1:{ports['gateway_port']}", f"http://127.0.0.1:{ports['admin_port']}", process.pid
            )
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def get_json(url: str) -> Any:
    """GET and decode; an error status raises."""
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.loads(response.read())


def post_json(url: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], Any]:
    """POST JSON (bytes go as they are); status, headers in lower case, decoded body, whatever the status."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"content-type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, _lower(response.headers.items()), json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _lower(error.headers.items()), json.loads(error.read())


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers}


def _read_ports(process: "subprocess.Popen[str]", log_path: Path) -> dict[str, int]:
    text = ""
    for line in process.stdout or ():
        text += line
        if line.rstrip() == "}":
            return json.loads(text)
    raise AssertionError(f"kvatlas serve ended with {process.wait()}: {text}\n{log_path.read_text()[-4000:]}")
