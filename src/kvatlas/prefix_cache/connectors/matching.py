"""Which blocks of a request a store would have to give, group by group, to continue from outside the device."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvatlas.errors import ConfigError
from kvatlas.hashing import key_with_group
from kvatlas.prefix_cache.hash_view import hashes_at_block_size
from kvatlas.prefix_cache.kv_cache_spec import FullAttentionSpec, KVCacheSpec
from kvatlas.prefix_cache.request import Request

__all__ = ["TransferGroup", "TransferGroups"]


@dataclass(frozen=True, slots=True)
class TransferGroup:
    """One KV cache group as a store sees it.

    Args:
        group_id: position in the cache's configuration.
        spec: the kind of its layers.
        window_tokens: tokens before a position that it can see, itself included; None = all.
    """

    group_id: int
    spec: KVCacheSpec
    window_tokens: int | None

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.spec.block_size

    def first_needed_block(self, num_tokens: int) -> int:
        """The first block that a request with `num_tokens` computed tokens still reads."""
        if self.window_tokens is None:
            return 0
        return max(0, num_tokens - self.window_tokens + 1) // self.block_size


class TransferGroups:
    """The groups of one cache and the keys of a request's blocks in them.

    Args:
        specs: kind of each group of the cache, group id = position.
        hash_block_size: tokens in a hashed block.

    Raises:
        ConfigError: a kind of layers whose state cannot be kept by block (chunked local, cross attention...).
    """

    def __init__(self, specs: Sequence[KVCacheSpec], hash_block_size: int) -> None:
        if not specs:
            raise ConfigError("a connector needs at least one KV cache group, got none")
        self._hash_block_size = hash_block_size
        self.groups = tuple(TransferGroup(i, spec, _window_of(spec)) for i, spec in enumerate(specs))
        self.step_tokens = math.lcm(*(group.block_size for group in self.groups))
        """Where all groups end a block at once."""

    def __len__(self) -> int:
        return len(self.groups)

    def key(self, request: Request, group: TransferGroup, index: int) -> bytes:
        """Key of a complete block.

        Raises:
            IndexError: the block is not complete.
        """
        hashes = hashes_at_block_size(request.block_hashes, self._hash_block_size, group.block_size)
        return key_with_group(hashes[index], group.group_id)

    def num_complete(self, request: Request, group: TransferGroup, num_tokens: int) -> int:
        """Blocks that the first `num_tokens` tokens complete and that have hashes."""
        return min(
            num_tokens // group.block_size, len(request.block_hashes) * self._hash_block_size // group.block_size
        )

    def needed(
        self, request: Request, start_tokens: int, end_tokens: int
    ) -> Iterator[tuple[TransferGroup, int, bytes]]:
        """(group, block index, key) of all that must come from outside to get from `start_tokens` to `end_tokens`.

        Both end a block in every group.
        """
        for group in self.groups:
            first = max(group.first_needed_block(end_tokens), start_tokens // group.block_size)
            for index in range(first, end_tokens // group.block_size):
                yield group, index, self.key(request, group, index)

    def longest_hit(
        self, request: Request, start_tokens: int, limit_tokens: int, contains: Callable[[bytes], bool]
    ) -> tuple[int, bytes | None]:
        """The most tokens to be had when `start_tokens` are there, and the first key that was missing beyond them.

        Groups that see everything say how far the chain goes; then the end moves back, a common block at a time, until
        every window is filled.

        Cost: O(blocks) calls of `contains`; windows may look at a block more than once.
        """
        end = limit_tokens
        missing: bytes | None = None
        for group in self.groups:
            complete = self.num_complete(request, group, end)
            end = min(end, complete * group.block_size)
            if group.window_tokens is not None:
                continue
            for index in range(start_tokens // group.block_size, complete):
                key = self.key(request, group, index)
                if not contains(key):
                    end, missing = index * group.block_size, key
                    break
        end -= end % self.step_tokens
        while end > start_tokens:
            gap = next((key for group, _, key in self._windows(request, start_tokens, end) if not contains(key)), None)
            if gap is None:
                return end, missing
            missing = missing or gap
            end -= self.step_tokens
        return start_tokens, missing

    def _windows(self, request: Request, start: int, end: int) -> Iterator[tuple[TransferGroup, int, bytes]]:
        return (entry for entry in self.needed(request, start, end) if entry[0].window_tokens is not None)


def _window_of(spec: KVCacheSpec) -> int | None:
    if isinstance(spec, FullAttentionSpec):
        return None
    if spec.published_window is not None:
        return spec.published_window
    raise ConfigError(
        f"a connector cannot keep blocks of kind {spec.kind!r}: only full and sliding-window attention are stored "
        "block by block"
    )
