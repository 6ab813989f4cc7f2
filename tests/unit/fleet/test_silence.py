"""Silence of a stream, judged by the engine's own counters."""

import pytest

from kvatlas.fleet import EngineGauges, SilenceWatch, TrafficCount, parse_gauges

BLOCK = 16


def look(watch: SilenceWatch, now_s: float, tokens: float, ended: float = 0, running: int = 0, batches: int = 3) -> str:
    return watch.look(now_s, batches, TrafficCount(tokens, ended, running), BLOCK)


def test_blocks_computed_without_a_batch_are_suspect_then_silent() -> None:
    """Doubt begins once, at eight blocks; the verdict comes when the patience is over, and stays."""
    watch = SilenceWatch(patience_s=5.0)
    assert look(watch, 0.0, 1_000) == "fine"
    assert look(watch, 2.0, 1_000 + 8 * BLOCK + 15, ended=1) == "suspect"
    assert look(watch, 4.0, 1_000 + 8 * BLOCK + 15, ended=1) == "fine"
    assert look(watch, 7.0, 1_000 + 8 * BLOCK + 15, ended=1) == "silent"
    assert watch.blocks == 8
    assert look(watch, 9.0, 5_000, ended=2) == "silent"


def test_a_batch_ends_the_doubt() -> None:
    """Whatever the stream brings counts, live or by replay; the reckoning starts again from there."""
    watch = SilenceWatch(patience_s=5.0)
    look(watch, 0.0, 0)
    assert look(watch, 2.0, 1_000) == "suspect"
    assert look(watch, 9.0, 2_000, batches=4) == "fine"
    assert look(watch, 99.0, 2_000, batches=4) == "fine"


@pytest.mark.parametrize(
    ("tokens", "ended", "running"),
    [
        (0, 500, 10),  # decoding, or prompts wholly in the cache
        (1_000 * 15, 1_000, 0),  # a thousand prompts below one block
        (1_000 * 15 + 100 * 15, 1_000, 100),  # and a hundred of them still at work
        (7 * BLOCK, 0, 0),  # little enough to be on its way
    ],
)
def test_traffic_that_may_store_nothing_is_no_silence(tokens: float, ended: float, running: int) -> None:
    """Only blocks that must have been filled count: no alarm on decoding, cached or short prompts."""
    watch = SilenceWatch(patience_s=0.0)
    look(watch, 0.0, 0)
    assert look(watch, 10.0, tokens, ended, running) == "fine"
    assert look(watch, 20.0, tokens, ended, running) == "fine"


def test_counters_that_go_back_start_the_reckoning_again() -> None:
    """A restarted engine counts from 0: that is no traffic, nor a negative one."""
    watch = SilenceWatch(patience_s=0.0)
    look(watch, 0.0, 10_000)
    assert look(watch, 2.0, 5) == "fine"
    assert look(watch, 4.0, 5) == "fine"


def test_traffic_is_read_from_new_and_old_releases() -> None:
    """Computed tokens are told as such, or are lookups less hits; other sources do not count, nor other ranks."""
    new = (
        'vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 96.0\n'
        'vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 64.0\n'
        'vllm:prompt_tokens_by_source_total{engine="1",source="local_compute"} 7.0\n'
        'vllm:request_success_total{engine="0",finished_reason="stop"} 2.0\n'
        'vllm:request_success_total{engine="0",finished_reason="length"} 1.0\n'
        'vllm:num_requests_running{engine="0"} 4.0\n'
        "process_start_time_seconds 1.7e9\n"
    )
    old = (
        'vllm:prefix_cache_queries_total{engine="0"} 160.0\nvllm:prefix_cache_hits_total{engine="0"} 64.0\n'
        'vllm:request_success_total{engine="0"} 3.0\n'
    )
    gauges = EngineGauges()
    parse_gauges(new, 0, gauges)
    assert gauges.traffic == TrafficCount(96.0, 3.0, 4)
    assert gauges.started_s == 1.7e9
    parse_gauges(old, 0, gauges)
    assert gauges.traffic == TrafficCount(96.0, 3.0, 0)
    assert gauges.started_s is None


@pytest.mark.parametrize(
    "page",
    [
        'vllm:num_requests_running{engine="0"} 4.0\n',
        'vllm:request_success_total{engine="0"} 3.0\n',
        'vllm:prompt_tokens_by_source_total{source="local_compute"} 9.0\nvllm:request_success_total 3.0\n'
        'vllm:cache_config_info{block_size="16",enable_prefix_caching="False"} 1.0\n',
    ],
)
def test_no_judgement_without_the_counters_or_without_a_prefix_cache(page: str) -> None:
    """An engine that tells too little, or caches no prefixes, is never called silent."""
    gauges = EngineGauges()
    parse_gauges(page, 0, gauges)
    assert gauges.traffic is None
