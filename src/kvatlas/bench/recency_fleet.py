"""Simulated engines behind a policy, in virtual time, with less cache than their conversations need."""

import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvatlas.bench.recency_score import RemovalScore, ScoredWorker
from kvatlas.clock import ManualClock
from kvatlas.fleet import FleetRecency, FleetSpeed, LoadLedger, PrefillSpeed, RecencyWatch, Ticket
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex
from kvatlas.routing import Candidate, RoutingRequest, make_policy
from kvatlas.simulator import EngineConfig, EngineCore, LatencyConfig, ReplySampler, SamplingParams, Step

__all__ = ["FleetLoad", "FleetResult", "simulate_fleet"]

_VOCABULARY = 32_000
_EMPTY_STEP_S = 0.002
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """Engines and conversations. Lengths vary by half around their mean.

    Attributes:
        workers: engines.
        num_blocks: of each pool, 16 tokens each.
        users: conversations held at a time; one that ends makes room for a new one.
        turns: most questions in one are twice as many less one.
        systems: different beginnings that conversations share.
        system_tokens, question_tokens, reply_tokens: mean lengths.
        think_s: mean pause of a user.
        requests: when the run ends.
    """

    workers: int = 4
    num_blocks: int = 1025
    users: int = 96
    turns: int = 6
    systems: int = 4
    system_tokens: int = 256
    question_tokens: int = 128
    reply_tokens: int = 24
    think_s: float = 8.0
    requests: int = 3000


@dataclass(slots=True)
class FleetResult:
    """What a run showed.

    Attributes:
        score: of guesses which block goes next.
        waited: requests with a hit that were sent behind a queue to a worker of known survival.
        foreseen_tokens, found_tokens, claimed_tokens: of those: hits after the survival discount, as the engines
            counted them, as claimed at dispatch.
        errors: of those: the share's squared error, times the claimed tokens: by requests (what `foreseen_tokens`
            rests on), by stamps alone, without a discount.
    """

    score: RemovalScore = field(default_factory=RemovalScore)
    waited: int = 0
    foreseen_tokens: float = 0.0
    found_tokens: int = 0
    claimed_tokens: int = 0
    errors: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])


@dataclass(slots=True)
class _User:
    token_ids: list[int]
    turns_left: int


@dataclass(slots=True)
class _Sent:
    user: _User
    prompt: tuple[int, ...]
    hit_blocks: int
    ticket: Ticket
    claimed_tokens: int
    shares: tuple[float, float, float] | None
    """As `FleetResult.errors`."""
    answering: bool = False


class _Worker:
    """One engine, and what a router keeps of it."""

    def __init__(self, name: str, core: EngineCore, load: LoadLedger, watch: RecencyWatch, books: ScoredWorker) -> None:
        self.name = name
        self.core = core
        self.load = load
        self.watch = watch
        self.books = books
        self.sent: dict[str, _Sent] = {}
        self.step: Step | None = None


def simulate_fleet(load: FleetLoad, *, policy: str, seed: int) -> FleetResult:
    """Run the load to its end behind a policy. Equal arguments give equal results. Cost: about 5 s by default."""
    fleet = _Fleet(load, policy, seed)
    fleet.run()
    return fleet.result


