"""Several KV cache groups of different kinds: a hit is a prefix that every group can serve."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvatlas.errors import ConfigError
from kvatlas.prefix_cache.block import Block
from kvatlas.prefix_cache.block_pool import BlockPool
from kvatlas.prefix_cache.coordinator import (
    Coordinator,
    GroupBlocks,
    NoPrefixCacheCoordinator,
    UnitaryCoordinator,
)
from kvatlas.prefix_cache.hash_map import BlockHashMap
from kvatlas.prefix_cache.kv_cache_config import KVCacheConfig
from kvatlas.prefix_cache.kv_cache_spec import KVCacheSpec, MambaSpec, cdiv
from kvatlas.prefix_cache.managers import HitSource, SingleTypeManager
from kvatlas.prefix_cache.request import Request

__all__ = ["GroupHits", "HybridCoordinator", "SpecGroup", "make_coordinator"]


@dataclass(frozen=True, slots=True)
class GroupHits:
    """What each group found for itself, not reconciled.

    Attributes:
        blocks: of each group.
        hit_tokens: of each group; 0 for groups that cache nothing.
    """

    blocks: tuple[list[Block], ...]
    hit_tokens: tuple[int, ...]


class SpecGroup:
    """Groups of equal specs, looked up as one: a position is hit when all of them have it.

    Attributes:
        spec: theirs.
        group_ids: their positions in the configuration.
        use_eagle: some of them is read by a draft model, so all give up the end of a hit.

    Source: vLLM 0.32.0 kv_cache_coordinator.SpecGroup.
    """

    def __init__(self, spec: KVCacheSpec, managers: Sequence[SingleTypeManager], pool: BlockPool) -> None:
        self.spec = spec
        self.group_ids = tuple(manager.group_id for manager in managers)
        self.use_eagle = any(manager.use_eagle for manager in managers)
        for manager in managers:
            manager.use_eagle = self.use_eagle
        self._finder = managers[0]
        self.block_size = self._finder.block_size
        maps = [pool.hash_maps[group_id] for group_id in self.group_ids]
        self._single = HitSource(maps[0].lookup, pool.null_block)
        self._joint = HitSource(_joint_lookup(maps), (pool.null_block,) * len(maps))

    def find_hit(
        self, hashes: Sequence[bytes], max_tokens: int, alignment_tokens: int, *, drop_eagle: bool
    ) -> tuple[list[list[Block]], int]:
        """Return the hit blocks of each member and the tokens they cover."""
        find = self._finder.find_hit
        if len(self.group_ids) == 1:
            blocks, tokens = find(self._single, hashes, max_tokens, alignment_tokens, drop_eagle=drop_eagle)
            return [blocks], tokens
        cells, tokens = find(self._joint, hashes, max_tokens, alignment_tokens, drop_eagle=drop_eagle)
        return [list(column) for column in zip(*cells, strict=True)] or [[] for _ in self.group_ids], tokens


def _joint_lookup(maps: Sequence[BlockHashMap]) -> Callable[[bytes], tuple[Block, ...] | None]:
    lookups = [hash_map.lookup for hash_map in maps]

    def lookup(digest: bytes) -> tuple[Block, ...] | None:
        found = []
        for find in lookups:
            block = find(digest)
            if block is None:
                return None
            found.append(block)
        return tuple(found)

    return lookup


class HybridCoordinator(Coordinator):
    """Reconciles what groups of different kinds can serve.

    Raises:
        ConfigError: no group caches anything.

    Source: vLLM 0.32.0 HybridKVCacheCoordinator.
    """

    def __init__(self, config: KVCacheConfig, pool: BlockPool) -> None:
        super().__init__(config, pool)
        members: dict[KVCacheSpec, list[SingleTypeManager]] = {}
        for group, manager in zip(config.groups, self.managers, strict=True):
            if group.spec.prefix_cacheable:
                members.setdefault(group.spec, []).append(manager)
        if not members:
            raise ConfigError("none of the KV cache groups can be cached: set enable_caching=False")
        groups = [SpecGroup(spec, managers, pool) for spec, managers in members.items()]
        # Full attention first: its walk from the left is cheap and bounds what the others have to search.
        self._spec_groups = sorted(groups, key=lambda group: not group.spec.is_full_attention)
        self._one_pass = len(groups) == 2 and self._spec_groups[0].spec.is_full_attention

    @property
    def full_attention_group_id(self) -> int | None:
        """The first full-attention group, None without one."""
        first = self._spec_groups[0]
        return first.group_ids[0] if first.spec.is_full_attention else None

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make complete blocks findable up to where some hit can end; for a draft model's groups one block more.

        Source: vLLM 0.32.0 HybridKVCacheCoordinator.get_num_cacheable_tokens.
        """
        aligned = self._align(num_tokens)
        for manager in self.managers:
            cacheable = aligned
            if manager.use_eagle and aligned > 0:
                final = max(0, num_tokens - self.config.num_reprefillable_tokens)
                cacheable = min(final, self._align(final) + manager.block_size)
            manager.cache_blocks(request, cacheable)

    def _align(self, num_tokens: int) -> int:
        """Round down to where hits end; with partial hits not at all, for states must be cached as they come."""
        return num_tokens if self.config.partial_hits else num_tokens - num_tokens % self.config.scheduler_block_size

    def find_longest_hit(self, hashes: Sequence[bytes], max_tokens: int) -> tuple[GroupBlocks, int, int]:
        """Let each kind in turn accept the hit so far or shorten it, until one round shortens nothing.

        Shorter prefixes of a full-attention hit are hits, so those groups are searched once. The others are searched
        anew, as a shorter hit needs other blocks of theirs. The end for the draft model is given up once for each
        length: a kind that gave it up does so again only after another kind has shortened the hit.

        With full attention and one other kind, one round is enough.

        Source: vLLM 0.32.0 HybridKVCacheCoordinator.find_longest_cache_hit.
        """
        hit, longest = max_tokens, 0
        blocks: list[list[Block]] = [[] for _ in self.managers]
        tokens_of: dict[SpecGroup, int] = {}
        dropped: set[SpecGroup] = set()
        while True:
            current = hit
            for group in self._spec_groups:
                if group.spec.is_full_attention and group in tokens_of:
                    current = min(current, tokens_of[group])
                    continue
                drop = group.use_eagle and group not in dropped
                found, tokens = self._find_in(group, hashes, current, drop_eagle=drop)
                if drop:
                    dropped.add(group)
                elif tokens < current:
                    dropped.clear()
                for group_id, group_blocks in zip(group.group_ids, found, strict=True):
                    blocks[group_id] = group_blocks
                tokens_of[group] = current = tokens
                longest = max(longest, current)
            if current >= hit:
                break
            hit = current
            if self._one_pass:
                break
        for group in self._spec_groups:
            if group.spec.is_full_attention:
                for group_id in group.group_ids:
                    del blocks[group_id][cdiv(hit, group.block_size) :]
        return tuple(blocks), hit, longest - hit

    def find_hit_per_group(self, hashes: Sequence[bytes], max_tokens: int) -> GroupHits:
        """Return what each group finds for itself: for connectors that can bring what the others lack.

        Source: vLLM 0.32.0 HybridKVCacheCoordinator.find_longest_cache_hit_per_group.
        """
        blocks: list[list[Block]] = [[] for _ in self.managers]
        hit_tokens = [0] * len(self.managers)
        for group in self._spec_groups:
            found, tokens = self._find_in(group, hashes, max_tokens, drop_eagle=group.use_eagle)
            for group_id, group_blocks in zip(group.group_ids, found, strict=True):
                blocks[group_id] = group_blocks
                hit_tokens[group_id] = tokens
        return GroupHits(tuple(blocks), tuple(hit_tokens))

    def _find_in(
        self, group: SpecGroup, hashes: Sequence[bytes], max_tokens: int, *, drop_eagle: bool
    ) -> tuple[list[list[Block]], int]:
        """Search one kind. Where the end is to be given up, search that much further, to land on the same length.

        Not for Mamba, which gives nothing up: its hit would outgrow the others'.
        """
        limit = max_tokens
        if drop_eagle and not isinstance(group.spec, MambaSpec):
            fine = self.config.partial_hits and group.spec.supports_partial_hits
            margin = min(self.config.hash_block_size, group.block_size) if fine else group.block_size
            limit = min(max_tokens + margin, len(hashes) * self.config.hash_block_size)
        return group.find_hit(hashes, limit, self.config.hit_alignment_tokens, drop_eagle=drop_eagle)


def make_coordinator(config: KVCacheConfig, pool: BlockPool) -> Coordinator:
    """Return the coordinator for the number of groups and whether caching is on.

    Raises:
        ConfigError: groups that cannot be cached together.
    """
    if not config.enable_caching:
        return NoPrefixCacheCoordinator(config, pool)
    if len(config.groups) == 1:
        return UnitaryCoordinator(config, pool)
    return HybridCoordinator(config, pool)
