"""A simulated link: transfers one after the other at so many bytes a second."""

import math

from kvatlas.errors import ConfigError

__all__ = ["Lane"]


class Lane:
    """When transfers end that share one link.

    Args:
        bytes_per_s: the link's speed, None = no transfer takes time.

    Raises:
        ConfigError: a speed that is not above 0.
    """

    __slots__ = ("_bytes_per_s", "_free_s")

    def __init__(self, bytes_per_s: float | None) -> None:
        if bytes_per_s is not None and bytes_per_s <= 0:
            raise ConfigError(f"a link's bytes_per_s must be above 0, or None for no delay; got {bytes_per_s}")
        self._bytes_per_s = bytes_per_s
        self._free_s = -math.inf

    def submit(self, num_bytes: int, now_s: float) -> float:
        """Queue a transfer at `now_s`; return when it will have ended."""
        self._free_s = max(self._free_s, now_s) + self.duration_s(num_bytes)
        return self._free_s

    def duration_s(self, num_bytes: int) -> float:
        """Seconds a transfer takes once its turn has come."""
        return 0.0 if self._bytes_per_s is None else num_bytes / self._bytes_per_s
