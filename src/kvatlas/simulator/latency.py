"""How long a step takes: the simulator's only model of the GPU.

A step that prefills p tokens and decodes r requests takes `overhead + p / rate + (base + r * each if r else 0)`.
Prefill is bound by arithmetic, hence by tokens; decode by memory: the weights once per step, each request's cache
once per request. A cached prefix is not prefilled, so it costs nothing: that is the whole case for routing by
prefix.
"""

import random

from kvatlas.simulator.config import LatencyConfig

__all__ = ["LatencyModel"]


class LatencyModel:
    """Turns the content of a step into its time, with seeded jitter.

    Args:
        config: the rates.
        seed: two models with the same seed give the same times for the same steps.
    """

    __slots__ = ("_config", "_random")

    def __init__(self, config: LatencyConfig, seed: int = 0) -> None:
        self._config = config
        self._random = random.Random(seed)

    def step_s(self, prefill_tokens: int, decode_requests: int) -> float:
        """Time of one step in simulated seconds."""
        config = self._config
        seconds = config.step_overhead_s + prefill_tokens / config.prefill_tokens_per_s
        if decode_requests:
            seconds += config.decode_step_s + decode_requests * config.decode_per_request_s
        if config.jitter:
            seconds *= 1.0 + config.jitter * (2.0 * self._random.random() - 1.0)
        return seconds

    def real_s(self, simulated_s: float) -> float:
        """Real seconds to wait for `simulated_s` simulated ones."""
        return simulated_s * self._config.time_scale
