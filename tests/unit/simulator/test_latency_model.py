"""How long a step takes."""

import pytest

from kvatlas.simulator import LatencyConfig, LatencyModel

RATES = LatencyConfig(
    prefill_tokens_per_s=1000.0, decode_step_s=0.010, decode_per_request_s=0.001, step_overhead_s=0.002
)


@pytest.mark.parametrize(
    ("prefill_tokens", "decode_requests", "seconds"),
    [(0, 0, 0.002), (500, 0, 0.502), (0, 1, 0.013), (0, 4, 0.016), (500, 4, 0.516)],
)
def test_parts_add_up(prefill_tokens, decode_requests, seconds):
    """Overhead, prefill by tokens, decode by step and by request."""
    assert LatencyModel(RATES).step_s(prefill_tokens, decode_requests) == pytest.approx(seconds)


def test_jitter_is_seeded_and_bounded():
    """The same seed gives the same times, all within the jitter; another seed gives others."""
    config = LatencyConfig(jitter=0.2)
    steady = LatencyModel(LatencyConfig()).step_s(100, 3)
    times, same, other = (LatencyModel(config, seed).step_s(100, 3) for seed in (1, 1, 2))
    assert times == same != other
    model = LatencyModel(config, seed=3)
    assert all(0.8 * steady <= model.step_s(100, 3) <= 1.2 * steady for _ in range(200))


def test_time_scale():
    """Simulated seconds become real ones by the scale."""
    assert LatencyModel(LatencyConfig(time_scale=0.1)).real_s(2.0) == pytest.approx(0.2)
