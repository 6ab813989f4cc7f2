"""A whole simulated engine: core, loop, event publisher and HTTP server, put together and taken down in order."""

import contextlib
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from aiohttp import web

from kvatlas.clock import Clock, SystemClock
from kvatlas.errors import ConfigError
from kvatlas.fleet import describe_failure
from kvatlas.prefix_cache.connector import KVConnector
from kvatlas.rendering import LocalRenderer, write_tiny_model
from kvatlas.simulator.address import EngineAddress
from kvatlas.simulator.config import EngineConfig
from kvatlas.simulator.core import EngineCore
from kvatlas.simulator.engine import SimulatedEngine
from kvatlas.simulator.metrics import EngineMetrics
from kvatlas.simulator.metrics_page import MetricsPage
from kvatlas.simulator.ranks import EngineRanks
from kvatlas.simulator.replies import ReplySampler
from kvatlas.simulator.server import EngineApi
from kvatlas.simulator.vocabulary import ReplyVocabulary
from kvatlas.stream import PublisherConfig, ZmqEventPublisher

__all__ = ["ServedEngine"]

_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "</s>", "<|endoftext|>")
_CLOSE_GRACE_S = 1.0


class ServedEngine:
    """One engine in this process, on the running event loop. An async context manager.

    Args:
        config: sizes, rates, endpoints.
        clock: the time of steps, metrics and event batches.
    """

    def __init__(self, config: EngineConfig, *, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._cleanup = contextlib.AsyncExitStack()
        self.ranks: EngineRanks | None = None
        self.address: EngineAddress | None = None

    async def start(self) -> EngineAddress:
        """Load the tokenizer, bind the ports and begin to serve. Returns where.

        Raises:
            ConfigError: the tokenizer is missing, or a port cannot be bound.
        """
        try:
            self.address = await self._start()
        except BaseException:
            await self._cleanup.aclose()
            raise
        return self.address

    async def close(self) -> None:
        """Stop serving: open requests are dropped, ports are released."""
        await self._cleanup.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _start(self) -> EngineAddress:
        config = self._config
        renderer = self._load_renderer()
        self._cleanup.callback(renderer.close)
        vocabulary = ReplyVocabulary.find(
            range(renderer.tokenizer.vocab_size),
            renderer.detokenize,
            lambda text: renderer.tokenize(text, add_special_tokens=False),
        )
        end_ids = (renderer.tokenizer.token_id(text) for text in _END_TOKENS)
        sampler = ReplySampler(
            tuple(vocabulary.texts),
            eos_token_id=next((token_id for token_id in end_ids if token_id is not None), None),
            mean_tokens=config.mean_output_tokens,
            seed=config.seed,
        )
        page = MetricsPage(config)
        publishers = [self._open_publisher(rank) for rank in range(config.data_parallel_size)]
        engines = []
        all_metrics = []
        for rank, publisher in enumerate(publishers):
            core = EngineCore(config, sampler, connector=self._make_connector(), rank=rank)
            metrics = EngineMetrics(config, core.scheduler, page, rank)
            engine = SimulatedEngine(core, metrics, publisher=publisher, clock=self._clock)
            engine.start()
            self._cleanup.push_async_callback(engine.close)
            engines.append(engine)
            all_metrics.append(metrics)
        self.ranks = EngineRanks(config, engines, all_metrics, page)
        api = EngineApi(config, self.ranks, page, renderer, vocabulary, self._clock)
        for rank, publisher in enumerate(publishers):
            if publisher is not None:
                api.announce_events(rank, publisher.endpoint, publisher.replay_endpoint)
        port = await self._listen(api.application())
        first = publishers[0]
        return EngineAddress(
            pid=os.getpid(),
            host=config.host,
            port=port,
            events_endpoint=None if first is None else first.endpoint,
            replay_endpoint=None if first is None else first.replay_endpoint,
            rank_endpoints=tuple(
                (publisher.endpoint, publisher.replay_endpoint) for publisher in publishers if publisher is not None
            ),
        )

    def _make_connector(self) -> KVConnector | None:
        if self._config.connector is None:
            return None
        from kvatlas.simulator.kv_connector import build_connector  # noqa: PLC0415 - most engines start without it

        return build_connector(self._config, self._clock)

    def _load_renderer(self) -> LocalRenderer:
        if self._config.tokenizer is not None:
            return LocalRenderer.load(self._config.tokenizer, clock=self._clock)
        with tempfile.TemporaryDirectory(prefix="kvatlas-sim-") as directory:
            return LocalRenderer.load(write_tiny_model(Path(directory)), clock=self._clock)

    def _open_publisher(self, rank: int) -> ZmqEventPublisher | None:
        events = self._config.events
        if not events.enabled:
            return None
        publisher = ZmqEventPublisher(
            PublisherConfig(
                endpoint=events.endpoint,
                replay_endpoint=events.replay_endpoint,
                buffer_steps=events.buffer_steps,
                hwm=events.hwm,
                max_queue_size=events.max_queue_size,
                topic=events.topic,
                bind=True,
            ),
            data_parallel_rank=rank,
        )
        self._cleanup.callback(publisher.close)
        return publisher

    async def _listen(self, app: web.Application) -> int:
        # handler_cancellation: a client that hangs up cancels its handler, and that drops its requests.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_CLOSE_GRACE_S)
        await runner.setup()
        self._cleanup.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, self._config.host, self._config.port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._config.host}:{self._config.port}: {describe_failure(error)}; choose another "
                "port, or 0"
            ) from None
        return int(runner.addresses[0][1])
