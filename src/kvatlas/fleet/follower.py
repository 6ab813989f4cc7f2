"""One worker's event stream: found, followed, begun anew when the engine is another one, doubted when it is silent.

The subscriber judges by what the sockets bring. What HTTP tells beside it is judged here, after each health check that
the engine answered: where the events are, whether the process is still the same, whether its counters move.
"""

import asyncio
import logging
from collections.abc import Callable

import aiohttp

from kvatlas.clock import Clock
from kvatlas.config import NO_EVENTS
from kvatlas.fleet.discovery import EventDiscovery, EventSources, describe_unanswered
from kvatlas.fleet.silence import SilenceTerm, SilenceWatch
from kvatlas.fleet.source import EventSource
from kvatlas.fleet.trust import Trust, TrustState
from kvatlas.fleet.warm_start import WorkerPast
from kvatlas.fleet.worker import EventAddress, Worker
from kvatlas.index import PrefixIndex
from kvatlas.stream import StreamCounters, SubscriberConfig, ZmqEventSubscriber

__all__ = ["EventFollower"]

_log = logging.getLogger(__name__)
_ASK_AGAIN_S = 2.0
_ASK_AGAIN_MAX_S = 60.0
_CONNECTED = frozenset({Trust.SYNCING, Trust.SYNCED, Trust.PARTIAL})


