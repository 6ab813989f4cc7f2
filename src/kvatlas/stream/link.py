"""The connection over which live batches come, whatever carries it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from kvatlas._native import Run

__all__ = ["LinkEvent", "LiveLink"]


@dataclass(frozen=True, slots=True)
class LinkEvent:
    """What became of a connection.

    Attributes:
        kind: `connected`: it stands, and what is read from now on came over it. `gone`: it broke. `failed`: an attempt
            to connect did not succeed; the next one is under way.
        reason: why, for people; empty for `connected`.
    """

    kind: Literal["connected", "gone", "failed"]
    reason: str = ""


class LiveLink(Protocol):
    """A connection to one publisher that renews itself for ever. All calls come from one event loop and none waits."""

    bad_messages: int
    """Messages that were no batch, so far."""
    is_drained: bool
    """Whether the last call of `receive_runs` found nothing more to read."""

    def open(self, wake: Callable[[], None]) -> None:
        """Start to connect. `wake` is called when there are events, and while watched when there is data to read.

        Raises:
            ConfigError: the endpoint is malformed.
        """
        ...

    def watch(self) -> None:
        """Tell of data as it comes; it does so from `open` on. Data that came before is told of as well."""
        ...

    def unwatch(self) -> None:
        """Do not tell of data; it is read unasked."""
        ...

    def take_events(self) -> list[LinkEvent]:
        """What happened since the last call."""
        ...

    def receive_runs(self) -> list[Run]:
        """Some of the batches that wait, as they came. Perhaps none, and yet more to read: `is_drained`."""
        ...

    def close(self) -> None:
        """Give all up. Idempotent."""
        ...
