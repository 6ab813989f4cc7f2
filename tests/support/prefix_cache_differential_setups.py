"""Random configurations of a KV cache, each built twice: as ours and as vLLM's. Needs the Python that has vLLM."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.v1 import kv_cache_interface as engine_kinds
from vllm.v1.core.kv_cache_manager import KVCacheManager as EngineManager

from kvatlas.prefix_cache import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    resolve_block_sizes,
)

# SinkFullAttentionSpec is missing: vLLM 0.32.0 cannot construct its manager.
SHARED_FIELDS = {
    FullAttentionSpec: (),
    MLAAttentionSpec: (),
    RSWASpec: ("rswa_window",),
    SlidingWindowSpec: ("sliding_window", "extra_retained_tokens"),
    SlidingWindowMLASpec: ("sliding_window", "extra_retained_tokens", "bounded_replay"),
    ChunkedLocalAttentionSpec: ("attention_chunk_size",),
    CrossAttentionSpec: (),
    CircularBufferSpec: (),
    MambaSpec: ("num_speculative_blocks", "num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment"),
}
"""Fields that have one name in both packages, for each kind; the kinds have one name in both as well."""

LONG_MODEL_TOKENS = 4096
SHORT_MODEL_TOKENS = 60


@dataclass(frozen=True)
class Setup:
    """What both managers are built from; the fields mean what they mean in `KVCacheConfig`."""

    groups: tuple[KVCacheGroup, ...]
    num_blocks: int
    scheduler_block_size: int
    hash_block_size: int
    max_model_len: int
    enable_caching: bool
    max_in_flight_tokens: int
    watermark: float
    use_eagle: bool
    num_prefill_lookahead_tokens: int
    retention_interval: int | None
    dcp_world_size: int
    mamba_shared_prefix_checkpoint: bool

    @property
    def specs(self) -> list[KVCacheSpec]:
        """The kinds of the groups."""
        return [group.spec for group in self.groups]

    @property
    def mamba(self) -> list[MambaSpec]:
        """The kinds that keep states instead of KV."""
        return [spec for spec in self.specs if isinstance(spec, MambaSpec)]

    @property
    def has_plain_hits(self) -> bool:
        """Every part of a hit is a hit, in every group."""
        return all(spec.is_full_attention or not spec.prefix_cacheable for spec in self.specs)

    def build_ours(self) -> KVCacheManager:
        """Our manager. ConfigError: we refuse the setup."""
        names = set(KVCacheConfig.__dataclass_fields__) & set(self.__dataclass_fields__)
        return KVCacheManager(KVCacheConfig(**{name: getattr(self, name) for name in names}))

    def build_engine(self) -> EngineManager:
        """VLLM's manager. AssertionError or ValueError: it refuses the setup."""
        groups = [
            engine_kinds.KVCacheGroupSpec([f"layer{index}"], engine_spec(group.spec), is_eagle_group=group.is_eagle)
            for index, group in enumerate(self.groups)
        ]
        config = engine_kinds.KVCacheConfig(
            num_blocks=self.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=self.retention_interval,
        )
        return EngineManager(
            config,
            self.max_model_len,
            self.scheduler_block_size,
            self.hash_block_size,
            max_in_flight_tokens=self.max_in_flight_tokens,
            enable_caching=self.enable_caching,
            use_eagle=self.use_eagle,
            num_prefill_lookahead=self.num_prefill_lookahead_tokens,
            enable_kv_cache_events=True,
            watermark=self.watermark,
            log_stats=True,
            dcp_world_size=self.dcp_world_size,
            enable_mamba_shared_prefix_checkpoint=self.mamba_shared_prefix_checkpoint,
        )


