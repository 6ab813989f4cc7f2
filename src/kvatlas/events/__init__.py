"""What engines say about their prefix cache: the events, their bytes, and the order they must be applied in.

Sans-IO: no sockets, no clock, no asyncio live here. `kvatlas.stream` carries these bytes, `kvatlas.index` gives them
meaning.
"""

from kvatlas.events.aggregator import EventAggregator
from kvatlas.events.codec import (
    DEFAULT_LIMITS,
    DecodedBatch,
    DecodeLimits,
    decode_batch,
    decode_event,
    encode_batch,
    encode_event,
    peek_ts,
)
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
from kvatlas.events.sequence import SequenceTracker
from kvatlas.events.steps import Apply, AskReplay, Lost, NewLife, Step, StreamPosition, TrackerLimits

__all__ = [
    "DEFAULT_LIMITS",
    "AllBlocksCleared",
    "Apply",
    "AskReplay",
    "BlockHandle",
    "BlockRemoved",
    "BlockStored",
    "DecodeLimits",
    "DecodedBatch",
    "Event",
    "EventAggregator",
    "EventBatch",
    "Lost",
    "NewLife",
    "SequenceTracker",
    "Step",
    "StreamPosition",
    "TokenIds",
    "TrackerLimits",
    "decode_batch",
    "decode_event",
    "encode_batch",
    "encode_event",
    "is_bigram",
    "peek_ts",
    "plain_token_ids",
]
