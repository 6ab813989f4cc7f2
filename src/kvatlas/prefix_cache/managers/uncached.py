"""Kinds whose blocks belong to one request and are never shared: cross attention and circular buffers."""

from collections.abc import Sequence

from kvatlas.prefix_cache.block import Block
from kvatlas.prefix_cache.managers.base import SingleTypeManager
from kvatlas.prefix_cache.managers.demand import Cell, HitSource, SlotDemand
from kvatlas.prefix_cache.request import Request

__all__ = ["CircularBufferManager", "CrossAttentionManager"]


class _UncachedManager(SingleTypeManager):
    """Nothing is found, adopted or cached."""

    def find_hit(
        self,
        source: HitSource[Cell],
        hashes: Sequence[bytes],
        max_tokens: int,
        alignment_tokens: int,
        *,
        drop_eagle: bool,
    ) -> tuple[list[Cell], int]:
        """Return no hit."""
        del source, hashes, max_tokens, alignment_tokens, drop_eagle
        return [], 0

    def adopt_hits(self, demand: SlotDemand, hits: Sequence[Block]) -> None:
        """Do nothing: there are no hits."""

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Do nothing."""


class CrossAttentionManager(_UncachedManager):
    """As many blocks as the encoder's input fills, at the first allocation.

    Only without prefix caching: the engine fails when it would look one up, so `KVCacheConfig` refuses it.

    Source: vLLM 0.32.0 CrossAttentionManager.
    """

    def num_blocks_to_allocate(self, demand: SlotDemand, hits: Sequence[Block]) -> int:
        """Return the blocks the encoder's input lacks."""
        del hits
        return super().num_blocks_to_allocate(self._of_encoder(demand), ())

    def allocate_external(self, demand: SlotDemand) -> None:
        """Do nothing: connectors load no encoder states."""

    def allocate_new(self, demand: SlotDemand) -> list[Block]:
        """Extend the table to the encoder's input."""
        return super().allocate_new(self._of_encoder(demand))

    def _of_encoder(self, demand: SlotDemand) -> SlotDemand:
        return SlotDemand(demand.request_id, demand.encoder_tokens, demand.encoder_tokens, 0, 0, capped=demand.capped)


class CircularBufferManager(_UncachedManager):
    """One block a request, from its first allocation to its end.

    Source: vLLM 0.32.0 CircularBufferManager.
    """

    def num_blocks_to_allocate(self, demand: SlotDemand, hits: Sequence[Block]) -> int:
        """Return 1 for a request without its block."""
        del hits
        return 0 if self.tables.get(demand.request_id) else 1

    def allocate_external(self, demand: SlotDemand) -> None:
        """Allocate the block."""
        self.allocate_new(demand)

    def allocate_new(self, demand: SlotDemand) -> list[Block]:
        """Allocate the block, once."""
        return [] if self.tables.get(demand.request_id) else self._extend_table(demand.request_id, self.block_size)
