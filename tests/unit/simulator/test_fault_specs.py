"""The text and the JSON of faults."""

import pytest

from kvatlas.errors import ConfigError
from kvatlas.simulator import (
    FAULT_NAMES,
    ClockJump,
    Crash,
    Cut,
    Drop,
    Hang,
    LostTail,
    ReplayFault,
    Restart,
    Silence,
    SlowStart,
    fault_from_json,
    fault_spec,
    parse_fault,
)

SPECS = [
    ("drop:p=0.1", Drop(p=0.1)),
    ("drop:p=.25", Drop(p=0.25)),
    ("drop:from=100,count=20", Drop(from_batch=100, count=20)),
    ("silence:at=5s,for=10s", Silence(at_s=5.0, for_s=10.0)),
    ("restart:at=20s,identity=other", Restart(at_s=20.0, identity="other")),
    ("restart:overtaking=true", Restart(overtaking=True)),
    ("lost_tail:count=3", LostTail(count=3)),
    ("replay:mode=truncated,keep=50", ReplayFault(mode="truncated", keep=50)),
    ("hang:at=3s,engine=1,for=5s", Hang(at_s=3.0, for_s=5.0, engine=1)),
    ("clock:at=10s,jump=-3600s", ClockJump(jump_s=-3600.0, at_s=10.0)),
    ("slow_start:for=0.25s", SlowStart(for_s=0.25)),
    ("crash:after=3", Crash(after=3)),
    ("cut", Cut()),
]


@pytest.mark.parametrize(("text", "fault"), SPECS)
def test_specs(text, fault):
    """A text is a fault, and the fault is that text."""
    assert parse_fault(text) == fault
    assert fault_spec(fault).split(":")[0] == text.split(":")[0]
    assert parse_fault(fault_spec(fault)) == fault


@pytest.mark.parametrize(
    ("text", "seconds"), [("200ms", 0.2), ("2m", 120.0), ("1h", 3600.0), ("1.5", 1.5), ("0s", 0.0)]
)
def test_times(text, seconds):
    """Units of time; without one, seconds."""
    assert parse_fault(f"cut : at = {text}") == Cut(at_s=seconds)


def test_json():
    """The same keys; times as numbers or texts; a spec as it is."""
    assert fault_from_json(b'{"fault": "drop", "p": 0.5, "at": "5s", "for": 2}') == Drop(p=0.5, at_s=5.0, for_s=2.0)
    assert fault_from_json(b'{"spec": "drop:p=0.5"}') == Drop(p=0.5)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("dorp", "no fault 'dorp'"),
        ("", "no fault ''"),
        ("drop:q=1", "unknown field `q`"),
        ("drop:p", "'p' is not KEY=VALUE"),
        ("drop:", "'' is not KEY=VALUE"),
        ("drop:p=1,p=0", "'p=0' is not KEY=VALUE with a key of its own"),
        ("drop:p=1.5", "<= 1.0"),
        ("drop:p=nan", ">= 0.0"),
        ("drop:at=soon", "'soon' is not a time"),
        ("drop:at=-1s", ">= 0.0"),
        ("drop:at=1" + "0" * 400, "is too long"),
        ("replay", "missing required field `mode`"),
        ("replay:mode=odd", "Invalid enum value 'odd'"),
        ("hang:for=5s,every=5s", "`every` must be longer than `for`"),
        ("hang:every=5s", "`every` must be longer than `for`"),
    ],
)
def test_bad_specs(text, complaint):
    """The error quotes what was given, says what is wrong, and lists the known faults."""
    with pytest.raises(ConfigError) as caught:
        parse_fault(text)
    message = caught.value.message
    assert repr(text) in message
    assert complaint in message
    assert all(name in message for name in FAULT_NAMES)


def test_a_bad_key_lists_the_keys():
    """Those of the fault that was meant."""
    with pytest.raises(ConfigError, match="keys of delay: at, by, count, engine, every, for, from, p, rank;"):
        parse_fault("delay:seconds=3")


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"p": 1}', b'{"fault": 3}', b'{"fault": "drop", "p": "x"}', b"\xff"])
def test_bad_json(body):
    """Not an object, no fault, no number: an error, never a crash."""
    with pytest.raises(ConfigError):
        fault_from_json(body)
