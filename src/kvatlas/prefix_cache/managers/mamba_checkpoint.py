"""States that a Mamba kernel exports from the middle of a prefill chunk, so that the chunk need not end there."""

from collections.abc import Sequence
from typing import NamedTuple

from kvatlas.prefix_cache.block import Block
from kvatlas.prefix_cache.kv_cache_config import KVCacheConfig
from kvatlas.prefix_cache.kv_cache_spec import MambaSpec, cdiv
from kvatlas.prefix_cache.managers.boundaries import checkpoint_position
from kvatlas.prefix_cache.managers.demand import SlotDemand

__all__ = ["Checkpoint", "find_checkpoint"]


class Checkpoint(NamedTuple):
    """A state the kernel exports from the middle of a chunk: the tokens it covers, the table index it is put at."""

    num_tokens: int
    table_index: int


def find_checkpoint(
    config: KVCacheConfig, spec: MambaSpec, demand: SlotDemand, table: Sequence[Block], *, scratch_start: int
) -> Checkpoint | None:
    """Return the state this chunk can export: the longest prefix of it that a resend could hit. None = none.

    It goes to the block before the running state's, which must not hold another state (scratch blocks may move). The
    chunk must start where a hashed block does; the exported prefix must be at least one hashed block longer, and end
    where the kernel can export.

    Args:
        config: alignment of hits, draft model.
        spec: what the kernel can export.
        demand: the chunk.
        table: the request's blocks.
        scratch_start: table index from which blocks are scratch, or missing.

    Source: vLLM 0.32.0 MambaManager, the need of an internal checkpoint, and kv_cache_interface
    is_mamba_prefill_checkpoint_valid.
    """
    alignment = spec.prefill_checkpoint_alignment
    if spec.num_prefill_checkpoint_blocks == 0 or alignment is None:
        return None
    start, end = demand.computed_tokens, demand.main_tokens
    index = cdiv(end, spec.block_size) - 2
    position = checkpoint_position(end, config.hit_alignment_tokens, gives_up=config.use_eagle)
    reaches_end = end >= demand.prefill_end
    is_exportable = start % config.hash_block_size == 0 and (position - start) % alignment == 0
    is_inside = start + config.hash_block_size <= position < end
    has_place = index >= 0 and index > (start - 1) // spec.block_size
    if not (reaches_end and is_exportable and is_inside and has_place):
        return None
    is_taken = index < scratch_start and not table[index].is_null
    return None if is_taken else Checkpoint(position, index)
