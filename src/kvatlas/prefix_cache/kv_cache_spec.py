"""Kinds of layers: how each keeps KV, and what that means for block sizes, admission and events."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

from kvatlas.errors import ConfigError

__all__ = [
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CircularBufferSpec",
    "CrossAttentionSpec",
    "FullAttentionSpec",
    "KVCacheSpec",
    "MLAAttentionSpec",
    "MambaMode",
    "MambaSpec",
    "RSWASpec",
    "SinkFullAttentionSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "cdiv",
]

MambaMode: TypeAlias = Literal["align", "none"]


def cdiv(dividend: int, divisor: int) -> int:
    """Quotient rounded up: blocks that hold `dividend` tokens."""
    return -(-dividend // divisor)


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """How the layers of one group keep KV. One subclass for each kind.

    Args:
        block_size: tokens in a block.
        dcp_sharded: decode context parallelism splits a block's positions over its ranks, so that a block holds
            `block_size * ranks` tokens.
        tokens_per_state: tokens compressed into one stored state; hits must end on a multiple.
        layout: whatever else tells two groups of one kind apart (heads, dtype). Only groups with equal specs are
            looked up as one.

    Raises:
        ConfigError: a size below 1.
    """

    kind: ClassVar[str] = "unknown"
    """The kind's name in events (`kv_cache_spec_kind`)."""
    supports_partial_hits: ClassVar[bool] = False
    """A hit may end inside a block."""

    block_size: int
    dcp_sharded: bool = field(default=False, kw_only=True)
    tokens_per_state: int = field(default=1, kw_only=True)
    layout: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        self._require_positive("block_size", "tokens_per_state")

    def _require_positive(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} of a {type(self).__name__} must be at least 1 token, got {getattr(self, name)}"
                )

    @property
    def is_full_attention(self) -> bool:
        """A prefix of a hit is a hit: every token attends to all before it."""
        return isinstance(self, FullAttentionSpec)

    @property
    def prefix_cacheable(self) -> bool:
        """Blocks of this kind can be shared by requests."""
        return True

    @property
    def published_window(self) -> int | None:
        """Sliding window in tokens as events carry it, None for kinds without one."""
        return None

    def max_admission_blocks(self, max_in_flight_tokens: int, max_model_len: int) -> int | None:
        """Most blocks a request can hold at a time, for kinds that free behind a window; None = its whole length."""
        del max_in_flight_tokens, max_model_len
        return None


@dataclass(frozen=True, slots=True)
class AttentionSpec(KVCacheSpec):
    """What kinds of attention share: decode context parallelism splits their blocks."""

    dcp_sharded: bool = field(default=True, kw_only=True)


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(AttentionSpec):
    """Every token attends to all before it: all blocks are needed, all are cached."""

    kind: ClassVar[str] = "full_attention"
    supports_partial_hits: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Multi-head latent attention: another content, the same blocks."""

    kind: ClassVar[str] = "mla_attention"


@dataclass(frozen=True, slots=True)
class RSWASpec(FullAttentionSpec):
    """Reference sliding window: a token attends to the prompt and to the last `rswa_window` tokens, not between."""

    rswa_window: int = field(kw_only=True)

    def __post_init__(self) -> None:
        self._require_positive("block_size", "tokens_per_state", "rswa_window")


@dataclass(frozen=True, slots=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention with `sink_len` sink tokens, whole blocks of them; cached like full attention."""

    kind: ClassVar[str] = "sink_full_attention"
    sink_len: int = field(kw_only=True)

    def __post_init__(self) -> None:
        self._require_positive("block_size", "tokens_per_state", "sink_len")
        if self.sink_len % self.block_size:
            raise ConfigError(f"sink_len ({self.sink_len}) must be a multiple of block_size ({self.block_size})")


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(AttentionSpec):
    """A token attends to the last `sliding_window` tokens, itself included; older blocks are freed.

    Args:
        sliding_window: tokens.
        extra_retained_tokens: tokens kept below the window, for a draft model that prefills its last ones again.
    """

    kind: ClassVar[str] = "sliding_window"
    sliding_window: int
    extra_retained_tokens: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        self._require_positive("block_size", "tokens_per_state", "sliding_window")

    @property
    def published_window(self) -> int | None:
        """The window."""
        return self.sliding_window

    def max_admission_blocks(self, max_in_flight_tokens: int, max_model_len: int) -> int | None:
        """Blocks of the window and of the tokens in flight; one more, as a window need not start with a block.

        Source: vLLM 0.32.0 kv_cache_interface SlidingWindowSpec.
        """
        tokens = self.sliding_window - 1 + self.extra_retained_tokens + max_in_flight_tokens
        return cdiv(min(tokens, max_model_len), self.block_size) + 1


@dataclass(frozen=True, slots=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """Sliding window over latent attention.

    Args:
        bounded_replay: the window is computed again rather than cached: nothing is shared.
    """

    kind: ClassVar[str] = "sliding_window_mla"
    bounded_replay: bool = field(default=False, kw_only=True)

    @property
    def prefix_cacheable(self) -> bool:
        """Unless the window is computed again."""
        return not self.bounded_replay


@dataclass(frozen=True, slots=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A token attends to the tokens before it in its own chunk of `attention_chunk_size`; older chunks are freed."""

    kind: ClassVar[str] = "chunked_local_attention"
    attention_chunk_size: int

    def __post_init__(self) -> None:
        self._require_positive("block_size", "tokens_per_state", "attention_chunk_size")

    def max_admission_blocks(self, max_in_flight_tokens: int, max_model_len: int) -> int | None:
        """Blocks of one chunk and of the tokens in flight.

        Source: vLLM 0.32.0 kv_cache_interface ChunkedLocalAttentionSpec.
        """
        return cdiv(min(self.attention_chunk_size + max_in_flight_tokens, max_model_len), self.block_size)


@dataclass(frozen=True, slots=True)
class MambaSpec(KVCacheSpec):
    """A running state instead of KV: only the state after the last token is needed.

    Args:
        mode: `align` caches the states at block boundaries; `none` caches nothing useful (engines then make one block
            as long as the model's longest sequence).
        num_speculative_blocks: scratch states for draft tokens.
        num_prefill_checkpoint_blocks: above 0, the kernel can export one state from the middle of a prefill chunk.
        prefill_checkpoint_alignment: tokens between positions at which it can, counted from the chunk's start.
    """

    kind: ClassVar[str] = "mamba"
    supports_partial_hits: ClassVar[bool] = True
    mode: MambaMode = "align"
    num_speculative_blocks: int = field(default=0, kw_only=True)
    num_prefill_checkpoint_blocks: int = field(default=0, kw_only=True)
    prefill_checkpoint_alignment: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class CrossAttentionSpec(AttentionSpec):
    """Attention to an encoder's output, as long as the encoder's input and never shared."""

    kind: ClassVar[str] = "cross_attention"


@dataclass(frozen=True, slots=True)
class CircularBufferSpec(AttentionSpec):
    """Scratch: one block a request, overwritten in a ring of `block_size` tokens, never shared."""

    @property
    def prefix_cacheable(self) -> bool:
        """Never."""
        return False
