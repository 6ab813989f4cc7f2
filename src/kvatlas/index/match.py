"""From residency to hit tokens: the rule that joins the KV cache groups of one worker.

Every group must be able to serve the same prefix. Full attention needs every block from 0; a sliding window needs
only the blocks that the window still sees before the end of the prefix; a kind whose rule is not known here gives no
hit at all, because a claim that may be wrong is worse than none. Source of the rules: vLLM 0.32.0, single-type
managers and the hybrid coordinator's fixed point.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

__all__ = [
    "FULL_KINDS",
    "WINDOW_KINDS",
    "GroupProfile",
    "WorkerMatch",
    "max_hit_blocks",
    "window_hit_blocks",
    "window_need_blocks",
]

FULL_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})


@dataclass(frozen=True, slots=True)
class GroupProfile:
    """What one KV cache group of a worker asks of a prefix."""

    group_id: int
    kind: str
    window_tokens: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether the group needs every block of the prefix."""
        return self.kind in FULL_KINDS

    @property
    def is_window(self) -> bool:
        """Whether the group needs only the blocks before the prefix's end that its window sees."""
        return self.kind in WINDOW_KINDS and bool(self.window_tokens)


@dataclass(frozen=True, slots=True)
class WorkerMatch:
    """How much of one prompt a worker holds.

    Attributes:
        hit_tokens: tokens that the engine will report as cached, were the request to arrive now.
        hit_blocks: the same in blocks.
        block_size: tokens per block on this worker.
        exact: whether the engine will report neither more nor less; see `WorkerColumn.is_exact`.
        tiers: leading tokens held per medium, e.g. {"GPU": 96, "CPU": 128}; the device's own is what `hit_tokens`
        counts.
    """

    hit_tokens: int
    hit_blocks: int
    block_size: int
    tiers: dict[str, int] = field(default_factory=dict)
    exact: bool = True


def max_hit_blocks(num_tokens: int, block_size: int) -> int:
    """The most blocks an engine reuses for a prompt: it always computes at least one token itself.

    Source: vLLM 0.32.0 KVCacheManager.get_computed_blocks (`max_cache_hit_length = num_tokens - 1`).
    """
    return max(0, (num_tokens - 1) // block_size)


def window_need_blocks(window_tokens: int, block_size: int) -> int:
    """Blocks before a prefix's end that a sliding window still reads: ceil((window - 1) / block size)."""
    return -(-(window_tokens - 1) // block_size)


def window_hit_blocks(resident: Callable[[int], bool], limit_blocks: int, need_blocks: int) -> int:
    """The longest prefix of at most `limit_blocks` blocks whose last `need_blocks` blocks are resident.

    A prefix shorter than the window needs all of its blocks.
    """
    if need_blocks == 0:
        return limit_blocks
    run = 0
    for block in range(limit_blocks - 1, -1, -1):
        if resident(block):
            run += 1
            if run == need_blocks:
                return block + need_blocks
        else:
            run = 0
    return run


def joint_hit_blocks(
    profiles: Sequence[GroupProfile],
    full_blocks: int,
    resident: Callable[[int, int], bool],
    block_size: int,
) -> int:
    """The longest prefix all groups can serve.

    Args:
        profiles: the worker's groups.
        full_blocks: leading blocks that every full-attention group holds (already capped).
        resident: (group id, block number) -> held by that group.
        block_size: tokens per block, the same for all groups.
    """
    hit = full_blocks
    windows = [profile for profile in profiles if not profile.is_full]
    if any(not profile.is_window for profile in windows):
        return 0
    while hit:
        shortest = hit
        for profile in windows:
            group_id = profile.group_id
            need = window_need_blocks(profile.window_tokens or 0, block_size)
            shortest = min(shortest, window_hit_blocks(lambda block, g=group_id: resident(g, block), shortest, need))  # type: ignore[misc]
        if shortest == hit:
            return hit
        hit = shortest
    return 0
