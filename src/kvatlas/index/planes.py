"""Planes of residency: one KV cache group in one medium each, named by (medium, group), numbered for the core."""

from typing import Protocol

from kvatlas.errors import IndexStateError

__all__ = ["CLEARED_MEDIA", "DEFAULT_MEDIUM", "DEVICE_PLANE", "Plane", "Planes", "normal_medium"]

Plane = tuple[str, int]
"""(medium in upper case, KV cache group id)."""

DEFAULT_MEDIUM = "GPU"
DEVICE_PLANE = 0
"""Number of (DEFAULT_MEDIUM, 0), which is always there."""
CLEARED_MEDIA = (DEFAULT_MEDIUM, "CPU_PINNED")
"""What AllBlocksCleared empties: the device's pool, and on SGLang its pinned host memory."""


class _Core(Protocol):
    def add_plane(self) -> int: ...


def normal_medium(medium: str | None) -> str:
    """Media compare without case; engines that name none mean the device."""
    return medium.upper() if medium else DEFAULT_MEDIUM


class Planes:
    """Numbers of planes, given out as events name them."""

    __slots__ = ("_core", "_numbers")

    def __init__(self, core: _Core) -> None:
        self._core = core
        self._numbers: dict[Plane, int] = {(DEFAULT_MEDIUM, 0): DEVICE_PLANE}

    def number(self, plane: Plane) -> int | None:
        """The number of a plane, new ones included; None when the core has no room for one more."""
        number = self._numbers.get(plane)
        if number is None:
            try:
                number = self._core.add_plane()
            except (IndexStateError, MemoryError):
                return None
            self._numbers[plane] = number
        return number

    def known(self, plane: Plane) -> int | None:
        """The number of a plane that some event named; None when none did."""
        return self._numbers.get(plane)

    def cleared(self) -> list[int]:
        """Numbers of the planes that AllBlocksCleared empties."""
        return [number for (medium, _), number in self._numbers.items() if medium in CLEARED_MEDIA]

    @property
    def names(self) -> tuple[Plane, ...]:
        """Every plane that has a number, in the order of their numbers."""
        return tuple(sorted(self._numbers, key=self._numbers.__getitem__))
