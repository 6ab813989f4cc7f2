"""How fast workers prefill, measured from the first tokens of streams.

A worker's own measurements count while they are fresh and fade into the fleet's mean: a worker that looked slow once,
or was never measured, must not be avoided for ever, because only traffic can correct the picture.
"""

import math

from kvatlas.clock import Clock

__all__ = ["FleetSpeed", "PrefillSpeed"]

_MEASUREMENT_WEIGHT = 0.2
_FADE_S = 30.0
_MIN_MEASURED_TOKENS = 256
"""Shorter prefills measure round trips and steps, not prefill."""


class FleetSpeed:
    """Mean prefill speed of all workers, tokens per second."""

    __slots__ = ("tokens_per_s",)

    def __init__(self, first_guess_tokens_per_s: float) -> None:
        self.tokens_per_s = first_guess_tokens_per_s


class PrefillSpeed:
    """One worker's prefill speed."""

    __slots__ = ("_clock", "_fleet", "_measured_s", "_own_tokens_per_s")

    def __init__(self, clock: Clock, fleet: FleetSpeed) -> None:
        self._clock = clock
        self._fleet = fleet
        self._own_tokens_per_s = 0.0
        self._measured_s = -math.inf

    @property
    def tokens_per_s(self) -> float:
        """The worker's own speed as far as it is fresh, the fleet's for the rest."""
        trust = math.exp((self._measured_s - self._clock.monotonic_s()) / _FADE_S)
        return trust * self._own_tokens_per_s + (1.0 - trust) * self._fleet.tokens_per_s

    def measure(self, tokens: int, elapsed_s: float) -> None:
        """Learn from one prefill: `tokens` were computed within `elapsed_s`."""
        if tokens < _MIN_MEASURED_TOKENS or elapsed_s <= 0:
            return
        seen = tokens / elapsed_s
        before = self.tokens_per_s
        self._own_tokens_per_s = before + _MEASUREMENT_WEIGHT * (seen - before)
        self._measured_s = self._clock.monotonic_s()
        self._fleet.tokens_per_s += _MEASUREMENT_WEIGHT * (seen - self._fleet.tokens_per_s)