class EventFollower:
    """Keeps one worker's stream followed, from the first good health check until `close`.

    Args:
        discovery: asks the engine for its events; None when only the configured ones count.
        silent_s: see `silent_stream_s` in docs/config.md.
        owner_of: the worker that already follows an endpoint, None when nobody does.
        on_ranks: told which ranks the engine has, before its answer is used; says whether this worker stays.
        past: what a snapshot says of the worker; None starts with nothing.
    """

    def __init__(
        self,
        worker: Worker,
        index: PrefixIndex,
        clock: Clock,
        *,
        discovery: EventDiscovery | None,
        silent_s: float,
        owner_of: Callable[[str], str | None],
        on_ranks: Callable[[Worker, EventSources], bool],
        past: WorkerPast | None = None,
    ) -> None:
        self._worker = worker
        self._index = index
        self._clock = clock
        self._discovery = discovery
        self._owner_of = owner_of
        self._on_ranks = on_ranks
        self._watch = SilenceWatch(patience_s=silent_s)
        self._term = SilenceTerm()
        self._verdict: str | None = None
        """The reason of the last verdict of silence."""
        worker.trust.on_become = self._on_trust
        self._source: EventSource | None = None
        self._subscriber: ZmqEventSubscriber | None = None
        self._counters = StreamCounters()
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked_s = self._ask_at_s = 0.0
        self._ask_pause_s = _ASK_AGAIN_S
        self._has_left = False
        self._past = past
        self._started_s = None if past is None else past.engine_started_s
        self._computed_tokens = 0.0
        self._seen_lives = 0
        """Lives that the stream had told of at the last check."""

    @property
    def past(self) -> WorkerPast | None:
        """What a snapshot says of the worker, until a stream is followed that can prove it."""
        return self._past

    def start(self) -> None:
        """Follow the configured stream; or say why there is none yet. Call it on the event loop."""
        config = self._worker.config
        if config.events == NO_EVENTS:
            self._unfollow("events=none: no event stream is followed")
        elif config.events is not None:
            self.follow(EventAddress(config.events, config.replay))
        elif self._discovery is None:
            self._unfollow("no event stream is configured and discover_events is off: give events=tcp://HOST:PORT")
        else:
            reason = "the engine has not been asked yet where its KV events are"
            self._worker.trust.become(Trust.NONE, reason, self._clock.monotonic_s())

    async def after_check(self, recovered: bool) -> bool:  # noqa: FBT001 - the health monitor's callback
        """The engine has just answered. Returns whether the worker is still one of the fleet.

        Args:
            recovered: it had not answered before, or it is the first time.
        """
        reborn = self._why_reborn()
        if reborn is not None:
            self._begin_anew(reborn)
            self._lift_silence(reborn)
        urgent = recovered or reborn is not None
        if (urgent or self._ask_is_due()) and (not await self._discover(urgent=urgent) or self._has_left):
            return False
        self._judge_silence()
        self._seen_lives = self._source.stats.lives if self._source is not None else 0
        return True

    def take(self, sources: EventSources) -> None:
        """Use the engine's answer: follow this worker's rank of it, or none."""
        worker = self._worker
        if sources.block_size is not None and worker.config.block_size is None:
            self._index.set_block_size(worker.worker_id, sources.block_size)
        rank, ranks = worker.config.rank, sources.ranks
        address = ranks.get(rank) if rank is not None else next(iter(ranks.values()), None)
        if address is None:
            known = f"it has ranks {', '.join(map(str, ranks))}, not {rank}" if ranks else ""
            self._unfollow(f"{sources.reason}: {known}; correct rank=" if known else sources.reason)
            return
        owner = self._owner_of(address.events)
        if owner is not None and owner != worker.worker_id:
            self._unfollow(
                f"{sources.reason} names {address.events}, which {owner} follows already: two engines cannot publish "
                "there; give events= with each of them"
            )
            return
        self.follow(address)

    def follow(self, address: EventAddress) -> None:
        """Follow a stream; one that is followed already is left alone, another one is left for good."""
        if self._subscriber is not None and address == self._worker.events_at:
            return
        moved = self._worker.events_at
        if moved is not None:
            self._leave(f"the engine's events moved from {moved.events} to {address.events}")
        _log.info("worker %s: follows %s, replay %s", self._worker.worker_id, address.events, address.replay or "none")
        self._subscribe(address)

    def leave(self) -> None:
        """Hear no more of the stream. Nothing reaches the index afterwards."""
        self._has_left = True
        if self._subscriber is not None:
            self._subscriber.close()

    async def close(self) -> None:
        """`leave`, and return when the sockets are closed."""
        self.leave()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _subscribe(self, address: EventAddress) -> None:
        worker = self._worker
        resume_at = None
        if self._source is None:
            self._source = EventSource(
                worker.worker_id, self._index, worker.trust, self._clock, rank=worker.config.rank
            )
            if self._past is not None and self._past.may_be_of(worker.gauges.started_s):
                resume_at = self._past.restore(self._source, self._index, can_replay=address.replay is not None)
            self._past = None
        worker.source, worker.stream, worker.events_at = self._source, self._counters, address
        subscriber = ZmqEventSubscriber(
            SubscriberConfig(
                endpoint=address.events,
                replay_endpoint=address.replay,
                resume_at=resume_at,
                topic=worker.config.topic,
            ),
            self._source,
            self._clock,
            counters=self._counters,
        )
        self._subscriber = subscriber
        self._watch.reset()
        task = asyncio.get_running_loop().create_task(subscriber.run(), name=f"events {worker.worker_id}")
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self._ended(ended, subscriber))

    def _ended(self, task: "asyncio.Task[None]", subscriber: ZmqEventSubscriber) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if subscriber is self._subscriber and not self._has_left:
            self._unfollow(f"its event stream cannot be followed: {error}")

    def _leave(self, reason: str) -> None:
        """Hear no more of the stream that was followed, and forget what it said."""
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None
        self._worker.events_at = None
        if self._source is not None and self._source.has_past:
            self._source.on_life(reason)

    def _unfollow(self, reason: str) -> None:
        self._leave(reason)
        self._worker.source = self._worker.stream = None
        trust = self._worker.trust
        if trust.reason != reason:
            level = logging.WARNING if trust.level is not Trust.NONE else logging.INFO
            _log.log(level, "worker %s: routed by load alone: %s", self._worker.worker_id, reason)
        trust.become(Trust.NONE, reason, self._clock.monotonic_s())

    # -- where the events are --

    def _ask_is_due(self) -> bool:
        """Whether a stream that is not connected may have moved by now, or a running engine may have other ranks."""
        connected = self._subscriber is not None and self._worker.trust.level in _CONNECTED
        return self._clock.monotonic_s() >= (self._asked_s + _ASK_AGAIN_MAX_S if connected else self._ask_at_s)

    async def _discover(self, *, urgent: bool) -> bool:
        """Ask the engine and follow what it answers. Returns whether the worker is still one of the fleet."""
        if self._discovery is None:
            return True
        self._ask_pause_s = _ASK_AGAIN_S if urgent else min(2 * self._ask_pause_s, _ASK_AGAIN_MAX_S)
        self._asked_s = self._clock.monotonic_s()
        self._ask_at_s = self._asked_s + self._ask_pause_s
        try:
            sources = await self._discovery.ask(self._worker.base_url)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if self._subscriber is None and not self._has_left:
                self._unfollow(describe_unanswered(error))
            return True
        if self._has_left or not self._on_ranks(self._worker, sources):
            return False
        self.take(sources)
        return True

    # -- whether it is still the same engine --

    def _why_reborn(self) -> str | None:
        """Why the process behind the URL is not the one of the last check; None when nothing says so."""
        gauges = self._worker.gauges
        before_s, computed_before = self._started_s, self._computed_tokens
        self._started_s = gauges.started_s if gauges.started_s is not None else before_s
        self._computed_tokens = gauges.traffic.computed_tokens if gauges.traffic is not None else 0.0
        if gauges.started_s is not None and before_s is not None:
            if gauges.started_s == before_s:
                return None
            return f"another process answers at {self._worker.base_url}: started at {gauges.started_s}, not {before_s}"
        if gauges.traffic is not None and self._computed_tokens < computed_before:
            return (
                f"the engine's counters went back, from {computed_before:g} to {self._computed_tokens:g} prompt tokens"
            )
        return None

    def _begin_anew(self, reason: str) -> None:
        """Read the stream from its beginning, unless it has told of the new life itself or had told nothing."""
        address = self._worker.events_at
        if self._source is None or address is None:
            return
        stats = self._source.stats
        if not self._source.has_past or stats.lives > max(1, self._seen_lives):
            return
        self._leave(reason)
        self._subscribe(address)

    # -- whether it says what it must --

    def _judge_silence(self) -> None:
        worker, traffic = self._worker, self._worker.gauges.traffic
        now_s = self._clock.monotonic_s()
        if worker.silent_reason is not None:
            if self._term.is_over(now_s):
                self._lift_silence("it is tried again: without requests it has nothing to announce")
            return
        block_size = self._index.block_size(worker.worker_id)
        if self._subscriber is None or traffic is None or not block_size or not self._can_judge():
            self._watch.reset()
            return
        verdict = self._watch.look(now_s, self._counters.batches, traffic, block_size)
        if verdict == "suspect":
            self._subscriber.probe_soon()
        elif verdict == "silent":
            self._pass_verdict(self._subscriber, now_s)

    def _can_judge(self) -> bool:
        """Whether the stream ought to bring something now. One that was silent is judged on until a batch comes."""
        trust = self._worker.trust
        if self._term.is_unanswered(self._counters.batches) and trust.level is not Trust.NONE:
            return trust.level is not Trust.STALE or trust.reason == self._verdict
        return trust.level.is_credited

    def _pass_verdict(self, subscriber: ZmqEventSubscriber, now_s: float) -> None:
        worker = self._worker
        reason = self._verdict = (
            "the event stream is silent while the engine works: by its own counters it stored at least "
            f"{self._watch.blocks} blocks since the last batch"
        )
        subscriber.distrust(reason)
        self._watch.reset()
        term_s = self._term.begin(now_s, self._counters.batches)
        worker.silent_reason = reason
        _log.warning(
            "worker %s: left out where others are heard, for %g s unless a batch comes: %s",
            worker.worker_id,
            term_s,
            reason,
        )

    def _on_trust(self, trust: TrustState) -> None:
        """Whatever the stream says of itself, that it brought something or that its connection is gone, ends it."""
        self._lift_silence(f"trust {trust.level}: {trust.reason}")

    def _lift_silence(self, why: str) -> None:
        worker = self._worker
        if worker.silent_reason is not None:
            worker.silent_reason = None
            _log.info("worker %s: no longer left out: %s", worker.worker_id, why)
