"""Full attention: a hit is the longest unbroken run of cached blocks from the start."""

from collections.abc import Sequence
from itertools import islice

from kvatlas.prefix_cache.block import Block
from kvatlas.prefix_cache.managers.base import SingleTypeManager

__all__ = ["FullAttentionManager"]


class FullAttentionManager(SingleTypeManager):
    """Every block is needed and every complete block is cached; the shared rules already say so."""

    def find_hit(
        self, hashes: Sequence[bytes], max_tokens: int, alignment_tokens: int, *, drop_eagle: bool
    ) -> tuple[list[Block], int]:
        """Walk from block 0 and stop at the first miss: a block without its predecessors is of no use.

        Source: vLLM 0.32.0 FullAttentionManager.find_longest_cache_hit (spec/vllm.md 5.2).
        """
        blocks: list[Block] = []
        for block in map(self._pool.hash_maps[self.group_id].lookup, islice(hashes, max_tokens // self.block_size)):
            if block is None:
                break
            blocks.append(block)
        hit_tokens = len(blocks) * self.block_size
        if drop_eagle and hit_tokens:
            hit_tokens -= self.block_size
        hit_tokens -= hit_tokens % alignment_tokens
        del blocks[hit_tokens // self.block_size :]
        return blocks, hit_tokens