def engine_spec(spec: KVCacheSpec) -> engine_kinds.KVCacheSpec:
    """The same kind of layer in the engine's terms; our `layout` becomes the size of a head or of a state."""
    fields = {name: getattr(spec, name) for name in SHARED_FIELDS[type(spec)]}
    size = 1 + len(spec.layout)
    if isinstance(spec, MambaSpec):
        fields |= {"shapes": ((size,),), "dtypes": (torch.float32,), "mamba_cache_mode": spec.mode}
    else:
        fields |= {"num_kv_heads": 1, "head_size": size, "dtype": torch.float32, "dcp_sharded": spec.dcp_sharded}
    return getattr(engine_kinds, type(spec).__name__)(block_size=spec.block_size, **fields)


class GroupMaker:
    """Draws groups whose block sizes fit together: a base size, and `times` as much for some."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.base = rng.choices((1, 2, 4, 8, 16), (3, 3, 3, 3, 1))[0]
        self.times = rng.choice((1, 2, 4))
        self.state_export_alignment = rng.choice((None, None, None, 1, 2, self.base))

    def full(self, times: int = 1) -> FullAttentionSpec:
        """Full attention, plain or latent."""
        kind = self.rng.choice((FullAttentionSpec, FullAttentionSpec, MLAAttentionSpec))
        return kind(self.base * times, layout=self.rng.choice(("", "", "x")))

    def window(self, times: int = 1) -> SlidingWindowSpec:
        """A sliding window from one token to several blocks."""
        size = self.base * times
        tokens = self.rng.choice((1, 2, size, size + 1, 2 * size, 3 * size, 4 * size + 1, 6 * size))
        return SlidingWindowSpec(size, tokens, extra_retained_tokens=self.rng.choice((0, 0, 0, 3)))

    def mamba(self, times: int = 1) -> MambaSpec:
        """States at block boundaries; with and without drafts and export from inside a chunk."""
        return MambaSpec(
            self.base * times,
            num_speculative_blocks=self.rng.choice((0, 0, 0, 1, 2)),
            num_prefill_checkpoint_blocks=1 if self.state_export_alignment else 0,
            prefill_checkpoint_alignment=self.state_export_alignment,
        )

    def chunked(self) -> ChunkedLocalAttentionSpec:
        """Chunks of one to eight blocks."""
        return ChunkedLocalAttentionSpec(self.base, self.base * self.rng.choice((1, 2, 4, 8)))

    def reference_window(self) -> RSWASpec:
        """The prompt and a window."""
        return RSWASpec(self.base, rswa_window=self.rng.choice((1, 2 * self.base, 5 * self.base)))

    def latent_windows(self) -> tuple[SlidingWindowMLASpec, ...]:
        """One that is cached, one that is computed again."""
        return (
            SlidingWindowMLASpec(self.base * self.times, self.rng.choice((self.base, 3 * self.base))),
            SlidingWindowMLASpec(self.base, 2 * self.base, bounded_replay=True),
        )

    def ring(self) -> CircularBufferSpec:
        """Scratch whose size need not fit the others'."""
        return CircularBufferSpec(self.rng.choice((3, 5)))

    def one_or_times(self) -> int:
        """A factor for a group that may be as coarse as the others."""
        return self.rng.choice((1, self.times))


MIXES: tuple[tuple[int, Callable[[GroupMaker], tuple[KVCacheSpec, ...]]], ...] = (
    (2, lambda make: (make.full(),)),
    (2, lambda make: (make.window(),)),
    (1, lambda make: (make.chunked(),)),
    (1, lambda make: (make.mamba(),)),
    (1, lambda make: (make.reference_window(),)),
    (3, lambda make: (make.full(make.rng.choice((1, 2))), make.window(make.rng.choice((1, 2))))),
    (1, lambda make: (make.full(), make.window(make.times), make.window(make.times))),
    (4, lambda make: (make.full(make.one_or_times()), make.mamba(make.one_or_times()))),
    (1, lambda make: (make.full(make.one_or_times()), *[make.mamba(make.times)] * 2)),
    (1, lambda make: (make.window(), make.full(make.times), make.mamba(make.times))),
    (1, lambda make: (make.window(make.times), *[make.full()] * 2, make.full())),
    (1, lambda make: (make.window(), make.mamba(make.times))),
    (1, lambda make: (make.full(), make.chunked())),
    (1, lambda make: (make.ring(), make.full(), make.window())),
    (1, lambda make: (*[make.window(make.times)] * 2, make.window())),
    (1, lambda make: (make.full(), *make.latent_windows())),
    (1, lambda make: (make.full(make.times), make.mamba(make.times), make.ring())),
)
"""Which groups share a pool, each mix with its weight."""


