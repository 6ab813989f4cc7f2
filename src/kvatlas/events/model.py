"""The three things an engine says about its prefix cache, and the batch that carries them.

The structs are the wire form itself, so nothing is translated on the hot path: fields keep the engine's order, because
the order of the fields is the order of the bytes. `codec.encode_batch` puts the last touch on them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeGuard

from msgspec import Meta, Struct, field

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

# An engine hash is 8 to 32 bytes today; the cap only keeps a hostile one from filling the index.
MAX_HANDLE_BYTES = 256
MAX_TOKEN_ID = 2**63 - 1

BlockHandle: TypeAlias = int | bytes
"""An engine's hash of a block: u64 or raw digest (vLLM), signed i64 (SGLang). Opaque outside its worker."""

if TYPE_CHECKING:
    TokenIds: TypeAlias = Sequence[int] | Sequence[tuple[int, int]]
    BlockHandles: TypeAlias = Sequence[BlockHandle]
    Count: TypeAlias = int
else:
    # What the fast decoder accepts. Pairs are left to the codec's second path: msgspec 0.23 reads freed memory when a
    # constrained int stands beside a fixed-length tuple in one union.
    TokenIds = Sequence[Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]]
    BlockHandles = Sequence[int | Annotated[bytes, Meta(min_length=1, max_length=MAX_HANDLE_BYTES)]]
    Count = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]


def _always_sent() -> None:
    """Default of a field that is on the wire even when it is None; msgspec leaves out plain defaults only."""


class BlockStored(Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """Blocks entered the cache, in chain order.

    `token_ids` covers the whole range that starts after `parent_block_hash`. `len(token_ids)` is `len(block_hashes) *
    block_size` for full attention only: sliding-window and Mamba groups skip blocks, so their hashes may be fewer, or
    none. A bigram event (SGLang with EAGLE) carries pairs of ids instead of ids; see `is_bigram`.

    `extra_keys` has one entry a block, None or a tuple of: LoRA name (str), `(image id, offset in the block)`, cache
    salt (str), digest of prompt embeds (bytes). `cache_salt` is SGLang's. `block_size` is in tokens, 0 for an
    offloading connector's placeholder.

    Source: vLLM 0.32.0, distributed/kv_events.py; SGLang 0.5.23's events of the same names.
    """

    block_hashes: BlockHandles
    parent_block_hash: int | Annotated[bytes, Meta(min_length=1, max_length=MAX_HANDLE_BYTES)] | None
    token_ids: TokenIds
    block_size: Count
    lora_id: int | None = field(default_factory=_always_sent)
    medium: str | None = field(default_factory=_always_sent)
    lora_name: str | None = field(default_factory=_always_sent)
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None
    group_idx: Count | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: Count | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None


class BlockRemoved(Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """One physical copy of each listed block left the cache (another copy may remain).

    Source: vLLM 0.32.0, distributed/kv_events.py.
    """

    block_hashes: BlockHandles
    medium: str | None = field(default_factory=_always_sent)
    group_idx: Count | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """The publisher's whole device pool was reset."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """What one scheduler step did to the cache, in order.

    `ts` is wall-clock seconds on the engine's machine, taken when the batch was drained. Always three elements on
    the wire.

    Source: vLLM 0.32.0, distributed/kv_events.py.
    """

    ts: float
    events: Sequence[Event]
    data_parallel_rank: Count | None = None


def is_bigram(token_ids: TokenIds) -> TypeGuard[Sequence[tuple[int, int]]]:
    """Whether the ids are pairs (id, next id). The decoder lets no event through that mixes the two forms. O(1)."""
    return bool(token_ids) and not isinstance(token_ids[0], int)


def plain_token_ids(token_ids: TokenIds) -> Sequence[int] | None:
    """The ids when they are plain integers, None for a bigram event. O(1), no copy."""
    return None if is_bigram(token_ids) else token_ids  # type: ignore[return-value]
