"""A simulated link: transfers one after the other at so many bytes a second."""

from kvatlas.clock import Clock
from kvatlas.errors import ConfigError

__all__ = ["Lane"]


class Lane:
    """When transfers end that share one link.

    Args:
        clock: the time transfers take place in.
        bytes_per_s: the link's speed, None = no transfer takes time.

    Raises:
        ConfigError: a speed that is not above 0.
    """

    __slots__ = ("_bytes_per_s", "_clock", "_free_s")

    def __init__(self, clock: Clock, bytes_per_s: float | None) -> None:
        if bytes_per_s is not None and bytes_per_s <= 0:
            raise ConfigError(f"a link's bytes_per_s must be above 0, or None for no delay; got {bytes_per_s}")
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._free_s = clock.monotonic_s()

    def submit(self, num_bytes: int) -> float:
        """Queue a transfer; return when it will have ended."""
        self._free_s = max(self._free_s, self._clock.monotonic_s()) + self.duration_s(num_bytes)
        return self._free_s

    def duration_s(self, num_bytes: int) -> float:
        """Seconds a transfer takes once its turn has come."""
        return 0.0 if self._bytes_per_s is None else num_bytes / self._bytes_per_s
