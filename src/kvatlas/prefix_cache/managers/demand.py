"""What managers are asked: where to look for a hit, and for how many tokens to make room."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from kvatlas.prefix_cache.block import Block

__all__ = ["Cell", "HitSource", "SlotDemand"]

Cell = TypeVar("Cell", Block, tuple[Block, ...])
"""What a lookup finds at one position: a block, or one block of each of several groups."""


@dataclass(frozen=True, slots=True)
class HitSource(Generic[Cell]):
    """Where `find_hit` looks.

    Args:
        lookup: digest -> what is cached under it, None for a miss.
        null: stands for positions that need no memory.
    """

    lookup: Callable[[bytes], Cell | None]
    null: Cell


class SlotDemand(NamedTuple):
    """What one allocation asks for; tokens counted from the start of the sequence. A tuple: made on every allocation.

    Attributes:
        request_id: for whom.
        slot_tokens: tokens that need a slot, lookahead included.
        main_tokens: those without lookahead.
        computed_tokens: computed, hit or loaded before.
        local_tokens: those not loaded by a connector.
        encoder_tokens: length of the encoder's input, for cross attention.
        prefill_end: where the prefill ends, when only the states there are kept; 0 = states are kept everywhere.
        capped: count no more blocks than the request can hold at a time.
    """

    request_id: str
    slot_tokens: int
    main_tokens: int
    computed_tokens: int
    local_tokens: int
    encoder_tokens: int = 0
    prefill_end: int = 0
    capped: bool = False
