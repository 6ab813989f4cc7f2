"""One run: a fleet of simulated engines, the index, traffic, faults and the oracle, in virtual time."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kvatlas.chaos.engine import EngineHooks, Job, VirtualEngine
from kvatlas.chaos.router import VirtualRouter
from kvatlas.chaos.scenarios import Scenario, scenario
from kvatlas.chaos.scrape import Scraper
from kvatlas.chaos.subscriber import VirtualSubscriber
from kvatlas.chaos.timeline import Timeline
from kvatlas.chaos.traffic import Traffic, TrafficConfig, Turn
from kvatlas.chaos.truth import KeyBook, TrueCache
from kvatlas.chaos.watch import Findings, WorkerWatch
from kvatlas.errors import ConfigError
from kvatlas.events import Event
from kvatlas.fleet import Worker
from kvatlas.gateway.settlement import Books
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex
from kvatlas.simulator import (
    EngineConfig,
    EngineRequest,
    FaultPlan,
    FaultyStream,
    LatencyConfig,
    ReplySampler,
)
from kvatlas.stream import LiveStep, SubscriberConfig

__all__ = ["ChaosRun", "ChaosSettings", "Levels", "Outcome"]

_VERIFY_EVERY = 200
_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ChaosSettings:
    """Size of a run.

    Attributes:
        workers: engines.
        requests: sent in all.
        num_blocks: KV blocks of 16 tokens per engine, so few that conversations compete for them.
        seed: of the traffic, the engines and the faults.
        policy: name of a routing policy.
        buffer_steps: batches that engines keep for replay.
        requests_per_s: mean rate in a burst, for each engine.
        quiet_s: spells without any request, between bursts of 20 s.
    """

    workers: int = 4
    requests: int = 1000
    num_blocks: int = 256
    seed: int = 1
    policy: str = "cost"
    buffer_steps: int = 10_000
    requests_per_s: float = 1.5
    quiet_s: float = 8.0

    def __post_init__(self) -> None:
        """Refuse what cannot run.

        Raises:
            ConfigError: fewer than one worker or request.
        """
        if self.workers < 1 or self.requests < 1:
            raise ConfigError(f"{self.workers} workers and {self.requests} requests: expected at least one of each")

    @property
    def traffic(self) -> TrafficConfig:
        """The load: six conversations for each engine."""
        return TrafficConfig(
            conversations=6 * self.workers,
            requests_per_s=self.requests_per_s * self.workers,
            quiet_s=self.quiet_s,
        )

    @property
    def duration_s(self) -> float:
        """About how long the run will take, in virtual time."""
        traffic = self.traffic
        busy_s = self.requests / traffic.requests_per_s
        return busy_s * (1 + traffic.quiet_s / traffic.burst_s)


@dataclass(slots=True)
class Outcome:
    """What a run showed.

    Attributes:
        findings: worker id -> what its watch found.
        answered: requests answered whole.
        hit_tokens, prompt_tokens: cached and all prompt tokens of these, as the engines report.
    """

    findings: dict[str, Findings]
    answered: int = 0
    broken: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    virtual_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Levels:
    """What a run keeps at one instant: none of it may grow without end.

    Attributes:
        index_bytes: memory of the index.
        entries: (handle, worker) pairs in it.
        orphans: blocks that wait for a parent.
        reported: claims that rest on reports alone.
        held_batches: batches that subscribers hold back.
        timers: things that are to happen.
    """

    index_bytes: int
    entries: int
    orphans: int
    reported: int
    held_batches: int
    timers: int


@dataclass(slots=True)
class _Member:
    """One engine and all that follows it."""

    worker: Worker
    engine: VirtualEngine
    subscriber: VirtualSubscriber
    truth: TrueCache
    watch: WorkerWatch
    batches: int = field(default=0)


class ChaosRun:
    """A fleet under faults.

    Args:
        faults: as `scenario` reads them.

    Raises:
        ConfigError: faults that do not parse, or name an engine that is not there.
    """

    def __init__(self, settings: ChaosSettings, faults: str) -> None:
        self.settings = settings
        self.scenario: Scenario = scenario(faults, settings.duration_s)
        self.timeline = Timeline()
        self._hasher = BlockKeyHasher(seed=settings.seed)
        self.index = PrefixIndex(self._hasher)
        self._router = VirtualRouter(self.index, self.timeline, policy=settings.policy, seed=settings.seed)
        self._book = KeyBook(self._hasher)
        self._traffic = Traffic(settings.traffic, settings.seed)
        self._sampler = ReplySampler(range(32_000), eos_token_id=None, seed=settings.seed)
        self._members: dict[str, _Member] = {}
        for number in range(settings.workers):
            self._add(number)
        self.outcome = Outcome({worker_id: m.watch.findings for worker_id, m in self._members.items()})
        self._sent = 0
        self._open = 0

    # -- the fleet --

    def _add(self, number: int) -> None:
        settings = self.settings
        worker_id = f"engine-{number}"
        worker = self._router.add(worker_id)
        self.index.set_capacity(worker_id, settings.num_blocks)
        if worker.source is None:
            raise ConfigError(f"{worker_id} has no event source")
        truth = TrueCache(self._book)
        polls_work = self.scenario.polls_work
        watch = WorkerWatch(
            self.index,
            worker_id,
            worker.source,
            truth,
            settings.num_blocks,
            lambda: self._members[worker_id].subscriber.next_probe_s if polls_work else None,
        )
        plan = FaultPlan(self.scenario.faults, clock=self.timeline.clock, seed=settings.seed, engine=number)
        stream = FaultyStream(plan, buffer_steps=settings.buffer_steps)
        replay = "tcp://replay" if self.scenario.has_replay else None
        config = EngineConfig(
            num_blocks=settings.num_blocks,
            max_model_len=(settings.num_blocks - 1) * _BLOCK_TOKENS,
            max_num_batched_tokens=1024,
            seed=settings.seed,
            engine_index=number,
            latency=LatencyConfig(prefill_tokens_per_s=4000.0, decode_step_s=0.02, jitter=0.2),
        )
        hooks = EngineHooks(
            on_events=partial(self._on_events, worker_id),
            on_batch=partial(self._on_batch, worker_id),
            on_live=partial(self._on_live, worker_id),
            on_restart=partial(self._on_restart, worker_id),
        )
        subscriber = VirtualSubscriber(
            SubscriberConfig(endpoint="tcp://live", replay_endpoint=replay),
            stream,
            watch,
            self.timeline,
            on_connected=lambda: watch.on_link_up(stream.next_seq),
            on_received=watch.on_received,
            on_replay_complete=watch.on_replay_complete,
            on_settled=lambda: watch.check(self.timeline.now_s),
        )
        engine = VirtualEngine(config, self._sampler, plan, stream, self.timeline, hooks)
        self._members[worker_id] = _Member(worker, engine, subscriber, truth, watch)

    def _on_events(self, worker_id: str, events: Sequence[Event], payload: bytes) -> None:
        member = self._members[worker_id]
        member.truth.apply(events)
        member.watch.on_published(member.engine.stream.next_seq, payload)

    def _on_batch(self, worker_id: str, steps: Sequence[LiveStep]) -> None:
        member = self._members[worker_id]
        member.batches += 1
        if member.batches % _VERIFY_EVERY == 0:
            member.truth.verify(member.engine.num_cached_blocks)
        member.subscriber.take(steps)
        member.watch.on_sent(self.timeline.now_s)
        member.watch.check(self.timeline.now_s)

    def _on_live(self, worker_id: str, steps: Sequence[LiveStep]) -> None:
        member = self._members[worker_id]
        member.subscriber.take(steps)
        member.watch.check(self.timeline.now_s)

    def _on_restart(self, worker_id: str) -> None:
        member = self._members[worker_id]
        member.truth.clear()
        member.watch.on_restart(self.timeline.now_s)

    def truth(self, worker_id: str) -> TrueCache:
        """What a worker's engine truly holds."""
        return self._members[worker_id].truth

    def levels(self) -> Levels:
        """What is kept now. Cost: O(workers)."""
        stats = [self.index.stats(worker_id) for worker_id in self._members]
        memory = self.index.memory
        return Levels(
            index_bytes=memory.used_bytes,
            entries=memory.entries,
            orphans=sum(each.orphans_now for each in stats),
            reported=sum(each.reported_now for each in stats),
            held_batches=sum(member.subscriber.tracker.held_batches for member in self._members.values()),
            timers=len(self.timeline),
        )

    # -- the load --

    def run(self) -> Outcome:
        """Send all requests and let them end."""
        for member in self._members.values():
            member.subscriber.start()
            member.engine.start()
            Scraper.start(member.worker, member.engine, member.subscriber, self.index, self.timeline)
        self._next_request()
        limit_s = 20 * self.settings.duration_s + 600
        self.timeline.run_until(limit_s, stop=lambda: self._sent >= self.settings.requests and not self._open)
        for member in self._members.values():
            member.watch.check(self.timeline.now_s)
            member.watch.findings.recall_99_after_turnovers = member.watch.recovery.whole_after()
        self.outcome.virtual_s = self.timeline.now_s
        return self.outcome

    def _next_request(self) -> None:
        if self._sent < self.settings.requests:
            self.timeline.after(self._traffic.pause_s(self.timeline.now_s), self._arrive)

    def _arrive(self) -> None:
        self._sent += 1
        self._open += 1
        turn = self._traffic.next_turn()
        limit = (self.settings.num_blocks - 1) * _BLOCK_TOKENS - turn.max_tokens
        del turn.token_ids[limit:]
        self._measure(turn)
        self._send(turn, 0)
        self._next_request()

    def _send(self, turn: Turn, attempt: int) -> None:
        healthy = [worker_id for worker_id, member in self._members.items() if member.engine.is_serving]
        if not healthy:
            self.timeline.after(0.5, lambda: self._send(turn, attempt))
            return
        request_id = f"{turn.conversation}-{len(turn.token_ids)}-{attempt}"
        worker_id, books = self._router.pick(request_id, turn.token_ids, healthy)
        job = Job(
            on_first=lambda: self._router.first_token(worker_id, books),
            on_end=lambda request: self._on_end(turn, attempt, worker_id, books, request),
        )
        self._members[worker_id].engine.send(request_id, turn.token_ids, turn.max_tokens, job)

    def _on_end(self, turn: Turn, attempt: int, worker_id: str, books: Books, request: EngineRequest | None) -> None:
        cached = None if request is None else request.cached_tokens
        self._router.finished(worker_id, books, cached)
        self._members[worker_id].watch.check(self.timeline.now_s)
        if request is None or cached is None:
            self.outcome.broken += 1
            self.timeline.after(0.1, lambda: self._send(turn, attempt + 1))
            return
        outcome = self.outcome
        outcome.answered += 1
        outcome.hit_tokens += cached
        outcome.prompt_tokens += len(turn.token_ids)
        reply = [request.source.token_id(index) for index in range(turn.max_tokens)]
        self._traffic.answered(turn, reply)
        self._open -= 1

    def _measure(self, turn: Turn) -> None:
        """What each worker that recovers holds of this prompt, and how much of that is found."""
        recovering = [m for m in self._members.values() if m.watch.recovery.is_measuring]
        if not recovering:
            return
        blocks = max(0, len(turn.token_ids) - 1) // _BLOCK_TOKENS
        keys = array("Q", self._hasher.chain(turn.token_ids[: blocks * _BLOCK_TOKENS], _BLOCK_TOKENS))
        for member in recovering:
            held = member.truth.leading(keys)
            if not held:
                continue
            found = 0
            if member.worker.trust.level.is_credited:
                claims = self.index.claimed(member.worker.worker_id, keys[:held])
                found = claims.find(0) if 0 in claims else held
            member.watch.recovery.add(member.truth.stored_blocks, held, found)
