"""Planes of residency: one KV cache group in one medium each, named by (medium, group), numbered for the core."""

from collections.abc import Sequence
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

    def numbers(self, planes: Sequence[Plane]) -> list[int]:
        """The numbers here of a dump's planes.

        Raises:
            IndexStateError: two of them are one, the first is not the device's, or there is no room for them.
        """
        if not planes or planes[0] != (DEFAULT_MEDIUM, 0) or len(set(planes)) != len(planes):
            raise IndexStateError(f"planes of a dump are distinct and the first is the device's; got {planes[:4]}")
        numbers = [number for number in map(self.number, planes) if number is not None]
        if len(numbers) != len(planes):
            raise IndexStateError(f"the index has no room for the {len(planes)} planes of the dump")
        return numbers

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
