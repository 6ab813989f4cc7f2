"""The `/metrics` of a simulated engine: the vLLM series a router or a dashboard reads, under vLLM's names and labels.

Gauges are read from the scheduler when scraped. Counters move when a step's output is processed, as in the engine.
Source: vLLM 0.32.0, v1/metrics/loggers.py.
"""

import enum

from prometheus_client import Counter, Gauge, Histogram

from kvatlas.prefix_cache.connector import CACHE_HIT_SOURCES
from kvatlas.simulator.config import EngineConfig
from kvatlas.simulator.metrics_page import MetricsPage
from kvatlas.simulator.request import EngineRequest
from kvatlas.simulator.sampling import FinishReason
from kvatlas.simulator.scheduler import Scheduler
from kvatlas.simulator.step import CacheStats, RequestOutput, StepPlan, StepResult

__all__ = ["EngineMetrics", "SleepState"]

_REQUEST_BUCKETS_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_TOKEN_GAP_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


class SleepState(enum.Enum):
    """How deep an engine sleeps; the values of the label `sleep_state`."""

    AWAKE = "awake"
    WEIGHTS_OFFLOADED = "weights_offloaded"
    DISCARD_ALL = "discard_all"


class EngineMetrics:
    """One engine's series.

    Args:
        config: gives the labels and `vllm:cache_config_info`.
        scheduler: read for the gauges.
        page: where they appear, together with those of other engines behind the same port; None = a page of its own.
        rank: the label `engine`.
    """

    def __init__(
        self, config: EngineConfig, scheduler: Scheduler, page: MetricsPage | None = None, rank: int = 0
    ) -> None:
        self._page = page or MetricsPage(config)
        self._rank = rank
        self._make_gauges(config, scheduler)
        self._make_counters()
        self._make_histograms(config.max_model_len)

    def exposition(self) -> bytes:
        """The whole page in Prometheus text format 0.0.4."""
        return self._page.exposition()

    def on_step(self, plan: StepPlan, result: StepResult, stats: CacheStats, now_s: float) -> None:
        """Count one processed step."""
        self._on_lookups(stats)
        self._preemptions.inc(stats.preemptions)
        if plan.scheduled:
            self._iteration_tokens.observe(plan.num_tokens)
        for request in plan.admitted:
            self._queue_s.observe((request.admitted_s or request.arrival_s) - request.arrival_s)
        for share in plan.scheduled:
            self._drafts.inc(share.num_drafts)
        for output in result.outputs:
            self._generated_tokens.inc(len(output.token_ids))
            if output.token_ids:
                self._on_output(output, now_s)
        for request in result.finished:
            self.on_finished(request, now_s)

    def _on_lookups(self, stats: CacheStats) -> None:
        self._queries.inc(stats.local.queries)
        self._hits.inc(stats.local.hits)
        self._cached_by["device"].inc(stats.local.hits)
        self._external_queries.inc(stats.external.queries)
        self._external_hits.inc(stats.external.hits)
        for source, tokens in stats.external.hits_by_source.items():
            self._cached_by[source].inc(tokens)

    def on_finished(self, request: EngineRequest, now_s: float) -> None:
        """Count the end of a request, by itself or aborted."""
        reason = request.finish_reason or FinishReason.ABORT
        self._successes[reason].inc()
        self._request_s.observe(now_s - request.arrival_s)
        num_output = request.request.num_output_tokens
        self._prompt_lengths.observe(request.request.num_prompt_tokens)
        self._output_lengths.observe(num_output)
        self._max_tokens.observe(request.params.max_tokens)
        self._request_preemptions.observe(request.request.num_preemptions)
        if request.admitted_s is None or request.first_token_s is None or request.last_token_s is None:
            return
        self._computed_lengths.observe(request.request.num_prompt_tokens - (request.cached_tokens or 0))
        decode_s = request.last_token_s - request.first_token_s
        self._inference_s.observe(request.last_token_s - request.admitted_s)
        self._prefill_s.observe(request.first_token_s - request.admitted_s)
        self._decode_s.observe(decode_s)
        if num_output > 1:
            self._per_token_s.observe(decode_s / (num_output - 1))

    def set_sleep_state(self, state: SleepState) -> None:
        """Show whether the engine sleeps, and how deep."""
        for name, gauge in self._sleep_states.items():
            gauge.set(name == state.value)

    def _on_output(self, output: RequestOutput, now_s: float) -> None:
        request = output.request
        self._accepted_drafts.inc(len(output.token_ids) - 1)
        if request.previous_token_s is not None:
            self._gap_s.observe(now_s - request.previous_token_s)
            return
        self._first_token_s.observe(now_s - request.arrival_s)
        prompt_tokens = request.request.num_prompt_tokens
        cached_tokens = request.cached_tokens or 0
        self._prompt_tokens.inc(prompt_tokens)
        self._prompt_by["local_compute"].inc(prompt_tokens - cached_tokens)
        self._prompt_by["local_cache_hit"].inc(cached_tokens - request.external_tokens)
        self._prompt_by["external_kv_transfer"].inc(request.external_tokens)
        self._prompt_cached.inc(cached_tokens)

    def _gauge(self, name: str, help_text: str, **labels: str) -> Gauge:
        return self._page.gauge(name, help_text, self._rank, **labels)

    def _counter(self, name: str, help_text: str, **labels: str) -> Counter:
        return self._page.counter(name, help_text, self._rank, **labels)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._page.histogram(name, help_text, self._rank, buckets)

    def _make_gauges(self, config: EngineConfig, scheduler: Scheduler) -> None:
        gauge = self._gauge
        gauge("vllm:num_requests_running", "Requests being computed.").set_function(lambda: scheduler.num_running)
        gauge("vllm:num_requests_waiting", "Requests waiting to be computed.").set_function(
            lambda: scheduler.num_waiting
        )
        gauge("vllm:kv_cache_usage_perc", "KV-cache usage; 1 means 100 percent.").set_function(lambda: scheduler.usage)
        by_reason = "vllm:num_requests_waiting_by_reason"
        gauge(by_reason, "Waiting requests.", reason="capacity").set_function(
            lambda: scheduler.num_waiting - scheduler.num_deferred
        )
        gauge(by_reason, "Waiting requests.", reason="deferred").set_function(lambda: scheduler.num_deferred)
        self._sleep_states = {
            state.value: gauge("vllm:engine_sleep_state", "Sleep state.", sleep_state=state.value)
            for state in SleepState
        }
        self.set_sleep_state(SleepState.AWAKE)
        if config.lora_modules:
            self._page.watch_loras(scheduler)
        self._page.info("vllm:cache_config_info", "Cache configuration.", _cache_config_labels(config, self._rank))

    def _make_counters(self) -> None:
        counter = self._counter
        self._queries = counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._hits = counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.")
        self._external_queries = counter("vllm:external_prefix_cache_queries", "Tokens looked up in external caches.")
        self._external_hits = counter("vllm:external_prefix_cache_hits", "Tokens found in external caches.")
        self._preemptions = counter("vllm:num_preemptions", "Preemptions.")
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of finished prefills.")
        self._prompt_by = {
            source: counter("vllm:prompt_tokens_by_source", "Prompt tokens by where their KV came from.", source=source)
            for source in _PROMPT_SOURCES
        }
        self._prompt_cached = counter("vllm:prompt_tokens_cached", "Prompt tokens found in any cache.")
        self._cached_by = {
            source: counter("vllm:prompt_tokens_cached_by_source", "Prompt tokens found, by cache.", source=source)
            for source in CACHE_HIT_SOURCES
        }
        self._generated_tokens = counter("vllm:generation_tokens", "Output tokens.")
        self._drafts = counter("vllm:spec_decode_num_draft_tokens", "Draft tokens checked.")
        self._accepted_drafts = counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were right.")
        for reason in _FINISH_REASONS:
            counter("vllm:request_success", "Ended requests.", finished_reason=reason)
        self._successes = {
            reason: counter("vllm:request_success", "Ended requests.", finished_reason=reason.value)
            for reason in FinishReason
        }

    def _make_histograms(self, max_model_len: int) -> None:
        tokens = _one_two_five(max_model_len)
        seconds = _REQUEST_BUCKETS_S
        self._iteration_tokens = self._histogram(
            "vllm:iteration_tokens_total",
            "Tokens per step.",
            (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
        )
        self._prompt_lengths = self._histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", tokens)
        self._output_lengths = self._histogram("vllm:request_generation_tokens", "Output tokens per request.", tokens)
        self._max_tokens = self._histogram("vllm:request_params_max_tokens", "max_tokens per request.", tokens)
        self._computed_lengths = self._histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens computed per request.", tokens
        )
        self._request_preemptions = self._histogram(
            "vllm:request_num_preemptions", "Preemptions per request.", (0, 1, 2, 5, 10, 20, 50, 100)
        )
        self._first_token_s = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_BUCKETS_S
        )
        self._gap_s = self._histogram("vllm:inter_token_latency_seconds", "Token to token.", _TOKEN_GAP_BUCKETS_S)
        self._per_token_s = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per output token.", _TOKEN_GAP_BUCKETS_S
        )
        self._request_s = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", seconds)
        self._queue_s = self._histogram("vllm:request_queue_time_seconds", "Arrival to admission.", seconds)
        self._inference_s = self._histogram("vllm:request_inference_time_seconds", "Admission to last token.", seconds)
        self._prefill_s = self._histogram("vllm:request_prefill_time_seconds", "Admission to first token.", seconds)
        self._decode_s = self._histogram("vllm:request_decode_time_seconds", "First to last token.", seconds)


def _cache_config_labels(config: EngineConfig, rank: int) -> dict[str, str]:
    """The labels of `vllm:cache_config_info` that say something here, in the words of vLLM's CacheConfig."""
    return {
        "block_size": str(config.block_size),
        "cache_dtype": "auto",
        "cache_hit_alignment_tokens": "None",
        "effective_attention_block_size": str(config.block_size),
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "engine": str(rank),
        "hash_block_size": "None",
        "kv_cache_size_tokens": str(config.num_blocks * config.block_size),
        "mamba_cache_mode": "none",
        "num_gpu_blocks": str(config.num_blocks * config.data_parallel_size),
        "num_gpu_blocks_override": str(config.num_blocks),
        "prefix_cache_retention_interval": "0",
        "prefix_caching_hash_algo": config.hash_algo,
        "prefix_match_unit": "None",
        "sliding_window": "None",
    }


def _one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, ... up to `most`."""
    buckets: list[float] = []
    decade = 1
    while decade <= most:
        buckets.extend(decade * step for step in (1, 2, 5) if decade * step <= most)
        decade *= 10
    return tuple(buckets)
