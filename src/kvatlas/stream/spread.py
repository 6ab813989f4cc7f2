"""Waiting times spread at random, so that many subscribers do not act in step."""

import random

from kvatlas.stream.subscriber_config import SubscriberConfig

__all__ = ["Spread", "ms_of"]


class Spread:
    """Stretches waiting times at random by up to a half, or by less.

    ZMQ itself does not spread its attempts to connect when they back off.

    Args:
        most: the longest stretch; 1.0 stretches nothing.
    """

    def __init__(self, rng: random.Random | None = None, *, most: float = 1.5) -> None:
        self._rng = rng or random.Random()
        self.most = most
        """A time comes out at most that many times as long."""

    def stretch(self, seconds: float) -> float:
        """A time from `seconds` to `most` times as much."""
        return seconds * self._rng.uniform(1.0, self.most)

    def pauses_ms(self, config: SubscriberConfig) -> tuple[int, int]:
        """The first and the longest pause between two attempts to connect."""
        return ms_of(self.stretch(config.reconnect_s)), ms_of(self.stretch(config.reconnect_max_s))


def ms_of(seconds: float) -> int:
    """Whole milliseconds, at least one, as ZMQ takes them."""
    return max(int(seconds * 1000), 1)
