"""What engines say about their prefix cache: the events, their bytes, and the order they must be applied in.

Sans-IO: no sockets, no clock, no asyncio live here. `kvatlas.stream` carries these bytes, `kvatlas.index` gives them
meaning.
"""

from kvatlas.events.model import (
    AllBlocksCleared,
    BlockHandle,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    TokenIds,
    is_bigram,
    plain_token_ids,
)

__all__ = [
    "AllBlocksCleared",
    "BlockHandle",
    "BlockRemoved",
    "BlockStored",
    "Event",
    "EventBatch",
    "TokenIds",
    "is_bigram",
    "plain_token_ids",
]
