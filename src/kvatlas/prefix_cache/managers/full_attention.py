"""Full attention: a hit is the longest unbroken run of cached blocks from the start."""

from collections.abc import Sequence
from itertools import islice

from kvatlas.prefix_cache.block_pool import BlockPool
from kvatlas.prefix_cache.kv_cache_config import KVCacheConfig
from kvatlas.prefix_cache.kv_cache_spec import RSWASpec, cdiv
from kvatlas.prefix_cache.managers.base import SingleTypeManager
from kvatlas.prefix_cache.managers.demand import Cell, HitSource
from kvatlas.prefix_cache.request import Request

__all__ = ["FullAttentionManager", "RSWAManager"]


class FullAttentionManager(SingleTypeManager):
    """Every block is needed and every complete block is cached.

    Where blocks hold several hashes, the end of the prompt is cached too, though it does not fill its block.
    """

    def find_hit(
        self,
        source: HitSource[Cell],
        hashes: Sequence[bytes],
        max_tokens: int,
        alignment_tokens: int,
        *,
        drop_eagle: bool,
    ) -> tuple[list[Cell], int]:
        """Walk from block 0 and stop at the first miss: a block without its predecessors is of no use.

        Where hits may end inside a block, the longest cached prefix that ends inside the first block missed is added.

        Cost: O(blocks hit).
        Source: vLLM 0.32.0 FullAttentionManager.find_longest_cache_hit.
        """
        block_size, factor = self.block_size, self._hashes_per_block
        cells: list[Cell] = []
        for cell in map(source.lookup, islice(hashes, factor - 1, max_tokens // block_size * factor, factor)):
            if cell is None:
                break
            cells.append(cell)
        hit_tokens = len(cells) * block_size
        if alignment_tokens < block_size:
            hit_tokens += self._extend_into_block(source, hashes, max_tokens, cells)
        if drop_eagle and hit_tokens:
            hit_tokens -= min(alignment_tokens, block_size)
        hit_tokens -= hit_tokens % alignment_tokens
        del cells[cdiv(hit_tokens, block_size) :]
        return cells, hit_tokens

    def _extend_into_block(
        self, source: HitSource[Cell], hashes: Sequence[bytes], max_tokens: int, cells: list[Cell]
    ) -> int:
        """Append the block that holds the longest cached prefix ending inside it; return the tokens it adds."""
        hash_block_size = self._config.hash_block_size
        first = len(cells) * self._hashes_per_block
        limit = min(first + self._hashes_per_block - 1, max_tokens // hash_block_size, len(hashes))
        for index in range(limit - 1, first - 1, -1):
            cell = source.lookup(hashes[index])
            if cell is not None:
                cells.append(cell)
                return (index + 1 - first) * hash_block_size
        return 0

    def remove_skipped(self, request_id: str, num_computed_tokens: int, num_prompt_tokens: int) -> None:
        """Do nothing: every token is attended to until the end."""

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Cache complete blocks, then the end of the prompt where it does not fill its block."""
        super().cache_blocks(request, num_tokens)
        if self._hashes_per_block > 1:
            self._cache_prompt_tail(request, num_tokens)

    def _cache_prompt_tail(self, request: Request, num_tokens: int) -> None:
        """Let the block in which the prompt ends be hit by the prompt's last whole hash, once that is computed.

        A resend matches all but the prompt's last token; with a draft model it matches all and then gives some up.

        Source: vLLM 0.32.0 FullAttentionManager, caching of a partial tail block.
        """
        hash_block_size = self._config.hash_block_size
        limit = request.num_prompt_tokens if self.use_eagle else request.num_prompt_tokens - 1
        boundary = limit // hash_block_size * hash_block_size
        index, rest = divmod(boundary, self.block_size)
        table = self.tables.get(request.request_id, ())
        if rest and boundary <= num_tokens and index < len(table):
            self._pool.cache_partial_block(request, table[index], boundary, self.group_id)


class RSWAManager(FullAttentionManager):
    """Full attention to the prompt and to a window of the latest tokens; the gap between is freed.

    Source: vLLM 0.32.0 RSWAManager.
    """

    def __init__(self, config: KVCacheConfig, group_id: int, pool: BlockPool) -> None:
        super().__init__(config, group_id, pool)
        spec = config.groups[group_id].spec
        assert isinstance(spec, RSWASpec)  # noqa: S101 - make_manager pairs them
        self._window = spec.rswa_window

    def remove_skipped(self, request_id: str, num_computed_tokens: int, num_prompt_tokens: int) -> None:
        """Free the blocks that lie wholly behind the prompt and before the window."""
        window_start = max(num_prompt_tokens, num_computed_tokens - self._window)
        self._free_span(request_id, cdiv(num_prompt_tokens, self.block_size), window_start // self.block_size)
