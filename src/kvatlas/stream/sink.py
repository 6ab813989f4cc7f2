"""What a subscriber tells, and to whom."""

from typing import Literal, Protocol, TypeAlias, runtime_checkable

__all__ = ["EventSink", "RunSink", "StreamStatus"]

StreamStatus: TypeAlias = Literal["connecting", "syncing", "live", "lost"]
"""`connecting`: no connection yet. `syncing`: connected, but something may be missing. `live`: all up to now was
delivered or reported lost. `lost`: the connection is gone; what is known grows stale."""


class EventSink(Protocol):
    """Receiver of one publisher's stream. Called on the event loop, in order; it must return quickly."""

    def on_life(self, reason: str) -> None:
        """A new publisher life starts: forget all learnt from this stream. Not called for the first life."""
        ...

    def on_batch(self, seq: int, payload: bytes) -> None:
        """The next batch, undecoded. Each one of a life comes exactly once, in rising order."""
        ...

    def on_gap(self, first_seq: int, last_seq: int | None) -> None:
        """Nobody can return batches `first_seq..last_seq`: what was learnt before is unconfirmed.

        `last_seq` None: it is unknown how many are missing, perhaps none.
        """
        ...

    def on_status(self, status: StreamStatus, reason: str) -> None:
        """The stream's condition changed, or its reason did."""
        ...


@runtime_checkable
class RunSink(EventSink, Protocol):
    """An `EventSink` that takes batches which follow one another in one call, where they come in runs."""

    def on_batches(self, first_seq: int, payloads: list[bytes]) -> None:
        """As `on_batch` for each in turn, numbered from `first_seq` without a hole."""
        ...
