"""What a simulated engine is told at start: one frozen value that travels to the engine's process as JSON.

The defaults are vLLM's where vLLM has one (block size, hash algorithm, event buffer), and otherwise a mid-size
model on one data-centre GPU. Nothing here reads files or the environment.
"""

import msgspec

from kvatlas.errors import ConfigError

__all__ = ["EngineConfig", "EventsConfig", "LatencyConfig", "config_for_engine"]

_MAX_PORT = 65_535


class LatencyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers behind the time of a step. All times are in simulated seconds.

    Args:
        prefill_tokens_per_s: prompt tokens one engine computes in a second (> 0).
        decode_step_s: time of one decode step, whatever the batch (reading the weights).
        decode_per_request_s: time each decoding request adds to its step (reading its KV cache).
        step_overhead_s: time of every step that is neither (scheduling, sampling, launch).
        jitter: each step's time is multiplied by a seeded factor in 1 +- jitter (0 <= jitter < 1).
        time_scale: real seconds per simulated second; 0.1 runs ten times as fast, 0 does not wait at all.
    """

    prefill_tokens_per_s: float = 16_000.0
    decode_step_s: float = 0.008
    decode_per_request_s: float = 0.000_1
    step_overhead_s: float = 0.002
    jitter: float = 0.0
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.prefill_tokens_per_s <= 0:
            raise ConfigError(f"prefill_tokens_per_s must be above 0, {self.prefill_tokens_per_s} was given")
        if not 0 <= self.jitter < 1:
            raise ConfigError(f"jitter is a fraction of a step's time, 0 <= jitter < 1; {self.jitter} was given")
        for name in ("decode_step_s", "decode_per_request_s", "step_overhead_s", "time_scale"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} cannot be negative, {getattr(self, name)} was given")


class EventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where KV events go. The names and defaults of the numbers are those of vLLM's `--kv-events-config`.

    The endpoints default to a free port on loopback; `/kv_event_sources` tells which ones they became.
    """

    enabled: bool = True
    endpoint: str = "tcp://127.0.0.1:0"
    replay_endpoint: str | None = "tcp://127.0.0.1:0"
    topic: str = "kv-events"
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    int_block_hashes: bool = True


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One simulated engine.

    Args:
        model: the name clients ask for.
        tokenizer: a folder with `tokenizer.json`, or a hub name; None makes a tiny one on the spot.
        block_size: tokens per KV-cache block.
        num_blocks: blocks in the pool, the null block included (>= 2).
        max_model_len: most tokens, prompt and output, of one request.
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: most requests running at once.
        enable_prefix_caching: False makes every prompt a cold one.
        hash_algo: one of vLLM's four; `hash_seed`: the value of PYTHONHASHSEED, None = unset.
        seed: fixes the replies. Engines of one fleet share it, so that the same prompt gets the same reply anywhere.
        engine_index: fixes this engine's jitter; not visible to clients.
        mean_output_tokens: replies end by themselves after half to one and a half times as many tokens.
        enable_prompt_tokens_details: report `usage.prompt_tokens_details.cached_tokens` (vLLM: off unless asked for).
        enable_request_id_headers: echo `X-Request-Id` (vLLM: off unless asked for).
        dev_mode: serve `/reset_prefix_cache` (vLLM: VLLM_SERVER_DEV_MODE=1).
        host, port: where HTTP listens; port 0 takes a free one.

    Raises:
        ConfigError: a value that cannot work, with the bound it breaks.
    """

    model: str = "kvatlas-sim"
    tokenizer: str | None = None
    block_size: int = 16
    num_blocks: int = 4096
    max_model_len: int = 16_384
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    enable_prefix_caching: bool = True
    hash_algo: str = "sha256"
    hash_seed: str | None = None
    seed: int = 0
    engine_index: int = 0
    mean_output_tokens: int = 128
    enable_prompt_tokens_details: bool = True
    enable_request_id_headers: bool = False
    enable_server_load_tracking: bool = True
    dev_mode: bool = True
    host: str = "127.0.0.1"
    port: int = 0
    events: EventsConfig = EventsConfig()
    latency: LatencyConfig = LatencyConfig()

    def __post_init__(self) -> None:
        for name in ("block_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "mean_output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, {getattr(self, name)} was given")
        if not self.model:
            raise ConfigError("model is the name clients ask for and cannot be empty")
        if not 0 <= self.port <= _MAX_PORT:
            raise ConfigError(f"port must be 0 (any free one) to {_MAX_PORT}, {self.port} was given")
        usable_tokens = (self.num_blocks - 1) * self.block_size
        if usable_tokens < self.max_model_len:
            needed = -(-self.max_model_len // self.block_size) + 1
            raise ConfigError(
                f"num_blocks={self.num_blocks} of {self.block_size} tokens hold {usable_tokens} tokens (one is the "
                f"null block), fewer than a request of max_model_len={self.max_model_len}: give num_blocks >= {needed} "
                "or a smaller max_model_len"
            )


def config_for_engine(config: EngineConfig, index: int) -> EngineConfig:
    """Return engine `index`'s own configuration: every fixed port moves up by `index`, port 0 stays any free port."""
    events = config.events
    replay = events.replay_endpoint
    return msgspec.structs.replace(
        config,
        engine_index=index,
        port=config.port and config.port + index,
        events=msgspec.structs.replace(
            events,
            endpoint=_shift_port(events.endpoint, index),
            replay_endpoint=None if replay is None else _shift_port(replay, index),
        ),
    )


def _shift_port(endpoint: str, offset: int) -> str:
    head, colon, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal() or port == "0":
        return endpoint
    return f"{head}{colon}{int(port) + offset}"
