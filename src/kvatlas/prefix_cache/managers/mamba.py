"""Mamba: one running state instead of KV. A hit needs a single block, the state after its last token.

A running state is overwritten by every step, so what is cached is a state that a step has left behind. In `align` mode
the scheduler ends prefill chunks on block boundaries; each chunk writes its final state to a block of its own, reads
the previous one, and the one before that is freed. A table is thus NULLs, then the last two states, then scratch
blocks for draft tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.errors import PrefixCacheError
from kvatlas.prefix_cache.block import Block
from kvatlas.prefix_cache.block_pool import BlockPool
from kvatlas.prefix_cache.kv_cache_config import KVCacheConfig
from kvatlas.prefix_cache.kv_cache_spec import MambaSpec, cdiv
from kvatlas.prefix_cache.managers.base import SingleTypeManager, num_evictable
from kvatlas.prefix_cache.managers.boundaries import checkpoint_position
from kvatlas.prefix_cache.managers.demand import Cell, HitSource, SlotDemand
from kvatlas.prefix_cache.managers.mamba_checkpoint import Checkpoint, find_checkpoint
from kvatlas.prefix_cache.request import Request

__all__ = ["MambaManager"]


@dataclass(slots=True)
class _Progress:
    """Where a request stands.

    Attributes:
        allocated: it has had an allocation, so its table ends with the running state and the scratch blocks.
        previous_index: table index of the state the last step read, to be freed once no step needs it.
        num_retired: leading table positions that are settled.
        checkpoint: what the current chunk exports.
    """

    allocated: bool = False
    previous_index: int | None = None
    num_retired: int = 0
    checkpoint: Checkpoint | None = None


class MambaManager(SingleTypeManager):
    """Keeps the states that `align` mode needs; in `none` mode just blocks.

    Source: vLLM 0.32.0 MambaManager.
    """

    def __init__(self, config: KVCacheConfig, group_id: int, pool: BlockPool) -> None:
        super().__init__(config, group_id, pool)
        spec = config.groups[group_id].spec
        assert isinstance(spec, MambaSpec)  # noqa: S101 - make_manager pairs them
        self._spec = spec
        self._aligned = spec.mode == "align"
        self._num_scratch = spec.num_speculative_blocks
        self._progress: dict[str, _Progress] = {}
        self._cached_in_step: set[bytes] = set()

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All but the last: its state stands for those before."""
        return max(0, num_computed_tokens - 1)

    def new_step_starts(self) -> None:
        """States cached in the last step have been computed by now."""
        self._cached_in_step.clear()

    # Lookup

    def find_hit(
        self,
        source: HitSource[Cell],
        hashes: Sequence[bytes],
        max_tokens: int,
        alignment_tokens: int,
        *,
        drop_eagle: bool,
    ) -> tuple[list[Cell], int]:
        """Find the longest prefix whose state is cached; the positions before it are NULL.

        Nothing is given up for a draft model: draft models have no Mamba layers.

        Cost: O(prefixes tried), down from the longest.
        Source: vLLM 0.32.0 MambaManager.find_longest_cache_hit.
        """
        del drop_eagle
        unit = min(alignment_tokens, self.block_size)
        factor = unit // self._config.hash_block_size
        for count in range(min(max_tokens // unit, len(hashes) // factor), 0, -1):
            cell = source.lookup(hashes[count * factor - 1])
            if cell is not None and count * unit % alignment_tokens == 0:
                return [source.null] * (cdiv(count * unit, self.block_size) - 1) + [cell], count * unit
        return [], 0

    def reachable_mask(self, span: range, boundaries: Sequence[int]) -> Sequence[bool] | None:
        """Blocks whose end is a place to resume at.

        With retention None all, with 0 the aligned end before each boundary, with n also every multiple of n.

        Source: vLLM 0.32.0 MambaManager.reachable_block_mask.
        """
        alignment, interval = self._config.hit_alignment_tokens, self._config.retention_interval
        if interval is None:
            return None
        mask = [False] * len(span)
        if interval:
            per_segment = interval // self.block_size
            if per_segment <= 1:
                return None
            mask = [(index + 1) % per_segment == 0 for index in span]
        for boundary in boundaries:
            index = boundary // alignment * alignment // self.block_size - 1
            if index in span:
                mask[index - span.start] = True
        return mask

    # Allocation

    def num_blocks_to_allocate(self, demand: SlotDemand, hits: Sequence[Block]) -> int:
        """Return the blocks a demand takes: in `align` mode one, and those its first time or a copy asks for.

        A state that another request caches in this very step is not computed yet. More blocks than there are makes the
        request wait for the next step.

        Two cases are undercounted, as in the engine, and let an allocation in a full pool fail instead of being
        refused: tokens a connector brings take a state block of their own, and after rejected drafts the table is
        longer than needed, which makes the result negative.

        Source: vLLM 0.32.0 MambaManager.get_num_blocks_to_allocate.
        """
        if hits and hits[-1].digest in self._cached_in_step:
            return len(self._pool.blocks) + 1
        if not self._aligned:
            return super().num_blocks_to_allocate(self._with_scratch(demand), hits)
        progress = self._progress.setdefault(demand.request_id, _Progress())
        table = self.tables.get(demand.request_id, ())
        new = cdiv(demand.main_tokens, self.block_size) + self._num_scratch - len(hits) - len(table)
        copies = bool(hits and demand.local_tokens % self.block_size) or demand.request_id in self._partial_hits
        if copies:
            new = max(new, 0) + 1
        checkpoint = find_checkpoint(
            self._config, self._spec, demand, table, scratch_start=self._scratch_start(table, progress)
        )
        if not demand.capped:
            progress.checkpoint = checkpoint
        new = min(new, self._most_new_blocks(progress, copies=copies, exports=checkpoint is not None))
        return new + num_evictable(hits)

    def _with_scratch(self, demand: SlotDemand) -> SlotDemand:
        return demand._replace(slot_tokens=demand.slot_tokens + self.block_size * self._num_scratch)

    def _scratch_start(self, table: Sequence[Block], progress: _Progress) -> int:
        """Table index of the first scratch block; the table's length while there is none."""
        return len(table) - (self._num_scratch if progress.allocated else 0)

    def _most_new_blocks(self, progress: _Progress, *, copies: bool, exports: bool) -> int:
        """The running state, a copy, an exported state; at first also the scratch blocks. All else is NULL."""
        return 1 + copies + exports + (0 if progress.allocated else self._num_scratch)

    def allocate_new(self, demand: SlotDemand) -> list[Block]:
        """Give the step's final state a block; return what the table gains, NULLs included, a copy first.

        Lookahead gets no slots: draft models have no Mamba layers, and a chunk must end where its block does.

        Raises:
            PrefixCacheError: not enough free blocks, or a block is in the way that cannot be moved.

        Source: vLLM 0.32.0 MambaManager.allocate_new_blocks.
        """
        if not self._aligned:
            return super().allocate_new(self._with_scratch(demand))
        progress = self._progress.setdefault(demand.request_id, _Progress())
        table = self.tables.setdefault(demand.request_id, [])
        partial = self._partial_hits.pop(demand.request_id, None)
        exports = progress.checkpoint is not None
        required = cdiv(demand.main_tokens, self.block_size) + self._num_scratch
        if required <= len(table) and partial is None and not exports:
            progress.allocated = True
            return []
        before = len(table)
        self._skip_to(table, progress, required - self._num_scratch - 1, exports=exports)
        count = max(required - len(table), 0) + (partial is not None)
        new = self._pool.get_new_blocks(count)
        added = table[before:]
        if partial is not None:
            copy = new.pop(0)
            if self._preserve_end(demand.request_id, partial, copy, running=progress.allocated):
                added.insert(0, copy)
        table.extend(new)
        progress.allocated = True
        return added + new

    def _skip_to(self, table: list[Block], progress: _Progress, state_index: int, *, exports: bool) -> None:
        """Fill the table with NULLs up to the index of the running state, and move scratch blocks that are in the way.

        A block for an exported state stands right before the running state's.
        """
        before = len(table)
        if progress.allocated:
            progress.previous_index = before - 1 - self._num_scratch
        elif before:
            progress.previous_index = before - 1
        null_end = state_index - exports
        table.extend([self._pool.null_block] * (null_end - before))
        if progress.allocated:
            for index in range(before - self._num_scratch, min(before, null_end)):
                if not self._pool.is_writable(table[index]):
                    raise PrefixCacheError(f"scratch block {table[index]} is shared or cached, it cannot be moved")
                table.append(table[index])
                table[index] = self._pool.null_block

    def _preserve_end(self, request_id: str, partial: tuple[int, Block], copy: Block, *, running: bool) -> bool:
        """Keep the state at the table's end, which this step overwrites. Return whether `copy` is now in the table.

        A request that just adopted the state writes to the copy. One that runs, and has cached its own state, must
        go on in its block, as workers only append to tables: there the copy takes over the cached content.
        """
        index, source = partial
        if not running:
            self._copy_on_write(request_id, index, source, copy)
            return True
        self._require_in_table(request_id, index, source)
        self._pool.move_digests(source, copy)
        source.ref_cnt += 1
        self.block_copies.append((source, copy))
        if copy.digest is not None:
            self._cached_in_step.add(copy.digest)
        return False

    def remove_skipped(self, request_id: str, num_computed_tokens: int, num_prompt_tokens: int) -> None:
        """Free the states behind the last, and the one the last step read.

        Source: vLLM 0.32.0 MambaManager.remove_skipped_blocks.
        """
        super().remove_skipped(request_id, num_computed_tokens, num_prompt_tokens)
        progress = self._progress.get(request_id)
        if not self._aligned or progress is None or progress.previous_index is None:
            return
        if progress.previous_index < cdiv(num_computed_tokens, self.block_size) - 1:
            table = self.tables[request_id]
            self._pool.free_blocks([table[progress.previous_index]])
            table[progress.previous_index] = self._pool.null_block

    def _free_span(self, request_id: str, start: int, stop: int) -> None:
        """As for other kinds, but past NULLs: they lie between states that are still to be freed."""
        if not self._aligned:
            super()._free_span(request_id, start, stop)
            return
        table = self.tables.get(request_id)
        if not table:
            return
        progress = self._progress.setdefault(request_id, _Progress())
        stop = min(stop, len(table))
        removed = []
        for index in range(stop - 1, max(start, progress.num_retired) - 1, -1):
            if not table[index].is_null:
                removed.append(table[index])
                table[index] = self._pool.null_block
        self._pool.free_blocks(removed)
        progress.num_retired = max(progress.num_retired, stop)

    def pop_blocks(self, request_id: str) -> list[Block]:
        """Forget the request; return its blocks."""
        self._progress.pop(request_id, None)
        return super().pop_blocks(request_id)

    # Caching

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Cache the states at block ends, then the one at the prompt's last reusable position.

        What is cached here can be hit from the next step on.

        Source: vLLM 0.32.0 MambaManager.cache_blocks.
        """
        before = self.num_cached_blocks.get(request.request_id, 0)
        super().cache_blocks(request, num_tokens)
        after = self.num_cached_blocks.get(request.request_id, 0)
        if self._aligned:
            digest = self._cache_checkpoint(request, num_tokens)
            if digest is not None:
                self._cached_in_step.add(digest)
        if after > before:
            blocks = self.tables[request.request_id][before:after]
            self._cached_in_step.update(block.digest for block in blocks if block.digest is not None)

    def _cache_checkpoint(self, request: Request, num_tokens: int) -> bytes | None:
        progress = self._progress.get(request.request_id)
        if progress is not None and progress.checkpoint is not None:
            return self._cache_exported(request, progress.checkpoint)
        if self._is_worth_keeping(request, num_tokens):
            return self._cache_running_state(request, num_tokens)
        return None

    def _cache_exported(self, request: Request, checkpoint: Checkpoint) -> bytes | None:
        """Name the block of an exported state by what it holds; by nothing when nobody could resume there.

        The block was named as a full block before, which it is not: the export takes its place.
        """
        config = self._config
        block = self.tables[request.request_id][checkpoint.table_index]
        index, rest = divmod(checkpoint.num_tokens, self.block_size)
        mask = self.reachable_mask(range(index - 1, index), ()) if rest == 0 else [False]
        ends_prompt = checkpoint.num_tokens == checkpoint_position(
            request.num_prompt_tokens, config.hit_alignment_tokens, gives_up=config.use_eagle
        )
        is_kept = mask is None or mask[0]
        if not ends_prompt and not is_kept and checkpoint.num_tokens != request.shared_prefix_boundary:
            self._pool.evict(block)
            return None
        if block.num_hashed_tokens == checkpoint.num_tokens:
            return None
        return self._pool.cache_partial_block(request, block, checkpoint.num_tokens, self.group_id, replace=True)

    def _is_worth_keeping(self, request: Request, num_tokens: int) -> bool:
        """Whether a resend of the prompt, or a prompt that shares a prefix seen before, would resume here.

        The latter only while the prompt is computed: in decode the block's content runs ahead of its name.
        """
        config = self._config
        if num_tokens <= 0 or num_tokens % config.hash_block_size:
            return False
        if num_tokens == checkpoint_position(
            request.num_prompt_tokens, config.hash_block_size, gives_up=config.use_eagle
        ):
            return True
        return (
            config.mamba_shared_prefix_checkpoint
            and bool(config.eagle_group_ids)
            and config.partial_hits
            and config.num_reprefillable_tokens == 0
            and num_tokens == request.shared_prefix_boundary
            and request.num_computed_tokens < num_tokens <= request.num_prompt_tokens
        )

    def _cache_running_state(self, request: Request, num_tokens: int) -> bytes | None:
        """Cache the running state. Inside a block, the next step must move it out of the way before it computes."""
        request_id = request.request_id
        index = cdiv(num_tokens, self.block_size) - 1
        table = self.tables.get(request_id, ())
        if index >= len(table) or table[index].is_null:
            return None
        block = table[index]
        digest = self._pool.cache_partial_block(request, block, num_tokens, self.group_id)
        if num_tokens % self.block_size:
            self._partial_hits[request_id] = (index, block)
            self.num_cached_blocks[request_id] = index
        return digest
