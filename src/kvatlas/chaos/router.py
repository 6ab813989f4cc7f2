"""The gateway's judgement without its sockets: match, promise, pick, settle, heal, by the gateway's own code."""

from collections.abc import Sequence

from kvatlas.chaos.timeline import Timeline
from kvatlas.config import WorkerConfig
from kvatlas.fleet import EventSource, FleetSpeed, LoadLedger, PrefillSpeed, TrustState, Worker
from kvatlas.gateway import Outcome, OutcomeKind, Target
from kvatlas.gateway.candidates import Promises, UncachedTokens, candidates_of
from kvatlas.gateway.settlement import Books, Settlement
from kvatlas.index import PrefixIndex
from kvatlas.rendering import RenderedPrompt
from kvatlas.routing import RoutingRequest, make_policy

__all__ = ["VirtualRouter"]


class VirtualRouter:
    """Workers, their books and a policy over one index.

    Args:
        policy: name of a routing policy.
    """

    def __init__(self, index: PrefixIndex, timeline: Timeline, *, policy: str, seed: int) -> None:
        self._index = index
        self._clock = timeline.clock
        self._speed = FleetSpeed(4000.0)
        self._policy = make_policy(policy, seed=seed)
        self._workers: dict[str, Worker] = {}
        self._targets: dict[str, Target] = {}
        self._settlement = Settlement(self, index)

    def add(self, worker_id: str) -> Worker:
        """Take a worker in, with a column of its own."""
        self._index.add_worker(worker_id)
        trust = TrustState()
        source = EventSource(worker_id, self._index, trust, self._clock, rank=0)
        load = LoadLedger(self._clock, PrefillSpeed(self._clock, self._speed), decode_step_s=0.02)
        config = WorkerConfig(url=f"http://{worker_id}")
        worker = Worker(worker_id, config, worker_id, 80, "", load, trust, source=source, healthy=True)
        self._workers[worker_id] = worker
        self._targets[worker_id] = Target(worker_id, worker_id, 80)
        return worker

    def get(self, worker_id: str) -> Worker | None:
        """The worker of that id; what `Settlement` asks a fleet for."""
        return self._workers.get(worker_id)

    def pick(self, request_id: str, token_ids: Sequence[int], healthy: Sequence[str]) -> tuple[str, Books]:
        """Choose one of the healthy workers for a prompt and open its books."""
        matches = self._index.match(token_ids, worker_ids=healthy)
        workers = [self._workers[worker_id] for worker_id in healthy]
        candidates = candidates_of(workers, matches)
        ranking = self._policy.pick(RoutingRequest(request_id, len(token_ids)), candidates)
        chosen = candidates[ranking.order[0]].worker_id
        books = Books(
            uncached_tokens=UncachedTokens(len(token_ids), candidates),
            promised_tokens=Promises(candidates),
            rendered_tokens=len(token_ids),
            stream=True,
            prompt=RenderedPrompt(token_ids),
            matches=matches,
        )
        self._settlement.dispatched(books, self._targets[chosen])
        return chosen, books

    def first_token(self, worker_id: str, books: Books) -> None:
        """The answer's first token came."""
        self._settlement.first_byte(books, self._targets[worker_id])

    def finished(self, worker_id: str, books: Books, cached_tokens: int | None) -> None:
        """The answer ended; None when it broke."""
        kind: OutcomeKind = "ok" if cached_tokens is not None else "upstream_error"
        self._settlement.finished(books, self._targets[worker_id], Outcome(kind, 200, 0.0, cached_tokens=cached_tokens))
