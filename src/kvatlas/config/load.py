"""Reading settings from a file (TOML, YAML or JSON) and from `--worker` texts."""

import re
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.config.model import NO_EVENTS, ServeConfig, WorkerConfig
from kvatlas.errors import ConfigError

__all__ = ["is_endpoint", "load_serve_config", "parse_worker"]

_WORKER_FORM = (
    "URL[,events=tcp://HOST:PORT|none][,replay=tcp://HOST:PORT][,topic=T][,rank=N]"
    "[,block_size=N][,copy_mode=count|set][,model=NAME]"
)
_MAX_PORT = 65_535
_ENDINGS = (".toml", ".yaml", ".yml", ".json")
_HTTP_URL = re.compile(r"^http://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?(/[^\s?#]*)?$")
_ZMQ_URL = re.compile(r"^(tcp://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):\d{1,5}|ipc://.+|inproc://.+)$")


def load_serve_config(path: Path) -> ServeConfig:
    """Read and check a settings file; its ending (.toml .yaml .yml .json) names the format.

    Raises:
        ConfigError: the file is missing, is not in its format, or names something unknown or out of range.
    """
    decoders = {
        ".toml": msgspec.toml.decode,
        ".yaml": msgspec.yaml.decode,
        ".yml": msgspec.yaml.decode,
        ".json": msgspec.json.decode,
    }
    decode = decoders.get(path.suffix)
    if decode is None:
        raise ConfigError(f"cannot tell the format of {path}: expected an ending out of {', '.join(decoders)}")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}; check --config") from error
    try:
        config = _decode(path.suffix, raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}; docs/config.md lists every setting") from error
    for worker in config.workers:
        check_worker(worker)
    return config


def _decode(ending: str, raw: bytes) -> ServeConfig:
    if ending == ".toml":
        return msgspec.toml.decode(raw, type=ServeConfig)
    if ending == ".json":
        return msgspec.json.decode(raw, type=ServeConfig)
    return msgspec.yaml.decode(raw, type=ServeConfig)


def parse_worker(text: str) -> WorkerConfig:
    """Turn `--worker` text into a worker.

    Raises:
        ConfigError: not of the documented form; the message says which part.
    """
    url, *parts = text.split(",")
    fields: dict[str, Any] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or not value:
            raise ConfigError(f"--worker {text!r}: the part {part!r} is not NAME=VALUE; expected {_WORKER_FORM}")
        if name == "url":
            raise ConfigError(f"--worker {text!r}: the URL comes first and without a name; expected {_WORKER_FORM}")
        if name == "model":
            fields["models"] = (*fields.get("models", ()), value)
        elif name in fields:
            raise ConfigError(f"--worker {text!r}: {name!r} is given twice")
        else:
            fields[name] = value
    try:
        worker = msgspec.convert({"url": url, **fields}, WorkerConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--worker {text!r}: {error}; expected {_WORKER_FORM}") from error
    check_worker(worker)
    return worker


def check_worker(worker: WorkerConfig) -> None:
    """Refuse addresses that cannot work.

    Raises:
        ConfigError: names the address, the form expected and what to do.
    """
    if not _HTTP_URL.match(worker.url) or not _port_fits(worker.url):
        raise ConfigError(
            f"worker URL {worker.url!r} cannot be used: expected http://HOST[:PORT][/PATH], e.g. http://10.0.0.5:8000"
        )
    if worker.url.rstrip("/").endswith("/v1"):
        base = worker.url.rstrip("/").removesuffix("/v1")
        raise ConfigError(f"worker URL {worker.url!r} cannot be used: give the base URL without /v1, i.e. {base}")
    for name, endpoint in (("events", worker.events), ("replay", worker.replay)):
        if endpoint is None or (name == "events" and endpoint == NO_EVENTS):
            continue
        if "*" in endpoint or "0.0.0.0" in endpoint:  # noqa: S104 - compared, not bound
            raise ConfigError(
                f"{name} endpoint {endpoint!r} of {worker.url} is where the engine binds: "
                "give the host to connect to instead"
            )
        if not is_endpoint(endpoint):
            raise ConfigError(f"{name} endpoint {endpoint!r} of {worker.url} cannot be used: expected tcp://HOST:PORT")
    if worker.replay is not None and worker.events in {None, NO_EVENTS}:
        raise ConfigError(
            f"worker {worker.url} has a replay endpoint but no events endpoint: give events=tcp://HOST:PORT too"
        )


def is_endpoint(text: str) -> bool:
    """Whether a text is a ZeroMQ address that can be connected to: tcp://HOST:PORT, ipc://PATH or inproc://NAME."""
    return bool(_ZMQ_URL.match(text)) and _port_fits(text)


def _port_fits(endpoint: str) -> bool:
    """Whether the port, if there is one, is 1..65535."""
    port = re.search(r":(\d{1,5})(?:/|$)", endpoint.partition("://")[2])
    return port is None or 1 <= int(port[1]) <= _MAX_PORT
