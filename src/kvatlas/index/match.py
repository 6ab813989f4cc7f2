"""From residency to hit tokens: the rule that joins the KV cache groups of one worker.

A hit is a prefix that every group can serve. Each kind of group serves prefixes of some lengths, which follow from what
it holds; the answer is the longest length that all of them serve and that ends where hits may end:

* full attention: every block from the start;
* sliding window: the blocks that the window sees before the end, or all of them where the prefix is shorter;
* Mamba: the state at the end, nothing else;
* chunked local attention: the blocks of the chunk the prefix ends in; chunks before it count without being held;
* a kind of no known rule: nothing, because a claim that may be wrong is worse than none.

Events do not say everything this needs. Where they leave several answers open, the least is given, and
`has_known_rule` and `has_known_join` say no.

Source: vLLM 0.32.0, lookups of the single-type managers and the hybrid coordinator's fixed point. Each kind returns
its longest servable length up to a limit, so the fixed point is the longest length that all serve, in any order.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import msgspec

from kvatlas.errors import IndexStateError

__all__ = [
    "CHUNKED_KIND",
    "FULL_KINDS",
    "MAMBA_KIND",
    "WINDOW_KINDS",
    "GroupProfile",
    "WorkerMatch",
    "has_known_join",
    "has_known_rule",
    "joint_hit_blocks",
    "max_hit_blocks",
    "window_hit_blocks",
    "window_need_blocks",
]

FULL_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
MAMBA_KIND = "mamba"
CHUNKED_KIND = "chunked_local_attention"


@dataclass(frozen=True, slots=True)
class GroupProfile:
    """What one KV cache group of a worker asks of a prefix.

    Attributes:
        group_id: its number in events.
        kind: `kv_cache_spec_kind` of its stores.
        window_tokens: `kv_cache_spec_sliding_window` of its stores.
        block_size: tokens in its blocks, the largest `block_size` of its stores; None = those of the lookup. Engines
            also announce ends inside blocks, with the smaller size of a hashed block.
        chunk_tokens: the chunk of chunked local attention. Events never carry it.
    """

    group_id: int
    kind: str
    window_tokens: int | None = None
    block_size: int | None = None
    chunk_tokens: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether the group needs every block of the prefix."""
        return self.kind in FULL_KINDS

    @property
    def is_window(self) -> bool:
        """Whether the group needs only the blocks before the prefix's end that its window sees."""
        return self.kind in WINDOW_KINDS and bool(self.window_tokens)


class WorkerMatch(msgspec.Struct, gc=False):
    """How much of one prompt a worker holds. A Struct, because a match makes one for every worker.

    Attributes:
        hit_tokens: tokens that the engine will report as cached, were the request to arrive now.
        hit_blocks: the same in blocks.
        block_size: tokens per block on this worker.
        exact: whether the engine will report neither more nor less; see `WorkerColumn.is_exact`.
        doubted_tokens: how many more it may hold: claims from before a loss of events, which nothing confirmed since.
        other_tiers: leading tokens held per medium other than the device, e.g. {"CPU": 128}.
    """

    hit_tokens: int
    hit_blocks: int
    block_size: int
    exact: bool = True
    doubted_tokens: int = 0
    other_tiers: dict[str, int] = {}

    @property
    def tiers(self) -> dict[str, int]:
        """Leading tokens held per medium; the device's own is what `hit_tokens` counts."""
        return {"GPU": self.hit_tokens, **self.other_tiers}


