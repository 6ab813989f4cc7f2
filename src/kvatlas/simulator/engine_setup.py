"""From an engine's configuration to what its parts are built from."""

from kvatlas.errors import ConfigError
from kvatlas.prefix_cache import KVCacheConfig
from kvatlas.prefix_cache.connector import LoadFailurePolicy
from kvatlas.simulator.config import EngineConfig
from kvatlas.simulator.kv_groups import build_groups
from kvatlas.simulator.limits import SchedulerLimits, SchedulingPolicy

__all__ = ["cache_config", "scheduler_limits"]


def cache_config(config: EngineConfig, *, hashes: bool) -> KVCacheConfig:
    """What the KV cache is built from.

    Args:
        config: the engine's.
        hashes: blocks are hashed: prefix caching is on, or a connector stores them.

    Raises:
        ConfigError: groups that cannot work together.
    """
    groups, hash_block_size = build_groups(config, hashes=hashes)
    running_steps = 2 if config.async_scheduling else 1
    kv_config = KVCacheConfig(
        num_blocks=config.num_blocks,
        groups=groups,
        hash_block_size=hash_block_size,
        max_model_len=config.max_model_len,
        enable_caching=config.enable_prefix_caching,
        enable_events=config.events.enabled,
        int_block_hashes=config.events.int_block_hashes,
        max_in_flight_tokens=running_steps * config.max_num_batched_tokens,
        watermark=config.watermark,
        use_eagle=config.speculative.is_eagle,
        retention_interval=config.retention_interval,
    )
    _check_size(kv_config)
    return kv_config


def scheduler_limits(config: EngineConfig, eos_token_id: int | None) -> SchedulerLimits:
    """What the scheduler is bounded by."""
    speculative = config.speculative
    return SchedulerLimits(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        eos_token_id=eos_token_id,
        policy=SchedulingPolicy(config.scheduling_policy),
        async_scheduling=config.async_scheduling,
        num_speculative_tokens=speculative.num_tokens,
        lookahead_tokens=speculative.num_tokens if speculative.is_eagle else 0,
        max_loras=config.max_loras if config.lora_modules else None,
        reserve_full_sequence=config.scheduler_reserve_full_isl,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_tokens=config.long_prefill_token_threshold,
        load_failure_policy=LoadFailurePolicy(config.kv_load_failure_policy),
    )


def _check_size(config: KVCacheConfig) -> None:
    """A request of the largest size must fit alone, or it would wait forever."""
    needed = 1
    for group, block_size in zip(config.groups, config.block_sizes, strict=True):
        whole = -(-config.max_model_len // block_size)
        most = group.spec.max_admission_blocks(config.max_in_flight_tokens, config.max_model_len)
        needed += whole if most is None else min(whole, most)
    if config.num_blocks < needed:
        raise ConfigError(
            f"num_blocks={config.num_blocks} cannot hold one request of max_model_len={config.max_model_len}: its "
            f"groups need {needed} blocks, the null block included; give as many, or a smaller max_model_len"
        )
