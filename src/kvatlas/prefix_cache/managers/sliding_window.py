"""Sliding window: a hit needs the blocks of one window before its end, and nothing older."""

from collections.abc import Sequence

from kvatlas.prefix_cache.block_pool import BlockPool
from kvatlas.prefix_cache.kv_cache_config import KVCacheConfig
from kvatlas.prefix_cache.kv_cache_spec import SlidingWindowSpec, cdiv
from kvatlas.prefix_cache.managers.base import SingleTypeManager
from kvatlas.prefix_cache.managers.demand import Cell, HitSource

__all__ = ["SlidingWindowManager"]


class SlidingWindowManager(SingleTypeManager):
    """Blocks behind the window are freed, and only blocks some window can end with are cached."""

    def __init__(self, config: KVCacheConfig, group_id: int, pool: BlockPool) -> None:
        super().__init__(config, group_id, pool)
        spec = config.groups[group_id].spec
        assert isinstance(spec, SlidingWindowSpec)  # noqa: S101 - make_manager pairs them
        self._window = spec.sliding_window
        self._extra_retained_tokens = spec.extra_retained_tokens

    def _blocks_in_window(self, *, drop_eagle: bool) -> int:
        """Blocks that hold the window before a block's end; one more when the last is to be given up."""
        return cdiv(self._window - 1, self.block_size) + drop_eagle

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens before the next token's window. Window 4, 7 computed: token 7 sees 4..7, so 4 are skipped.

        Source: vLLM 0.32.0 SlidingWindowManager.get_num_skipped_tokens.
        """
        return max(0, num_computed_tokens - self._window + 1 - self._extra_retained_tokens)

    def find_hit(
        self,
        source: HitSource[Cell],
        hashes: Sequence[bytes],
        max_tokens: int,
        alignment_tokens: int,
        *,
        drop_eagle: bool,
    ) -> tuple[list[Cell], int]:
        """Find the latest end with a whole window of cached blocks before it, or with all blocks back to the start.

        Positions before the window are NULL: they count as hit without being resident. After a miss the search goes on
        before the missing block that is farthest back: no window that ends after it can be complete.

        Cost: O(blocks / blocks in a window) lookups when nothing is cached.
        Source: vLLM 0.32.0 SlidingWindowManager.find_longest_cache_hit.
        """
        block_size, factor, lookup = self.block_size, self._hashes_per_block, source.lookup
        need = max(1, self._blocks_in_window(drop_eagle=drop_eagle))
        end = max_tokens // block_size
        while end > 0:
            if (end - drop_eagle) * block_size % alignment_tokens:
                end -= 1
                continue
            start = max(0, end - need)
            window: list[Cell] = []
            for cell in map(lookup, hashes[(start + 1) * factor - 1 : end * factor : factor]):
                if cell is None:
                    break
                window.append(cell)
            else:
                cells = [source.null] * start + window
                self._give_up_end(cells, alignment_tokens, whole=end - start == need, drop_eagle=drop_eagle)
                return cells, len(cells) * block_size
            end = start + len(window)
        return [], 0

    def _give_up_end(self, cells: list[Cell], alignment_tokens: int, *, whole: bool, drop_eagle: bool) -> None:
        """Drop the block the draft model needs computed again, and what then sticks out over the alignment.

        A run that reaches back to the start without filling a window is cut to the alignment before that as well.
        """
        if not whole:
            self._cut_to_alignment(cells, alignment_tokens)
        if drop_eagle and cells:
            cells.pop()
            self._cut_to_alignment(cells, alignment_tokens)

    def _cut_to_alignment(self, cells: list[Cell], alignment_tokens: int) -> None:
        while len(cells) * self.block_size % alignment_tokens:
            cells.pop()

    def reachable_mask(self, span: range, boundaries: Sequence[int]) -> Sequence[bool] | None:
        """Blocks in a window before an aligned end.

        With retention None every aligned end counts, with n every multiple of n; with 0 and with n also the aligned end
        before each boundary. Where a draft model gives up a block, windows reach one block further.

        Source: vLLM 0.32.0 SlidingWindowManager.reachable_block_mask.
        """
        alignment, interval = self._config.hit_alignment_tokens, self._config.retention_interval
        need = self._blocks_in_window(drop_eagle=self.use_eagle)
        shift = int(self.use_eagle)
        mask = [False] * len(span)
        segment = alignment if interval is None else interval
        if segment:
            per_segment = segment // self.block_size
            if need >= per_segment:
                return None
            mask = [i >= shift and (i - shift) % per_segment >= per_segment - need for i in span]
        if interval is not None:
            for boundary in boundaries:
                end = boundary // alignment * alignment // self.block_size + shift
                for index in range(max(span.start, end - need), min(span.stop, end)):
                    mask[index - span.start] = True
        return mask
