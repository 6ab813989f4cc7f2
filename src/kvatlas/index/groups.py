"""What a worker's stores teach about its KV cache groups: kinds, windows, block sizes, and the unit of its keys."""

import math

from kvatlas.events import BlockStored
from kvatlas.index.column_state import GroupState
from kvatlas.index.match import GroupProfile, has_known_join

__all__ = ["GroupBook"]


class GroupBook:
    """The groups of one worker, as its device stores show them.

    Attributes:
        unit_tokens: the greatest common divisor of the block sizes seen: what one block key covers. None before the
            first.
        profiles: one for each group, by group id.
        only_full: whether there is one group only, of full attention and unit size: its hit is then a plain prefix.
        joins_exactly: whether the hit rule gives what the engine reports, neither more nor less.
    """

    __slots__ = ("_groups", "joins_exactly", "only_full", "profiles", "unit_tokens")

    def __init__(self) -> None:
        self._groups: dict[int, GroupProfile] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._groups.clear()
        self.unit_tokens: int | None = None
        self.profiles: tuple[GroupProfile, ...] = ()
        self.only_full = True
        self.joins_exactly = True

    def learn(self, event: BlockStored) -> bool:
        """Take note of one device store. Returns whether anything is new."""
        group = event.group_idx or 0
        known = self._groups.get(group)
        kind, window = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
        if kind is None:
            kind, window = (known.kind, known.window_tokens) if known else ("full_attention", window)
        size = known.block_size if known else None
        unit = self.unit_tokens
        if event.block_size and event.block_hashes:
            size = max(size or 0, event.block_size)
            unit = math.gcd(unit or 0, event.block_size)
        profile = GroupProfile(group, kind, window, size)
        if profile == known and unit == self.unit_tokens:
            return False
        self._groups[group] = profile
        self._conclude(unit)
        return True

    def state(self) -> tuple[GroupState, ...]:
        """What a snapshot keeps of the groups, beside `unit_tokens`."""
        return tuple(
            GroupState(each.group_id, each.kind, each.window_tokens, each.block_size) for each in self.profiles
        )

    def restore(self, groups: tuple[GroupState, ...], unit_tokens: int | None) -> None:
        """Go on as a snapshot says."""
        self._groups = {
            each.group_id: GroupProfile(each.group_id, each.kind, each.window_tokens, each.block_size)
            for each in groups
        }
        self._conclude(unit_tokens)

    def _conclude(self, unit: int | None) -> None:
        self.unit_tokens = unit
        self.profiles = tuple(self._groups[each] for each in sorted(self._groups))
        first = self._groups.get(0)
        alone = len(self.profiles) == 1 and first is not None and first.is_full and first.block_size in {None, unit}
        self.only_full = alone or not self.profiles
        self.joins_exactly = unit is None or has_known_join(self.profiles, unit)
