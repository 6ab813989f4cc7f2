"""How a fault is written: `drop:p=0.1`, `restart:at=20s,identity=other`, or the same as JSON."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import msgspec

from kvatlas.errors import ConfigError
from kvatlas.simulator.fault_kinds import Fault

__all__ = ["FAULT_NAMES", "fault_from_json", "fault_spec", "parse_fault", "parse_faults"]

_DURATIONS = frozenset({"at", "for", "every", "by", "quiet", "interval", "down", "jump"})
_DURATION = re.compile(r"([+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?)(ms|s|m|h)?")
_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
_KINDS: dict[str, type[Any]] = {str(kind.__struct_config__.tag): kind for kind in get_args(Fault)}

FAULT_NAMES: tuple[str, ...] = tuple(_KINDS)
"""The names a spec begins with."""


def parse_fault(text: str) -> Fault:
    """Read `NAME` or `NAME:KEY=VALUE,KEY=VALUE...`. Times are `5s`, `200ms`, `2m`, `1h`, or a number of seconds.

    Raises:
        ConfigError: names what was given and what is known.
    """
    name, colon, rest = text.strip().partition(":")
    values: dict[str, object] = {}
    for part in rest.split(",") if colon else ():
        key, equals, value = part.partition("=")
        key = key.strip()
        if not key or not equals or key in values:
            raise ConfigError(
                f"fault {text!r}: {part!r} is not KEY=VALUE with a key of its own; {_known(name.strip())}"
            )
        value = value.strip()
        values[key] = f"0{value}" if value.startswith(".") else value
    return _build(text, name.strip(), values)


def parse_faults(texts: Iterable[str]) -> tuple[Fault, ...]:
    """Read several specs; see `parse_fault`."""
    return tuple(parse_fault(text) for text in texts)


def fault_from_json(body: bytes) -> Fault:
    """Read `{"fault": NAME, KEY: VALUE...}`, or `{"spec": TEXT}`. Times may be numbers of seconds or texts like "5s".

    Raises:
        ConfigError: names what was given and what is known.
    """
    try:
        values = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f'a fault is a JSON object like {{"fault": "drop", "p": 0.1}}: {error}') from None
    if isinstance(values.get("spec"), str) and len(values) == 1:
        return parse_fault(values["spec"])
    name = values.pop("fault", None)
    return _build(body.decode(errors="replace"), str(name), values)


def fault_spec(fault: Fault) -> str:
    """The text that `parse_fault` reads back as an equal fault; what has its default is left out."""
    values = msgspec.to_builtins(fault)
    name = values.pop("fault")
    parts = [f"{key}={_text(key, value)}" for key, value in values.items()]
    return f"{name}:{','.join(parts)}" if parts else name


def _text(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{str(value).removesuffix('.0')}s" if key in _DURATIONS else str(value)


def _build(given: str, name: str, values: Mapping[str, object]) -> Fault:
    kind = _KINDS.get(name)
    if kind is None:
        raise ConfigError(f"fault {given!r}: there is no fault {name!r}; {_known(name)}")
    try:
        plain = {key: _seconds(value) if key in _DURATIONS else value for key, value in values.items()}
        fault: Fault = msgspec.convert({**plain, "fault": name}, kind, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"fault {given!r}: {error}; {_known(name)}") from None
    every_s, for_s = getattr(fault, "every_s", None), getattr(fault, "for_s", 0.0)
    if every_s is not None and (for_s is None or for_s >= every_s):
        raise ConfigError(f"fault {given!r}: `every` must be longer than `for`, or it never ends; {_known(name)}")
    return fault


def _seconds(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is not a time like 5s, 200ms, 2m or 1h")
    number = float(match[1])
    # 700 / 1000 is 0.7, 700 * 0.001 is not.
    seconds = number / 1000 if match[2] == "ms" else number * _UNIT_S[match[2]]
    if not math.isfinite(seconds):
        raise ValueError(f"{value!r} is too long")
    return seconds


def _known(name: str) -> str:
    kind = _KINDS.get(name)
    if kind is None:
        return f"known faults: {', '.join(FAULT_NAMES)}"
    keys = sorted(field.encode_name for field in msgspec.structs.fields(kind))
    return f"keys of {name}: {', '.join(keys)}; known faults: {', '.join(FAULT_NAMES)}"
