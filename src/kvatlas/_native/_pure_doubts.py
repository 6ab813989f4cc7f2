"""Doubts in the Python core of the index: how they begin and end."""

from collections.abc import Sequence

from kvatlas._native._pure_state import CoreState

__all__ = ["DoubtingState"]


class DoubtingState(CoreState):
    """The part of the core's interface that is about doubts."""

    def doubt(self, worker: int, /) -> None:
        """Put all a worker holds in doubt. Cost: O(its blocks)."""
        column = self._column(worker)
        for entry in column.entries.values():
            if not entry.copies:
                continue
            column.doubted += not entry.in_doubt
            entry.in_doubt = True
            if entry.block_key is not None:
                for plane in entry.copies:
                    self._cast_shadow(worker, plane, entry.block_key)
        column.unsure = False
        self._doubt_reported(column, worker)

    def settle(self, worker: int, /) -> int:
        """Forget what is in doubt still; what was confirmed meanwhile stays.

        Returns:
            How many blocks went.

        Cost: O(its blocks).
        """
        column = self._column(worker)
        gone = 0
        for number, entry in list(column.entries.items()):
            if not entry.in_doubt:
                continue
            key = entry.block_key
            if key is not None and set(entry.copies) == {0} and self._planes[0].get(key, 0) >> worker & 1:
                entry.in_doubt = False
                entry.copies[0] = 1  # how many there were was in doubt as well
                column.doubted -= 1
                continue
            gone += 1
            for plane in list(entry.copies):
                self._take(column, worker, entry, plane)
            self._leave(column, number, entry)
        return gone

    def confirm(self, worker: int, block_keys: Sequence[int], /, *, certain: bool) -> tuple[int, int]:
        """The worker's engine says that it holds these blocks in plane 0.

        Doubts about them end. A block that no event named is claimed, too: in doubt unless `certain`, from the next
        removal of an unknown block on, and until `expire_reported`.

        Returns:
            How many doubts ended, how many claims are new.
        """
        column = self._column(worker)
        ended = adopted = 0
        for key in block_keys:
            known = key in column.reported
            in_doubt = self._shadows[0].get(key, 0) >> worker & 1
            if known:
                column.reported[key] = column.stored
            if self._planes[0].get(key, 0) >> worker & 1:
                continue
            if in_doubt and (certain or not known):
                self._set(self._planes[0], key, worker)
                self._unset(self._shadows[0], key, worker)
                column.unsure = column.unsure and not known
                ended += 1
            elif not in_doubt:
                self._set(self._planes[0] if certain else self._shadows[0], key, worker)
                column.reported[key] = column.stored
                column.unsure = False
                adopted += 1
        return ended, adopted

    def refute(self, worker: int, block_keys: Sequence[int], /) -> int:
        """The worker's engine does not hold these blocks: claims in doubt go. Returns how many."""
        self._column(worker)
        shadow = self._shadows[0]
        gone = [key for key in dict.fromkeys(block_keys) if shadow.get(key, 0) >> worker & 1]
        for key in gone:
            self._unset(shadow, key, worker)
        return len(gone)

    def reported(self, worker: int, /) -> int:
        """Claims that rest on the engine's reports alone."""
        return len(self._column(worker).reported)
