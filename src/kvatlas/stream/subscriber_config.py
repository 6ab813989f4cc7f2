"""What a subscriber is told before it starts, and what it counts while it runs."""

from dataclasses import dataclass

import msgspec

from kvatlas.events import StreamPosition

__all__ = ["StreamCounters", "SubscriberConfig"]


class SubscriberConfig(msgspec.Struct, frozen=True):
    """Which stream to follow, and how patiently. Durations are in seconds.

    `topic` is a prefix; the empty one takes all. `bind` True is for engines that connect out (a concrete host in their
    endpoint). `resume_at` is where a snapshot left the stream: whether it is the same still is asked first. A replay
    counts as failed when nothing came for `replay_timeout_s`; failed ones are repeated after `retry_s`, doubling up to
    `retry_max_s`. When no batch came for `probe_s` the tail is asked for, then ever more rarely, down to every
    `probe_max_s`. `heartbeat_s` notices a peer that vanished without a word, after three of them. Waiting times are
    spread by up to a half, so that many subscribers do not act in step.

    What the receiver has not taken yet waits here, up to `max_queue_batches` and `max_queue_bytes`; the rest is
    dropped, counted, and asked for again like any other gap.
    """

    endpoint: str
    replay_endpoint: str | None = None
    resume_at: StreamPosition | None = None
    topic: str = ""
    bind: bool = False
    replay_timeout_s: float = 3.0
    retry_s: float = 0.2
    retry_max_s: float = 5.0
    probe_s: float = 5.0
    probe_max_s: float = 60.0
    reconnect_s: float = 0.1
    reconnect_max_s: float = 5.0
    heartbeat_s: float = 5.0
    turn_s: float = 0.001
    max_message_bytes: int = 256 * 1024 * 1024
    max_queue_batches: int = 20_000
    max_queue_bytes: int = 128 * 1024 * 1024

    @property
    def patience_s(self) -> float:
        """How long a peer may show no life."""
        return 3 * self.heartbeat_s

    @property
    def can_replay(self) -> bool:
        """Whether missed batches can be asked for."""
        return self.replay_endpoint is not None


@dataclass(slots=True)
class StreamCounters:
    """What happened on a stream since it was opened; for metrics."""

    batches: int = 0
    gaps: int = 0
    lives: int = 0
    connections: int = 0
    replays: int = 0
    failed_replays: int = 0
    bad_messages: int = 0
    overflowed: int = 0
    """Live batches dropped here because the receiver was slower than the stream."""
    sink_errors: int = 0