def draw_specs(rng: random.Random, *, caching: bool) -> tuple[KVCacheSpec, ...]:
    """The kinds of one model; without caching also those that cannot be cached."""
    weights, mixes = zip(*MIXES, strict=True)
    specs = rng.choices(mixes, weights)[0](GroupMaker(rng))
    if caching:
        return specs
    if rng.random() < 0.3:
        return MambaSpec(64, "none", num_speculative_blocks=rng.choice((0, 2))), FullAttentionSpec(4)
    return (*specs, CrossAttentionSpec(4)) if rng.random() < 0.5 else specs


def draw_groups(rng: random.Random, specs: tuple[KVCacheSpec, ...], *, use_eagle: bool) -> tuple[KVCacheGroup, ...]:
    """Groups of these kinds; with a draft model sometimes one of them is flagged as its own."""
    flagged = rng.randrange(len(specs)) if use_eagle and rng.random() < 0.4 else None
    return tuple(KVCacheGroup(spec, index == flagged) for index, spec in enumerate(specs))


def draw_retention(rng: random.Random, specs: tuple[KVCacheSpec, ...], scheduler_block_size: int) -> int | None:
    """Where states are kept; an interval only for kinds that can use one."""
    if any(isinstance(spec, SlidingWindowSpec | MambaSpec) for spec in specs):
        return rng.choice((None, 0, 0, scheduler_block_size * rng.choice((1, 2, 3))))
    return rng.choice((None, 0))


def draw_hash_block_size(rng: random.Random, specs: tuple[KVCacheSpec, ...], resolved: int) -> int:
    """What the engine derives, or a divisor of it where hits may end inside a block."""
    has_mamba = any(isinstance(spec, MambaSpec) for spec in specs)
    if len(specs) > 1 and has_mamba and rng.random() < 0.5:
        return rng.choice([size for size in range(1, resolved + 1) if resolved % size == 0])
    return resolved


def draw_setup(rng: random.Random) -> Setup:
    """One configuration; a few are such that ours, or both, refuse them."""
    caching = rng.random() < 0.93
    specs = draw_specs(rng, caching=caching)
    use_eagle = rng.random() < 0.35
    groups = draw_groups(rng, specs, use_eagle=use_eagle)
    splittable = all(spec.is_full_attention or not spec.dcp_sharded for spec in specs)
    ranks = 2 if splittable and rng.random() < 0.15 else 1
    sizes = resolve_block_sizes(groups, dcp_world_size=ranks, hashing=caching)
    lookahead = rng.choice((0, 0, 2, 3)) if use_eagle and sizes.scheduler_block_size >= 4 else 0
    return Setup(
        groups=groups,
        num_blocks=rng.choice((6, 14, 30, 60, 120)),
        scheduler_block_size=sizes.scheduler_block_size,
        hash_block_size=draw_hash_block_size(rng, specs, sizes.hash_block_size) if caching else sizes.hash_block_size,
        max_model_len=rng.choice((LONG_MODEL_TOKENS, SHORT_MODEL_TOKENS)),
        enable_caching=caching,
        max_in_flight_tokens=rng.choice((8192, 8, 20)),
        watermark=rng.choice((0.0, 0.0, 0.1, 0.3)),
        use_eagle=use_eagle,
        num_prefill_lookahead_tokens=lookahead,
        retention_interval=draw_retention(rng, specs, sizes.scheduler_block_size),
        dcp_world_size=ranks,
        mamba_shared_prefix_checkpoint=rng.random() < 0.5,
    )
