"""What a simulated engine is told at start: one frozen value that travels to the engine's process as JSON.

The defaults are vLLM's where vLLM has one (block size, hash algorithm, event buffer), and otherwise a mid-size
model on one data-centre GPU. Nothing here reads files or the environment.
"""

from typing import Literal

import msgspec

from kvatlas.errors import ConfigError
from kvatlas.simulator.fault_specs import parse_fault

__all__ = [
    "ConnectorConfig",
    "EngineConfig",
    "EventsConfig",
    "GroupConfig",
    "LatencyConfig",
    "SpeculativeConfig",
    "config_for_engine",
]

_MAX_PORT = 65_535
_AT_LEAST_ONE = (
    *("block_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "mean_output_tokens"),
    *("data_parallel_size", "max_loras"),
)


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


class GroupConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One KV cache group of a model that has several kinds of layers.

    Args:
        kind: of its layers.
        block_size: tokens in a block, None = the engine's `block_size`.
        window: tokens a sliding window attends to, or tokens in a chunk of chunked local attention.
        is_eagle: a draft model reads this group.
    """

    kind: Literal["full_attention", "mla_attention", "sliding_window", "chunked_local_attention", "mamba"]
    block_size: int | None = None
    window: int | None = None
    is_eagle: bool = False

    def __post_init__(self) -> None:
        if self.kind in {"sliding_window", "chunked_local_attention"} and not self.window:
            raise ConfigError(f"a group of kind {self.kind} needs its window in tokens, none was given")


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding.

    Args:
        num_tokens: drafts checked in each decode step, 0 = none.
        method: "ngram" guesses from the text; "eagle" is a draft model with KV of its own: it needs slots ahead, and
            gives the last hit block up to compute its hidden states again.
        acceptance_rate: chance of each draft to be right, given that those before it were.
    """

    num_tokens: int = 0
    method: Literal["ngram", "eagle"] = "ngram"
    acceptance_rate: float = 0.7

    def __post_init__(self) -> None:
        if self.num_tokens < 0:
            raise ConfigError(f"speculative.num_tokens cannot be negative, {self.num_tokens} was given")
        if not 0 <= self.acceptance_rate <= 1:
            raise ConfigError(f"speculative.acceptance_rate is a chance, 0 to 1; {self.acceptance_rate} was given")

    @property
    def is_eagle(self) -> bool:
        """Whether a draft model reads the KV cache."""
        return self.num_tokens > 0 and self.method == "eagle"


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV outside the device.

    Args:
        kind: "host" memory, "disk", or "tiered": host memory before disk.
        host_blocks: blocks kept in host memory.
        directory: where files are kept; engines that share it share them. Required unless kind is "host".
        disk_bytes: bound on the sum of their sizes.
        async_loads: load while the request waits; False = within the step that admits it.
        store_when: blocks are written when their request is "finished", or as soon as they are "filled".
        block_bytes: size of a block on the links.
        payload_bytes: bytes really kept of it.
        load_bytes_per_s, store_bytes_per_s: speed of the links in simulated time, None = transfers take no time.
        self_describing_events: stores carry tokens and parents (vLLM: off unless asked for).
    """

    kind: Literal["host", "disk", "tiered"] = "host"
    host_blocks: int = 65_536
    directory: str | None = None
    disk_bytes: int = 2**30
    async_loads: bool = True
    store_when: Literal["finished", "filled"] = "filled"
    block_bytes: int = 2**21
    payload_bytes: int = 256
    load_bytes_per_s: float | None = 2e10
    store_bytes_per_s: float | None = 2e10
    self_describing_events: bool = False


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One simulated engine.

    Args:
        model: the name clients ask for.
        tokenizer: a folder with `tokenizer.json`, or a hub name; None makes a tiny one on the spot.
        block_size: tokens per KV-cache block.
        num_blocks: blocks in the pool, the null block included (>= 2).
        groups: kinds of layers; empty = full attention only. They share the pool.
        retention_interval: where windows and states are kept for others: 0 = where a prompt can be resumed, n = also
            every n tokens, None = everywhere (`prefix_cache_retention_interval`).
        prefix_match_unit: tokens in a hashed block, None = worked out from the groups.
        max_model_len: most tokens, prompt and output, of one request.
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: most requests running at once.
        async_scheduling: plan the next step before the running one's tokens are known (vLLM: on where supported).
        scheduling_policy: "fcfs", or "priority": lower `priority` of a request first.
        watermark: fraction of the pool kept free when a request joins others.
        scheduler_reserve_full_isl: start a prompt only when all of it would fit.
        enable_chunked_prefill: cut prompts longer than what is left of a step's budget.
        long_prefill_token_threshold: most prompt tokens of one request in a step it shares, 0 = no bound.
        speculative: drafts checked while decoding.
        lora_modules: adapter name -> path; clients name the adapter as their model. `max_loras`: different ones a step.
        max_num_queued_reqs, max_num_queued_tokens: requests beyond as many unfinished requests, or prompt tokens not
            prefilled yet, over all ranks, get 503; None = no bound.
        connector: KV outside the device, None = there is none.
        kv_load_failure_policy: "fail" or "recompute": what becomes of requests whose external KV did not arrive.
        data_parallel_size: engines in this process behind one port, each with its cache and event stream.
        enable_prefix_caching: False makes every prompt a cold one.
        hash_algo: one of vLLM's four; `hash_seed`: the value of PYTHONHASHSEED, None = unset.
        seed: fixes the replies. Engines of one fleet share it, so that the same prompt gets the same reply anywhere.
        engine_index: fixes this engine's jitter; not visible to clients.
        mean_output_tokens: replies end by themselves after half to one and a half times as many tokens.
        enable_prompt_tokens_details: report `usage.prompt_tokens_details.cached_tokens` (vLLM: off unless asked for).
        enable_request_id_headers: echo `X-Request-Id` (vLLM: off unless asked for).
        dev_mode: serve `/reset_prefix_cache` (vLLM: VLLM_SERVER_DEV_MODE=1).
        host, port: where HTTP listens; port 0 takes a free one.
        faults: what goes wrong, as specs (see `parse_fault`); their times count from when the engine serves.

    Raises:
        ConfigError: a value that cannot work, with the bound it breaks.
    """

    model: str = "kvatlas-sim"
    tokenizer: str | None = None
    block_size: int = 16
    num_blocks: int = 4096
    groups: tuple[GroupConfig, ...] = ()
    retention_interval: int | None = 0
    prefix_match_unit: int | None = None
    max_model_len: int = 16_384
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    async_scheduling: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    speculative: SpeculativeConfig = SpeculativeConfig()
    lora_modules: dict[str, str] = {}
    max_loras: int = 1
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    connector: ConnectorConfig | None = None
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    data_parallel_size: int = 1
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
    faults: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, {getattr(self, name)} was given")
        for name in ("max_num_queued_reqs", "max_num_queued_tokens", "long_prefill_token_threshold"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name} cannot be negative, {getattr(self, name)} was given")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is a fraction of the pool, 0 <= watermark < 1; {self.watermark} was given")
        if self.model in self.lora_modules:
            raise ConfigError(f"the adapter {self.model!r} has the model's own name: clients could not tell them apart")
        if not self.model:
            raise ConfigError("model is the name clients ask for and cannot be empty")
        if not 0 <= self.port <= _MAX_PORT:
            raise ConfigError(f"port must be 0 (any free one) to {_MAX_PORT}, {self.port} was given")
        for text in self.faults:
            rank = getattr(parse_fault(text), "rank", None) or 0
            if rank >= self.data_parallel_size:
                raise ConfigError(
                    f"fault {text!r} is of rank {rank}: ranks are 0 to {self.data_parallel_size - 1} with "
                    f"data_parallel_size={self.data_parallel_size}"
                )
        usable_tokens = (self.num_blocks - 1) * self.block_size
        if not self.groups and usable_tokens < self.max_model_len:
            needed = -(-self.max_model_len // self.block_size) + 1
            raise ConfigError(
                f"num_blocks={self.num_blocks} of {self.block_size} tokens hold {usable_tokens} tokens (one is the "
                f"null block), fewer than a request of max_model_len={self.max_model_len}: give num_blocks >= {needed} "
                "or a smaller max_model_len"
            )


def config_for_engine(config: EngineConfig, index: int) -> EngineConfig:
    """Return engine `index`'s own configuration: fixed ports move up, port 0 stays any free port.

    The HTTP port moves by `index`, the event ports by `index` times the number of ranks: each rank of an engine has its
    own, counted up from the engine's.
    """
    events = config.events
    replay = events.replay_endpoint
    shift = index * config.data_parallel_size
    return msgspec.structs.replace(
        config,
        engine_index=index,
        port=config.port and config.port + index,
        events=msgspec.structs.replace(
            events,
            endpoint=_shift_port(events.endpoint, shift),
            replay_endpoint=None if replay is None else _shift_port(replay, shift),
        ),
    )


def _shift_port(endpoint: str, offset: int) -> str:
    head, colon, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal() or port == "0":
        return endpoint
    return f"{head}{colon}{int(port) + offset}"
