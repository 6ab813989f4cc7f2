"""Predict every recorded request just before it was sent, and hold the prediction against what the engine reported.

The recording is walked in the order of time at the client: frames when they arrived, requests when they were sent.
Only requests sent while the worker's trust was `synced` are compared: before that, nobody claims to know. A recorded
reset call makes the whole state known at once, as it would to an operator who makes it; the engine's own
AllBlocksCleared follows with its next step.
"""

from dataclasses import dataclass, field
from pathlib import Path

from kvatlas.clock import ManualClock
from kvatlas.errors import EventDecodeError
from kvatlas.fleet import EngineGauges, EventSource, Trust, TrustState, parse_gauges
from kvatlas.hashing import NO_EXTRAS, BlockKeyHasher, RequestExtras
from kvatlas.index import PrefixIndex
from kvatlas.stream import RecordedFrames, RecordedMetrics, RecordedRequest, RecordedReset, read_recording

__all__ = ["Difference", "ReplayReport", "replay_recording"]

_WORKER = "recorded"
_Record = RecordedFrames | RecordedRequest | RecordedReset | RecordedMetrics


@dataclass(frozen=True, slots=True)
class Difference:
    """One prediction that the engine did not confirm."""

    line: int
    predicted: int
    reported: int


@dataclass(slots=True)
class ReplayReport:
    """What a recording showed.

    Attributes:
        compared: requests predicted while the whole state was known and whose cached tokens the engine reported.
        equal: of those, predicted exactly.
        requests: all requests with a reported count.
        events: events applied.
        gaps: losses seen, the part before the recorder joined included.
        known_from_line: line of the first compared request.
    """

    compared: int = 0
    equal: int = 0
    differences: list[Difference] = field(default_factory=list)
    requests: int = 0
    events: int = 0
    gaps: int = 0
    malformed: int = 0
    known_from_line: int | None = None


def replay_recording(path: Path, *, seed: int | None = None) -> ReplayReport:
    """Feed a recorded stream to an index and check every prediction.

    Args:
        path: a recording in the form of `kvatlas.stream.read_recording`.
        seed: seed of the block keys; any seed must give the same report.

    Raises:
        EventDecodeError: the file is not a recording.
        OSError: the file cannot be read.
    """
    player = _Player(BlockKeyHasher(seed))
    for record in sorted(read_recording(path), key=_moment):
        player.play(record)
    if not player.source.stats.batches and not player.report.requests:
        raise EventDecodeError(f"{path} holds no frames and no requests: expected a recording of a KV event stream")
    return player.finish()


class _Player:
    def __init__(self, hasher: BlockKeyHasher) -> None:
        self.report = ReplayReport()
        self._index = PrefixIndex(hasher)
        self._index.add_worker(_WORKER)
        self._clock = ManualClock()
        self.source = EventSource(_WORKER, self._index, TrustState(), self._clock)
        self._next_seq: int | None = None

    def play(self, record: _Record) -> None:
        match record:
            case RecordedFrames():
                self._frames(record)
            case RecordedRequest():
                self._request(record)
            case RecordedReset():
                if record.success:
                    self.source.note_reset("the recording's reset call succeeded")
            case RecordedMetrics():
                block_size = parse_gauges("\n".join(record.text), 0, EngineGauges())
                if block_size is not None:
                    self._index.set_block_size(_WORKER, block_size)

    def finish(self) -> ReplayReport:
        stats = self.source.stats
        self.report.events = stats.events
        self.report.gaps = stats.gaps
        self.report.malformed = stats.malformed_batches + stats.malformed_events
        return self.report

    def _frames(self, record: RecordedFrames) -> None:
        expected = self._next_seq
        if expected is None:
            self.source.on_status("syncing", "the recording begins")
            if record.seq > 0:
                self.source.on_gap(0, record.seq - 1)
            self.source.on_status("live", "recorded")
        elif record.seq < expected:
            self.source.on_life(f"sequence number {record.seq} after {expected - 1}")
            if record.seq > 0:
                self.source.on_gap(0, record.seq - 1)
            self.source.on_status("live", "recorded")
        elif record.seq > expected:
            self.source.on_gap(expected, record.seq - 1)
        self._next_seq = record.seq + 1
        self.source.on_batch(record.seq, record.payload)

    def _request(self, record: RecordedRequest) -> None:
        if record.cached_tokens is None or record.prompt_token_ids is None:
            return
        self.report.requests += 1
        if self.source.trust.level is not Trust.SYNCED or not self._index.is_complete(_WORKER):
            return
        extras = RequestExtras(cache_salt=record.cache_salt) if record.cache_salt else NO_EXTRAS
        match = self._index.match(record.prompt_token_ids, extras=extras).get(_WORKER)
        predicted = match.hit_tokens if match else 0
        report = self.report
        if report.known_from_line is None:
            report.known_from_line = record.line
        report.compared += 1
        if predicted == record.cached_tokens:
            report.equal += 1
        else:
            report.differences.append(Difference(record.line, predicted, record.cached_tokens))


def _moment(record: _Record) -> tuple[float, int, int]:
    """Time at the client; at equal times frames come before the request that was sent then."""
    if isinstance(record, RecordedRequest):
        return (record.sent_s, 1, record.line)
    return (record.t_s, 0, record.line)
