"""Chunked local attention: a token attends to its own chunk only, so everything before the chunk counts as computed."""

from collections.abc import Sequence

from kvatlas.prefix_cache.block_pool import BlockPool
from kvatlas.prefix_cache.kv_cache_config import KVCacheConfig
from kvatlas.prefix_cache.kv_cache_spec import ChunkedLocalAttentionSpec
from kvatlas.prefix_cache.managers.base import SingleTypeManager
from kvatlas.prefix_cache.managers.demand import Cell, HitSource

__all__ = ["ChunkedLocalAttentionManager"]


class ChunkedLocalAttentionManager(SingleTypeManager):
    """Blocks before the current chunk are freed; all complete blocks are cached."""

    def __init__(self, config: KVCacheConfig, group_id: int, pool: BlockPool) -> None:
        super().__init__(config, group_id, pool)
        spec = config.groups[group_id].spec
        assert isinstance(spec, ChunkedLocalAttentionSpec)  # noqa: S101 - make_manager pairs them
        self._chunk = spec.attention_chunk_size

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens before the next token's chunk. Chunk 8: 13 computed, 8 skipped; 7 computed, none.

        Source: vLLM 0.32.0 ChunkedLocalAttentionManager.get_num_skipped_tokens.
        """
        return num_computed_tokens // self._chunk * self._chunk

    def find_hit(
        self,
        source: HitSource[Cell],
        hashes: Sequence[bytes],
        max_tokens: int,
        alignment_tokens: int,
        *,
        drop_eagle: bool,
    ) -> tuple[list[Cell], int]:
        """Take the chunks before the last as hit, NULL blocks, then walk the last chunk up to the first miss.

        So a cold cache reports hits: engines count them as such, and metrics overstate what was reused.

        Source: vLLM 0.32.0 ChunkedLocalAttentionManager.find_longest_cache_hit.
        """
        del alignment_tokens, drop_eagle  # the configuration allows but one alignment, and no draft model
        factor = self._hashes_per_block
        start = max(0, max_tokens) // self._chunk * self._chunk // self.block_size
        cells = [source.null] * start
        for digest in hashes[(start + 1) * factor - 1 : max_tokens // self.block_size * factor : factor]:
            cell = source.lookup(digest)
            if cell is None:
                break
            cells.append(cell)
        return cells, len(cells) * self.block_size
