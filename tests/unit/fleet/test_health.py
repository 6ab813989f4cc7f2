"""Reading an engine's metrics page."""

from kvatlas.fleet import EngineGauges, MetricsPage, parse_gauges

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 9.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="300",prefix_caching_hash_algo="sha256_cbor"} 1.0
process_cpu_seconds_total 12.5
garbage that is no sample
"""


def test_reads_one_ranks_load_and_block_size() -> None:
    """Only the asked rank's samples count; cache_config_info tells block size and pool."""
    gauges = EngineGauges()
    assert parse_gauges(PAGE, 0, gauges) == 32
    assert (gauges.running_requests, gauges.waiting_requests, gauges.kv_usage, gauges.num_blocks) == (3, 2, 0.25, 300)


def test_old_names_and_missing_labels() -> None:
    """Releases without the engine label and with the gpu_ name of the usage gauge are read too."""
    gauges = EngineGauges()
    page = 'vllm:num_requests_running{model_name="m"} 1.0\nvllm:gpu_cache_usage_perc{model_name="m"} 0.5\n'
    assert parse_gauges(page, 0, gauges) is None
    assert (gauges.running_requests, gauges.kv_usage) == (1, 0.5)


def test_odd_samples_spoil_nothing() -> None:
    """NaN, overflow and text that is no number count as nothing; the rest of the page is read."""
    gauges = EngineGauges(kv_usage=0.9)
    page = (
        'vllm:num_requests_running{engine="0"} NaN\nvllm:num_requests_waiting{engine="0"} 1e400\n'
        'vllm:num_requests_waiting{engine="0"} 1.2.3\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    )
    parse_gauges(page, 0, gauges)
    assert (gauges.running_requests, gauges.waiting_requests, gauges.kv_usage) == (0, 0, 0.5)


def test_samples_of_several_label_sets_are_summed() -> None:
    """Two models on one engine are one engine's load."""
    gauges = EngineGauges()
    parse_gauges(
        'vllm:num_requests_running{model_name="a"} 1.0\nvllm:num_requests_running{model_name="b"} 4.0\n', 0, gauges
    )
    assert gauges.running_requests == 5


def test_one_page_tells_of_all_its_ranks() -> None:
    """Read once; each rank gets its own samples, and those without an engine label as well."""
    page = MetricsPage(PAGE + "process_start_time_seconds 1.7e9\n")
    zero, one = EngineGauges(), EngineGauges()
    assert (page.fill(0, zero), page.fill(1, one)) == (32, None)
    assert (zero.running_requests, one.running_requests) == (3, 9)
    assert (zero.num_blocks, one.num_blocks) == (300, None)
    assert (zero.started_s, one.started_s) == (1.7e9, 1.7e9)