class _Fleet:
    def __init__(self, load: FleetLoad, policy: str, seed: int) -> None:
        self.result = FleetResult()
        self._load = load
        self._rng = random.Random(f"recency/{seed}")
        self._clock = ManualClock()
        self._index = PrefixIndex(BlockKeyHasher(seed))
        self._policy = make_policy(policy, seed=seed)
        self._systems = [self._tokens(load.system_tokens) for _ in range(load.systems)]
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._requests = 0
        recency = FleetRecency(self._index, self._clock)
        self._workers = {f"w{i}": self._worker(f"w{i}", i, recency) for i in range(load.workers)}

    def _worker(self, name: str, number: int, recency: FleetRecency) -> _Worker:
        config = EngineConfig(
            num_blocks=self._load.num_blocks,
            max_model_len=4096,
            max_num_batched_tokens=1024,
            async_scheduling=False,
            engine_index=number,
            latency=LatencyConfig(prefill_tokens_per_s=4000.0, jitter=0.1),
        )
        self._index.add_worker(name, block_size=_BLOCK)
        speed = PrefillSpeed(self._clock, FleetSpeed(4000.0))
        core = EngineCore(config, ReplySampler(range(100, 4000), eos_token_id=None))
        books = ScoredWorker(self._index, name, self.result.score, self._rng)
        return _Worker(name, core, LoadLedger(self._clock, speed, decode_step_s=0.01), recency.watch(name), books)

    def run(self) -> None:
        for _ in range(self._load.users):
            self._at(self._rng.uniform(0, 2 * self._load.think_s), self._new_user)
        while self._due and self._requests < self._load.requests:
            due_s, _, call = heapq.heappop(self._due)
            self._clock.advance(max(0.0, due_s - self._clock.monotonic_s()))
            call()

    def _at(self, after_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self._clock.monotonic_s() + after_s, next(self._numbers), call))

    def _tokens(self, mean: int) -> list[int]:
        return self._rng.choices(range(_VOCABULARY), k=self._rng.randint(max(1, mean // 2), mean + mean // 2))

    def _new_user(self) -> None:
        turns = self._rng.randint(1, 2 * self._load.turns - 1)
        self._ask(_User(list(self._rng.choice(self._systems)), turns))

    def _ask(self, user: _User) -> None:
        self._requests += 1
        user.token_ids += self._tokens(self._load.question_tokens)
        prompt = tuple(user.token_ids)
        matches = self._index.match(prompt)
        hits = {name: matches[name].hit_tokens if name in matches else 0 for name in self._workers}
        shares = self._shares(prompt, hits)
        candidates = [_candidate(worker, hits[name], shares[name]) for name, worker in self._workers.items()]
        request_id = f"r{self._requests}"
        ranking = self._policy.pick(RoutingRequest(request_id, len(prompt)), candidates)
        name = candidates[ranking.order[0]].worker_id
        worker = self._workers[name]
        judged = hits[name] and worker.load.queued_prefill_tokens and worker.watch.curve.is_known
        by_stamps = worker.watch.surviving_share(worker.load.queued_prefill_tokens)
        ticket = worker.load.dispatch(max(1, len(prompt) - round(hits[name] * shares[name])))
        hit_blocks = matches[name].hit_blocks if name in matches else 0
        worker.sent[request_id] = _Sent(
            user, prompt, hit_blocks, ticket, hits[name], (shares[name], by_stamps, 1.0) if judged else None
        )
        worker.books.used(prompt)
        params = SamplingParams(max_tokens=self._rng.randint(1, 2 * self._load.reply_tokens), ignore_eos=True)
        worker.core.add(request_id, prompt, params, now_s=self._clock.monotonic_s())
        self._pump(worker)

    def _shares(self, prompt: Sequence[int], hits: Mapping[str, int]) -> dict[str, float]:
        queues = {name: worker.load.queued_prefill_tokens for name, worker in self._workers.items()}
        wanting = {n: hits[n] // _BLOCK for n, w in self._workers.items() if hits[n] and w.watch.wants_parts(queues[n])}
        parts = self._index.uses.idle_parts(prompt, wanting)
        return {n: w.watch.surviving_share(queues[n], parts.get(n, ())) for n, w in self._workers.items()}

    def _used(self, worker: _Worker, sent: _Sent) -> None:
        self._index.uses.touch(worker.name, sent.prompt, fresh_blocks=sent.hit_blocks)

    def _pump(self, worker: _Worker) -> None:
        if worker.step is None and worker.core.has_requests:
            worker.step = worker.core.begin_step(self._clock.monotonic_s())
            self._at(worker.step.duration_s or _EMPTY_STEP_S, lambda: self._end_step(worker))

    def _end_step(self, worker: _Worker) -> None:
        step, worker.step = worker.step, None
        if step is None:
            return
        result = worker.core.end_step(step, self._clock.monotonic_s())
        worker.books.before_step(result.events)
        for event in result.events:
            self._index.apply(worker.name, event)
        for output in result.outputs:
            sent = worker.sent[output.request_id]
            worker.load.first_token(sent.ticket)
            if not sent.answering:
                sent.answering = True
                self._used(worker, sent)
        for request in result.finished:
            sent = worker.sent.pop(request.request_id)
            worker.load.finish(sent.ticket)
            self._used(worker, sent)
            self._judge(sent, request.cached_tokens or 0)
            sent.user.token_ids += [request.source.token_id(i) for i in range(request.request.num_output_tokens)]
            worker.books.used(sent.user.token_ids)
            self._go_on(sent.user)
        self._pump(worker)

    def _judge(self, sent: _Sent, cached_tokens: int) -> None:
        if sent.shares is None:
            return
        self.result.waited += 1
        self.result.claimed_tokens += sent.claimed_tokens
        found = min(cached_tokens, sent.claimed_tokens)
        self.result.foreseen_tokens += sent.shares[0] * sent.claimed_tokens
        self.result.found_tokens += found
        for which, share in enumerate(sent.shares):
            self.result.errors[which] += sent.claimed_tokens * (share - found / sent.claimed_tokens) ** 2

    def _go_on(self, user: _User) -> None:
        """The next question of the conversation, or a new one, when the user has thought."""
        user.turns_left -= 1
        pause_s = self._rng.expovariate(1 / self._load.think_s)
        self._at(pause_s, (lambda: self._ask(user)) if user.turns_left > 0 else self._new_user)


def _candidate(worker: _Worker, hit_tokens: int, share: float) -> Candidate:
    load = worker.load
    return Candidate(
        worker_id=worker.name,
        hit_tokens=hit_tokens,
        confidence=share,
        queued_prefill_tokens=load.queued_prefill_tokens,
        running_requests=load.in_flight,
        waiting_requests=0,
        kv_usage=0.0,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        decode_step_s=load.decode_step_s,
        trust="synced",
    )
