"""What goes wrong in a run, by name: every fault of the simulator, alone and with what makes it worse."""

from dataclasses import dataclass

from kvatlas.errors import ConfigError
from kvatlas.simulator import Fault, parse_fault

__all__ = ["DEFAULT_SCENARIOS", "Scenario", "scenario"]

_NO_REPLAY = "no_replay"

_SPECS = {
    "none": "",
    "drop": "drop:at={at},for={long},p=0.05",
    "duplicate": "duplicate:at={at},for={long},p=0.2",
    "delay": "delay:at={at},for={long},p=0.05,by=3s",
    "reorder": "reorder:at={at},for={long},p=0.1,span=2",
    "hwm": "hwm:at={at},for={long},size=4,rate=1",
    "silence": "silence:at={at},for={long}",
    "lost_tail": "lost_tail:at={at},for={long},count=2,quiet=2s",
    "replay": "replay:mode=refused",
    "restart": "restart:at={at},down=1s",
    "crash": "crash:at={at},down=3s",
    "hang": "hang:at={at},for=10s",
    "reset": "reset:at={at},for={long},p=0.2,after=2",
    "slow_start": "slow_start:for=5s",
    "clock": "clock:at={at},for={long},jump=-60s",
    "cut": "cut:at={at},for={short}",
}
"""What a bare name means. Times: `at` = a quarter of the run, `long` = another quarter, `short` = a twentieth of it."""

DEFAULT_SCENARIOS: tuple[str, ...] = (
    *("drop", "duplicate", "delay", "reorder", "hwm", "silence", "lost_tail", "restart", "crash", "hang", "reset"),
    *("clock", "cut"),
    "crash+slow_start",
    "restart:at={at},overtaking=true",
    "drop+replay",
    "drop+replay:mode=slow,interval=20ms",
    "drop+replay:mode=truncated,keep=1",
    "drop+replay:mode=holes,p=0.3",
    "drop+replay:mode=no_marker",
    "cut+replay:mode=truncated,keep=3",
    "lost_tail+replay",
    "silence+replay",
    "drop+no_replay",
    "silence+no_replay",
    "lost_tail+no_replay",
    "cut+no_replay",
    "restart+no_replay",
    "restart:at={at},overtaking=true+no_replay",
    "mixture",
)
"""The rows of a run without `--fault`."""

_MIXTURE = (
    *("drop:at={at},for={long},p=0.02", "duplicate:at={at},for={long},p=0.05", "reorder:at={at},for={long},p=0.05"),
    *("delay:at={at},for={long},p=0.02,by=2s", "lost_tail:at={at},for={long},p=0.5,quiet=2s"),
    *("cut:at={at},for={short},engine=0", "restart:at={at},engine=1,p=0.7", "crash:at={later},engine=2"),
    *("replay:mode=holes,p=0.05", "silence:at={later},for={short},engine=3", "reset:at={at},for={long},p=0.05"),
    "clock:at={later},for={short},jump=-5s",
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """The faults of one run.

    Attributes:
        name: as it was asked for.
        faults: what the engines suffer.
        has_replay: whether their replay endpoints are known.
    """

    name: str
    faults: tuple[Fault, ...]
    has_replay: bool

    @property
    def polls_work(self) -> bool:
        """Whether a poll surely brings what it asks for."""
        return self.has_replay and not any(fault.__struct_config__.tag == "replay" for fault in self.faults)


def scenario(text: str, duration_s: float) -> Scenario:
    """Read names and specs joined by `+`, for a run of some length.

    Args:
        text: each part is a fault's name, a spec (`drop:p=0.1`), `no_replay`, `mixture` or `none`.

    Raises:
        ConfigError: a part is none of these.
    """
    times = {
        "at": f"{duration_s / 4:.3f}s",
        "later": f"{duration_s * 3 / 8:.3f}s",
        "long": f"{duration_s / 4:.3f}s",
        "short": f"{duration_s / 20:.3f}s",
    }
    specs: list[str] = []
    has_replay = True
    for part in text.split("+"):
        name = part.strip()
        if name == _NO_REPLAY:
            has_replay = False
        elif name == "mixture":
            specs += _MIXTURE
        elif name in _SPECS:
            specs += [_SPECS[name]] if _SPECS[name] else []
        else:
            specs.append(name)
    try:
        faults = tuple(parse_fault(spec.format(**times)) for spec in specs)
    except ConfigError as error:
        extra = f"{_NO_REPLAY}, mixture and none"
        raise ConfigError(f"{error.message}; joined by + also {extra}") from None
    except (KeyError, ValueError, IndexError):
        raise ConfigError(f"fault {text!r}: of braces only {{at}}, {{later}}, {{long}}, {{short}} are known") from None
    return Scenario(text.format(**times), faults, has_replay)
