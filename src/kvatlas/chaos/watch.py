"""The oracle's eye on one worker: what its engine holds, what the index claims, and what anybody could know by now.

Every figure is taken at instants when all that arrived was dealt with.

* A batch is *missing* from when the engine published it until the index applied it, or reported it lost.
* A loss is *detectable* once the subscriber has the evidence: a batch of a higher number than a missing one, live or
  replayed, or the end of a connection. The latter speaks until a replay has ended with its marker: what such an answer
  leaves out at its end shows with the next batch or poll.
* A claim is at *full credit* when the worker's trust is credited and the claim is beyond doubt. An *over-claim* is a
  claim at full credit on a block that the engine does not hold.
* A loss is *detected* when the worker loses its credit, or its claims come in doubt, or what was missing is applied.
* A *turnover* is as many blocks stored as the engine's pool has: by the engine, or for doubts, as the index heard.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvatlas.chaos.recovery import Recovery
from kvatlas.chaos.truth import TrueCache
from kvatlas.fleet import EventSource
from kvatlas.index import PrefixIndex
from kvatlas.stream import StreamStatus

__all__ = ["Findings", "WorkerWatch"]

_SURE = bytes((0, 0, 1)) + bytes(253)
_PRUNE_AT = 4


@dataclass(slots=True)
class Findings:
    """What one worker showed. The worst of all instants, or of all losses.

    Attributes:
        losses: losses seen; batches that came late or by replay only, and ends of lives, are some.
        detect_s: from the first missing batch, or the end of the life, until it was detected.
        late_s: how much later than the stated bound a loss was detected.
        overclaimed_before, overclaimed_after: over-claims while nobody could know of a loss, and all others.
        doubts_gone_after_turnovers: from the newest loss until nothing of before it was claimed in doubt.
        recall_99_after_turnovers: see `Recovery`.
        checks: instants looked at.
        first_violation: the first over-claim that somebody could have known of, in words.
    """

    losses: int = 0
    detect_s: float | None = None
    late_s: float = 0.0
    overclaimed_before: int = 0
    overclaimed_after: int = 0
    doubts_gone_after_turnovers: float | None = None
    recall_99_after_turnovers: float | None = None
    checks: int = 0
    first_violation: str | None = None


@dataclass(slots=True)
class _Loss:
    since_s: float
    epoch: int
    bound_s: float | None


@dataclass(slots=True)
class WorkerWatch:
    """One worker. An `EventSink` that passes on to the worker's source, noting what comes.

    Args:
        index, worker_id, source, truth: whose.
        capacity_blocks: blocks of the pool.
        poll_due_s: when the subscriber will ask for the tail if the stream stays quiet; None = nobody knows that the
            answer will come.
    """

    index: PrefixIndex
    worker_id: str
    source: EventSource
    truth: TrueCache
    capacity_blocks: int
    poll_due_s: Callable[[], float | None]
    findings: Findings = field(default_factory=Findings)
    recovery: Recovery = field(init=False)
    _missing: dict[int, bytes] = field(default_factory=dict)
    _seen_seq: int = -1
    _assumed_seq: int = -1
    _link_lost: bool = False
    _loss: _Loss | None = None
    _epoch: int = 0
    _doubts_since_blocks: int = 0
    _has_doubts: bool = False
    _poll_moved: bool = False

    def __post_init__(self) -> None:
        """The recovery is measured in this worker's turnovers."""
        self.recovery = Recovery(self.capacity_blocks)

    # -- what the engine does --

    def on_published(self, seq: int, payload: bytes) -> None:
        """The engine gave a batch to its stream; its events are in `truth` already."""
        self._missing[seq] = payload

    def on_sent(self, now_s: float) -> None:
        """The live channel has done what it does at once with the batch."""
        if self._missing and self._loss is None:
            self._lose(now_s, self.poll_due_s())

    def on_restart(self, now_s: float) -> None:
        """The engine's life ended and its cache is empty."""
        self._missing.clear()
        self._seen_seq = self._assumed_seq = -1
        self._loss = None
        self._lose(now_s, now_s)

    def on_link_up(self, next_seq: int) -> None:
        """A connection is made after one was lost: whatever was published until now may be missing, as all know."""
        self._assumed_seq = next_seq - 1

    def on_replay_complete(self) -> None:
        """A replay ended with its marker: what did not come with it is believed not to be."""
        self._assumed_seq = -1

    def on_received(self, seq: int) -> None:
        """A batch arrived at the subscriber. One that shows nothing of a loss puts the next poll off."""
        self._seen_seq = max(self._seen_seq, seq)
        self._poll_moved = True

    def _lose(self, now_s: float, bound_s: float | None) -> None:
        self.findings.losses += 1
        self._loss = _Loss(now_s, self.index.moment(self.worker_id).epoch, bound_s)

    # -- what the subscriber says --

    def on_life(self, reason: str) -> None:
        """Passed on; recall is measured anew."""
        self.source.on_life(reason)
        self.recovery.begin(self.truth.stored_blocks)

    def on_batch(self, seq: int, payload: bytes) -> None:
        """Passed on; the batch is missing no more."""
        self.source.on_batch(seq, payload)
        if self._missing.get(seq) == payload:
            del self._missing[seq]
        self._check_doubts()

    def on_gap(self, first_seq: int, last_seq: int | None) -> None:
        """Passed on; what is reported lost is nobody's secret."""
        self.source.on_gap(first_seq, last_seq)
        for seq in [seq for seq in self._missing if first_seq <= seq and (last_seq is None or seq <= last_seq)]:
            del self._missing[seq]
        self._check_doubts()
        self.recovery.begin(self.truth.stored_blocks)

    def on_status(self, status: StreamStatus, reason: str) -> None:
        """Passed on."""
        self._link_lost = status in ("lost", "connecting")
        self.source.on_status(status, reason)

    # -- judging --

    @property
    def is_detectable(self) -> bool:
        """Whether all who watch the stream could know of all that is missing; so, too, when nothing is."""
        return self._link_lost or not self._missing or (min(self._missing) <= max(self._seen_seq, self._assumed_seq))

    def check(self, now_s: float) -> None:
        """Compare claims and truth now."""
        findings, truth = self.findings, self.truth
        findings.checks += 1
        claims = self.index.claimed(self.worker_id, truth.keys)
        if self.source.trust.level.is_credited:
            sure = int.from_bytes(claims.translate(_SURE), "little")
            over = (sure & ~int.from_bytes(truth.resident, "little")).bit_count()
            if self.is_detectable:
                if over and findings.first_violation is None:
                    findings.first_violation = f"{now_s:.3f} s: {over} blocks, trust {self.source.trust.level}"
                findings.overclaimed_after = max(findings.overclaimed_after, over)
            else:
                findings.overclaimed_before = max(findings.overclaimed_before, over)
                if self._loss is None:
                    self._lose(now_s, self.poll_due_s())
        self._check_loss(now_s)
        self._check_doubts()
        if len(claims) > _PRUNE_AT * self.capacity_blocks:
            truth.prune(claims)

    def _check_loss(self, now_s: float) -> None:
        loss, findings = self._loss, self.findings
        if loss is None:
            return
        detected = (
            not self.source.trust.level.is_credited
            or self.index.moment(self.worker_id).epoch != loss.epoch
            or not self._missing
        )
        if not detected:
            if self._poll_moved:
                loss.bound_s = self.poll_due_s()
            self._poll_moved = False
            return
        self._loss = None
        findings.detect_s = max(findings.detect_s or 0.0, now_s - loss.since_s)
        if loss.bound_s is not None:
            findings.late_s = max(findings.late_s, now_s - loss.bound_s)
        self.recovery.begin(self.truth.stored_blocks)

    def _check_doubts(self) -> None:
        """Doubts begin anew with every epoch of the worker: a loss, a life, a clear."""
        epoch = self.index.moment(self.worker_id).epoch
        if epoch == self._epoch and not self._has_doubts:
            return
        stats = self.index.stats(self.worker_id)
        if epoch != self._epoch:
            self._epoch = epoch
            self._doubts_since_blocks = stats.stored_blocks
        if self._has_doubts and not stats.doubted_now:
            turnovers = (stats.stored_blocks - self._doubts_since_blocks) / self.capacity_blocks
            self.findings.doubts_gone_after_turnovers = max(self.findings.doubts_gone_after_turnovers or 0.0, turnovers)
        self._has_doubts = stats.doubted_now > 0
