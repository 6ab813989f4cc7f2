"""A whole simulated engine: its lives, event publishers and HTTP server, put together and taken down in order."""

import asyncio
import contextlib
import logging
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvatlas.clock import Clock, SystemClock
from kvatlas.errors import ConfigError
from kvatlas.rendering import LocalRenderer, write_tiny_model
from kvatlas.simulator.address import EngineAddress
from kvatlas.simulator.config import EngineConfig
from kvatlas.simulator.engine_life import EngineLife, EngineParts, hold_port
from kvatlas.simulator.fault_kinds import Crash, Restart
from kvatlas.simulator.fault_plan import FaultPlan
from kvatlas.simulator.fault_specs import parse_faults
from kvatlas.simulator.fault_supervisor import EngineClock, FaultSupervisor
from kvatlas.simulator.faulty_stream import FaultyStream
from kvatlas.simulator.ranks import EngineRanks
from kvatlas.simulator.replies import ReplySampler
from kvatlas.simulator.vocabulary import ReplyVocabulary
from kvatlas.stream import PublisherConfig, ZmqEventPublisher

__all__ = ["ServedEngine"]

_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "</s>", "<|endoftext|>")
_HOLD_RETRY_S = 0.02
_MOST_HOLD_TRIES = 250

_log = logging.getLogger(__name__)


class ServedEngine:
    """One engine in this process, on the running event loop. An async context manager.

    Args:
        config: sizes, rates, endpoints, faults.
        clock: the time of steps, metrics and event batches.
    """

    def __init__(self, config: EngineConfig, *, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._cleanup = contextlib.AsyncExitStack()
        self._life: EngineLife | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.address: EngineAddress | None = None

    @property
    def ranks(self) -> EngineRanks | None:
        """The engines of the present life; None before `start` and between two lives."""
        return None if self._life is None else self._life.ranks

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
        plan = FaultPlan(parse_faults(config.faults), clock=self._clock, seed=config.seed, engine=config.engine_index)
        ranks = range(config.data_parallel_size if config.events.enabled else 0)
        streams = [FaultyStream(plan, rank=rank, buffer_steps=config.events.buffer_steps) for rank in ranks]
        publishers = [self._open_publisher(stream, rank) for rank, stream in enumerate(streams)]
        self._faults = FaultSupervisor(plan, streams, publishers, self._change_life)
        self._parts = self._make_parts(renderer, publishers)
        self._started_s = plan.wall_s()
        self._port = config.port
        self._cleanup.push_async_callback(self._end)
        self._life = self._new_life()
        slow = plan.slow_start()
        if slow is not None and slow.mode == "refused":
            held = hold_port(config.host, config.port)
            self._port = int(held.getsockname()[1])
        else:
            held = None
            await self._open(None)
        self._watcher = asyncio.get_running_loop().create_task(self._watch(held), name="simulated-faults")
        endpoints = tuple((publisher.endpoint, publisher.replay_endpoint) for publisher in publishers)
        return EngineAddress(
            pid=os.getpid(),
            host=config.host,
            port=self._port,
            events_endpoint=endpoints[0][0] if endpoints else None,
            replay_endpoint=endpoints[0][1] if endpoints else None,
            rank_endpoints=endpoints,
        )

    async def _watch(self, held: socket.socket | None) -> None:
        """Open the port that is held at first, then look after the faults."""
        try:
            if held is not None:
                await self._open(held)
            await self._faults.run()
        except ConfigError as error:
            _log.error("the engine does not serve any more: %s", error.message)

    async def _end(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        if self._life is not None:
            await self._life.close()

    def _new_life(self) -> EngineLife:
        life = EngineLife(self._parts, self._started_s)
        if self._config.dev_mode or self._config.faults:
            self._faults.watch(life.application)
        return life

    async def _open(self, held: socket.socket | None) -> None:
        """Serve the present life, after its slow start. `held` keeps the port until then."""
        with held or contextlib.nullcontext():
            slow = self._faults.plan.slow_start()
            if slow is not None and slow.mode == "refused":
                await asyncio.sleep(slow.for_s)
            elif slow is not None:
                self._faults.unhealthy_until_s = self._clock.monotonic_s() + slow.for_s
        if self._life is not None:
            self._port = await self._life.listen(self._port)

    async def _change_life(self, fault: Restart | Crash) -> None:
        """The engine is killed, its ports are gone for a while, and it comes back with nothing in its cache."""
        if self._life is not None:
            await self._life.end(with_reset=isinstance(fault, Crash))
        self._life = None
        self._faults.restart_streams(fault)
        with await self._hold_port() as held:
            await asyncio.sleep(fault.down_s)
            if isinstance(fault, Crash) or fault.identity == "other":
                self._started_s = self._faults.plan.wall_s()
            self._life = self._new_life()
            await self._open(held)

    async def _hold_port(self) -> socket.socket:
        """Keep the port of the life that ended; the loop closes its socket a moment later."""
        for _ in range(_MOST_HOLD_TRIES):
            with contextlib.suppress(ConfigError):
                return hold_port(self._config.host, self._port)
            await asyncio.sleep(_HOLD_RETRY_S)
        return hold_port(self._config.host, self._port)

    def _make_parts(self, renderer: LocalRenderer, publishers: Sequence[ZmqEventPublisher]) -> EngineParts:
        config = self._config
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
        return EngineParts(
            config=config,
            renderer=renderer,
            vocabulary=vocabulary,
            sampler=sampler,
            publishers=publishers or [None] * config.data_parallel_size,
            clock=EngineClock(self._clock, self._faults.plan),
            sleep=self._faults.sleep,
            on_piece=self._faults.on_piece,
        )

    def _load_renderer(self) -> LocalRenderer:
        if self._config.tokenizer is not None:
            return LocalRenderer.load(self._config.tokenizer, clock=self._clock)
        with tempfile.TemporaryDirectory(prefix="kvatlas-sim-") as directory:
            return LocalRenderer.load(write_tiny_model(Path(directory)), clock=self._clock)

    def _open_publisher(self, stream: FaultyStream, rank: int) -> ZmqEventPublisher:
        events = self._config.events
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
            outlet=stream,
        )
        self._cleanup.callback(publisher.close)
        return publisher