def max_hit_blocks(num_tokens: int, block_size: int) -> int:
    """The most blocks an engine reuses for a prompt: it always computes at least one token itself.

    Source: vLLM 0.32.0 KVCacheManager.get_computed_blocks (`max_cache_hit_length = num_tokens - 1`).
    """
    return max(0, (num_tokens - 1) // block_size)


def has_known_rule(profile: GroupProfile) -> bool:
    """Whether a group's share in a hit follows from its residency alone.

    Not so without the window of a sliding window, without the chunk of chunked local attention, and for other kinds.
    """
    chunked = profile.kind == CHUNKED_KIND and bool(profile.chunk_tokens)
    return profile.is_full or profile.is_window or profile.kind == MAMBA_KIND or chunked


def has_known_join(profiles: Sequence[GroupProfile], block_size: int) -> bool:
    """Whether `joint_hit_blocks` gives what the engine will report, neither more nor less.

    Every group's rule must be known, and where hits may end. A missing group id is a group that is never cached: it
    announces nothing, and its block size may move the ends of hits. What no event shows is taken not to be so: a draft
    model, which makes engines give up the end of each hit, and such a group behind the last one.

    Args:
        profiles: the worker's groups.
        block_size: as for `joint_hit_blocks`.

    Raises:
        IndexStateError: a group's block size is no multiple of `block_size`.
    """
    ids = sorted(profile.group_id for profile in profiles)
    if not ids or ids != list(range(len(ids))) or not all(map(has_known_rule, profiles)):
        return False
    chunks_end_with_blocks = all(_has_chunks(p, _size_of(p, block_size)) for p in profiles if p.kind == CHUNKED_KIND)
    return chunks_end_with_blocks and _ends_of_hits(tuple(profiles), block_size).is_certain


def window_need_blocks(window_tokens: int, block_size: int) -> int:
    """Blocks before a prefix's end that a lookup asks of a sliding window: ceil((window - 1) / block size), at least 1.

    Source: vLLM 0.32.0 SlidingWindowManager; a window of one token sees nothing before the end, yet the lookup wants a
    block there.
    """
    return max(1, -(-(window_tokens - 1) // block_size))


def window_hit_blocks(
    held: Callable[[int], bool], limit_blocks: int, need_blocks: int, *, step: int = 1, alignment: int = 1
) -> int:
    """The longest prefix whose last `need_blocks` blocks are held; one shorter than that needs all of its blocks.

    Args:
        held: block number -> the group holds an entry that ends with this block.
        limit_blocks: longest prefix allowed.
        need_blocks: how many of the group's own blocks the window sees.
        step: blocks that make one of the group's own.
        alignment: the prefix is a multiple of so many blocks, itself a multiple of `step`.

    Cost: O(limit / need) calls of `held` when nothing is held.
    """
    end = limit_blocks - limit_blocks % alignment
    while end > 0:
        missing = _first_missing(held, max(0, end - need_blocks * step), end, step)
        if missing == end:
            return end
        # No window that ends behind the missing block can be whole, unless it starts behind it, too.
        end = missing - missing % alignment
    return 0


def joint_hit_blocks(
    profiles: Sequence[GroupProfile],
    full_blocks: int,
    resident: Callable[[int, int], bool],
    block_size: int,
    *,
    alignment_tokens: int = 1,
) -> int:
    """The longest prefix all groups can serve, in blocks of `block_size`. Never more than the engine reports.

    Blocks are counted in one size for all groups: the greatest common divisor of every `block_size` their stores show.
    A group of longer blocks has entries at some of the ends only, and is walked here if it is of full attention.

    Args:
        profiles: the worker's groups; none gives 0.
        full_blocks: leading blocks that every full-attention group of this very block size holds, at most
            `max_hit_blocks(num_tokens, block_size)`; that limit itself where there is no such group.
        resident: (group id, block number) -> the group holds an entry for the prefix that ends with this block.
        block_size: tokens per block.
        alignment_tokens: hits end on multiples of this as well. For workers with a group that announces nothing: the
            greatest common divisor of all `len(token_ids)` of their stores is a multiple of what the engine aligns to.

    Raises:
        IndexStateError: a group's block size is no multiple of `block_size`.

    Cost: calls of `resident` are O(blocks / blocks in a window) for a window, O(blocks) for a Mamba group that holds
        nothing, else O(blocks needed).
    """
    if not profiles or not all(map(_can_be_bounded, profiles)):
        return 0
    ends = _ends_of_hits(tuple(profiles), block_size)
    alignment = math.lcm(ends.alignment_tokens, alignment_tokens) // block_size
    hit = _full_attention_limit(profiles, full_blocks, resident, block_size, inside_blocks=ends.inside_blocks)
    hit -= hit % alignment
    others = [profile for profile in profiles if not profile.is_full]
    while hit:
        before = hit
        for profile in others:
            held = partial(resident, profile.group_id)
            hit = _longest_servable(profile, held, hit, block_size, alignment)
        if hit == before or len(others) == 1:
            break
    return hit


class _Ends(NamedTuple):
    """Where hits may end.

    Attributes:
        alignment_tokens: on multiples of this.
        inside_blocks: also inside blocks of full attention.
        is_certain: the events leave no other reading.
    """

    alignment_tokens: int
    inside_blocks: bool
    is_certain: bool


@lru_cache(maxsize=1024)
def _ends_of_hits(profiles: tuple[GroupProfile, ...], block_size: int) -> _Ends:
    """Hits end where all groups end a block; with states at longer steps than hashes, wherever a hash ends.

    The latter needs all other groups but full attention to have blocks of one hash. Events show the length of a hashed
    block only when something ends inside a block, and not whether a block is split over ranks, so that with Mamba and
    several block sizes both readings may be open. The coarser one is safe: ends allowed by it are allowed by the other.

    Source: vLLM 0.32.0 kv_cache_utils, resolve_kv_cache_block_sizes and partial_hash_hits_enabled.
    """
    sizes = [_size_of(profile, block_size) for profile in profiles]
    together = math.lcm(*sizes)
    mamba = [size for profile, size in zip(profiles, sizes, strict=True) if profile.kind == MAMBA_KIND]
    full = [size for profile, size in zip(profiles, sizes, strict=True) if profile.is_full]
    others = [s for p, s in zip(profiles, sizes, strict=True) if not p.is_full and p.kind != MAMBA_KIND]
    if not mamba or together == block_size or any(size > block_size for size in others):
        return _Ends(together, inside_blocks=False, is_certain=True)
    if others or max(mamba) == block_size:
        return _Ends(together, inside_blocks=False, is_certain=False)
    # What a group finds inside a block depends on what others found before it, so one such group can be followed.
    return _Ends(block_size, inside_blocks=True, is_certain=len(full) < 2 or max(full) == block_size)


def _size_of(profile: GroupProfile, block_size: int) -> int:
    """Tokens in the group's blocks."""
    size = profile.block_size or block_size
    if size % block_size:
        raise IndexStateError(
            f"group {profile.group_id} has blocks of {size} tokens, which {block_size} does not divide: count blocks "
            "in the greatest common divisor of all groups' sizes"
        )
    return size


def _can_be_bounded(profile: GroupProfile) -> bool:
    """Whether holding all blocks from the start is surely enough for the group's kind."""
    return profile.is_full or profile.kind in WINDOW_KINDS or profile.kind in {MAMBA_KIND, CHUNKED_KIND}


def _has_chunks(profile: GroupProfile, size: int) -> bool:
    """Whether it is known at which blocks the group's chunks start."""
    return bool(profile.chunk_tokens) and (profile.chunk_tokens or 0) % size == 0


def _full_attention_limit(
    profiles: Sequence[GroupProfile],
    full_blocks: int,
    resident: Callable[[int, int], bool],
    block_size: int,
    *,
    inside_blocks: bool,
) -> int:
    """The longest prefix that full-attention groups serve: any shorter one is served, too.

    Where hits end inside blocks and one group is alone, the longest end held inside the first block missed is added.
    """
    limit = full_blocks
    full = [profile for profile in profiles if profile.is_full]
    steps = [_size_of(profile, block_size) // block_size for profile in full]
    for profile, step in zip(full, steps, strict=True):
        if step == 1:
            continue
        held = partial(resident, profile.group_id)
        end = _first_missing(held, 0, limit - limit % step, step)
        if inside_blocks and len(full) == 1:
            inside = range(min(end + step - 1, limit), end, -1)
            end = next((stop for stop in inside if held(stop - 1)), end)
        limit = end
    if inside_blocks and len(full) > 1:
        limit -= limit % math.lcm(*steps)
    return limit


def _longest_servable(
    profile: GroupProfile, held: Callable[[int], bool], limit: int, block_size: int, alignment: int
) -> int:
    """The longest prefix of at most `limit` blocks, itself aligned, that one group serves.

    Groups whose window or chunk is not known serve at least what they hold from the start.

    Source: vLLM 0.32.0 find_longest_cache_hit of each manager.
    """
    size = _size_of(profile, block_size)
    step = size // block_size
    if profile.kind == MAMBA_KIND:
        return next((end for end in range(limit, 0, -alignment) if held(end - 1)), 0)
    if profile.is_window:
        need = window_need_blocks(profile.window_tokens or 0, size)
        return window_hit_blocks(held, limit, need, step=step, alignment=alignment)
    start = 0
    if profile.kind == CHUNKED_KIND and _has_chunks(profile, size):
        start = limit - limit % ((profile.chunk_tokens or size) // block_size)
    end = _first_missing(held, start, limit, step)
    return end - end % alignment


def _first_missing(held: Callable[[int], bool], start: int, stop: int, step: int) -> int:
    """Where the first of the group's blocks from `start` on that is not held begins; `stop` when all are."""
    while start < stop and held(start + step - 1):
        start += step
    return start
