"""How fast a worker's blocks are found again after a loss."""

import math

__all__ = ["Recovery"]

_WINDOW_TURNOVERS = 0.25
_GOOD = 0.99


class Recovery:
    """Recall of one worker since its last loss was detected.

    For each request of the fleet, `held` is how many leading blocks of its prompt the worker's engine holds, `found`
    how many of these are claimed with credit (in doubt counts, without trust does not). Recall of a window is the sum
    of `found` over the sum of `held`: blocks weigh as often as they are asked for. Windows are a quarter of a turnover.

    Args:
        capacity_blocks: blocks of the worker's pool: one turnover.
    """

    __slots__ = ("_capacity", "_since", "_windows")

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._since: int | None = None
        self._windows: dict[int, list[int]] = {}

    @property
    def is_measuring(self) -> bool:
        """Whether there was a loss."""
        return self._since is not None

    def begin(self, stored_blocks: int) -> None:
        """A loss was detected when the engine had stored so many blocks."""
        self._since = stored_blocks
        self._windows.clear()

    def add(self, stored_blocks: int, held: int, found: int) -> None:
        """One request."""
        if self._since is None or not held:
            return
        window = int((stored_blocks - self._since) / self._capacity / _WINDOW_TURNOVERS)
        sums = self._windows.setdefault(window, [0, 0])
        sums[0] += held
        sums[1] += found

    def recalls(self) -> list[tuple[float, float]]:
        """(turnovers at the window's begin, recall) of each window in which something held was asked for."""
        return [(w * _WINDOW_TURNOVERS, found / held) for w, (held, found) in sorted(self._windows.items())]

    def whole_after(self) -> float | None:
        """Turnovers from the loss to the first window from which on recall is at least 99 %.

        None when there was no loss, or when less than one turnover was seen since and recall is not whole yet;
        infinity when more was seen and it is not.
        """
        recalls = self.recalls()
        whole = math.inf if recalls and recalls[-1][0] >= 1 else None
        for begin, recall in reversed(recalls):
            if recall < _GOOD:
                break
            whole = begin
        return whole
