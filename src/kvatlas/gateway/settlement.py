"""After a plan: whom it charged, what it promised, and what the engine's own words teach.

A request's books are opened with its plan and settled when it ends: the worker's load is released, the prediction is
held against the engine's `cached_tokens`, and where the two differ, or claims were in doubt, the index learns from it.
"""

import logging
from typing import Protocol

import msgspec

from kvatlas.fleet import Cause, LoadLedger, Ticket, Worker, cause_of
from kvatlas.gateway.candidates import Promises, UncachedTokens
from kvatlas.gateway.values import Outcome, Target
from kvatlas.index import Moment, PrefixIndex, WorkerMatch
from kvatlas.rendering import RenderedPrompt

__all__ = ["Books", "Settlement"]

_log = logging.getLogger(__name__)
_ENDED = frozenset(("ok", "client_abort", "timeout"))
"""Outcomes of requests that an engine worked on."""
_REFUSED = 400


class Books(msgspec.Struct):
    """What one plan promised and whom it charged.

    Attributes:
        uncached_tokens: prompt tokens that each worker would have to compute.
        promised_tokens: cached tokens that each worker will report, where that can be said: only there its uncached
            tokens are known well enough to measure its speed with.
        rendered_tokens: length of the prompt, if it is one and known.
        prompt: the prompt as it was looked up, if the engine's count will speak of it alone.
        matches: worker id -> what was found of that prompt.
        tickets: worker id -> its ledger (the worker may be gone when the request ends) and the charge there.
        sent: worker id -> its moment when the request was sent there.
    """

    uncached_tokens: UncachedTokens
    promised_tokens: Promises
    rendered_tokens: int | None
    stream: bool
    prompt: RenderedPrompt | None = None
    matches: dict[str, WorkerMatch] = {}
    tickets: dict[str, tuple[LoadLedger, Ticket]] = {}
    sent: dict[str, Moment] = {}


class KnowsWorkers(Protocol):
    """Who has the workers: a fleet, or what stands for one."""

    def get(self, worker_id: str, /) -> Worker | None: ...


class Settlement:
    """Keeps the books of all plans of one planner."""

    __slots__ = ("_fleet", "_index")

    def __init__(self, fleet: KnowsWorkers, index: PrefixIndex) -> None:
        self._fleet = fleet
        self._index = index

    def dispatched(self, books: Books, target: Target) -> None:
        """Charge the worker before its connection is even made, so that the next decision sees it."""
        worker_id = target.worker_id
        worker = self._fleet.get(worker_id)
        if worker is None:
            return
        tokens = books.uncached_tokens.get(worker_id, 1)
        ticket = worker.load.dispatch(tokens, measurable=books.promised_tokens.get(worker_id) is not None)
        books.tickets[worker_id] = (worker.load, ticket)
        if books.prompt is not None:
            books.sent[worker_id] = self._index.moment(worker_id)

    def first_byte(self, books: Books, target: Target) -> None:
        """The first token of a stream: the worker's prefill is over. Other answers come whole and tell nothing."""
        if books.stream and target.worker_id in books.tickets:
            ledger, ticket = books.tickets[target.worker_id]
            ledger.first_token(ticket)
            self._note_use(books, target.worker_id)

    def finished(self, books: Books, target: Target, outcome: Outcome) -> None:
        """Release the worker, and learn from what it reported."""
        if target.worker_id in books.tickets:
            ledger, ticket = books.tickets[target.worker_id]
            ledger.finish(ticket)
            if outcome.kind in _ENDED and outcome.status < _REFUSED:
                self._note_use(books, target.worker_id)
        worker = self._fleet.get(target.worker_id)
        if worker is None or outcome.kind != "ok" or not 200 <= outcome.status < 300 or books.rendered_tokens is None:
            return
        parity = outcome.prompt_tokens in {None, books.rendered_tokens}
        if not parity and outcome.prompt_tokens is not None:
            _count_mismatch(worker, outcome.prompt_tokens, books.rendered_tokens)
        predicted = books.promised_tokens.get(worker.worker_id)
        if outcome.cached_tokens is None:
            worker.audit.unreported += predicted is not None
            return
        if predicted is not None:
            self._compare(books, worker, predicted, outcome.cached_tokens, parity=parity)
        if parity:
            self._heal(books, worker, outcome.cached_tokens)

    def _note_use(self, books: Books, worker_id: str) -> None:
        """The prompt's blocks are of use on that worker now, from its first token on; they are free when it ends."""
        sent = books.sent.get(worker_id)
        if books.prompt is None or sent is None or self._fleet.get(worker_id) is None:
            return
        match = books.matches.get(worker_id)
        self._index.uses.touch(
            worker_id,
            books.prompt.token_ids,
            fresh_blocks=0 if match is None else match.hit_blocks,
            extras=books.prompt.extras,
        )

    def _compare(self, books: Books, worker: Worker, predicted: int, reported: int, *, parity: bool) -> None:
        cause = None if predicted == reported else self._cause(books, worker, predicted - reported, parity=parity)
        if worker.audit.record(predicted, reported, cause) and worker.source is not None:
            worker.source.note_overclaim(
                f"the engine reported {reported} cached tokens where {predicted} were promised, and repeatedly so, "
                "without a removal that explains it: events must be missing"
            )

    def _cause(self, books: Books, worker: Worker, error_tokens: int, *, parity: bool) -> Cause | None:
        sent = books.sent.get(worker.worker_id)
        now = self._index.moment(worker.worker_id)
        return cause_of(
            error_tokens,
            parity=parity,
            same_epoch=sent is not None and sent.epoch == now.epoch,
            removed=sent is None or sent.removals != now.removals,
            stored=sent is None or sent.stores != now.stores,
            block_size=self._index.block_size(worker.worker_id) or 1,
        )

    def _heal(self, books: Books, worker: Worker, reported: int) -> None:
        """Take the engine's count for its word where it says more than is known.

        Not for a worker without credit: nothing would take the claim back.
        """
        sent, match = books.sent.get(worker.worker_id), books.matches.get(worker.worker_id)
        if sent is None or match is None or books.prompt is None or not worker.trust.level.is_credited:
            return
        if reported <= match.hit_tokens and not match.doubted_tokens:
            return
        healed = self._index.heal(
            worker.worker_id,
            books.prompt.token_ids,
            reported,
            sent,
            claimed_tokens=match.hit_tokens + match.doubted_tokens,
            extras=books.prompt.extras,
        )
        worker.audit.confirmed_blocks += healed.confirmed_blocks
        worker.audit.adopted_blocks += healed.adopted_blocks
        worker.audit.refuted_blocks += healed.refuted_blocks


def _count_mismatch(worker: Worker, engine_tokens: int, own_tokens: int) -> None:
    if not worker.audit.parity_mismatches:
        _log.warning(
            "worker %s counted %d prompt tokens where we counted %d: its template or tokenizer is not the one "
            "configured here, so its cache will be missed (told once; kvatlas_parity_mismatches_total counts)",
            worker.worker_id,
            engine_tokens,
            own_tokens,
        )
    worker.audit.parity_mismatches += 1
