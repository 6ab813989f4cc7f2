"""Batches in runs, against the same batches one by one: whatever arrives, the sink hears the same."""

import itertools
import struct
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas._native import Run, append_batch
from kvatlas.events import Apply, AskReplay, SequenceTracker, Step, StreamPosition, TrackerLimits
from kvatlas.stream import Spread, StreamCounters, SubscriberConfig, SubscriberCore
from support.runs import runs_of

LIMITS = TrackerLimits(max_held_batches=4, max_attempts=2, remembered=8)


def payload_of(life: int, seq: int, ts: float, other: bool = False) -> bytes:
    """As far as the order looks into a batch: its time stamp, and bytes."""
    return b"\x93\xcb" + struct.pack(">d", ts) + b"\x90" + f"{life}:{seq}:{other}".encode()


@dataclass
class Publisher:
    """Says what arrives: mostly the next batch, now and then something else."""

    life: int = 1
    next_seq: int = 0
    sent: list[tuple[int, bytes]] = field(default_factory=list)

    def arrival(self, what: str, number: int) -> tuple[int, bytes]:
        if what == "again" and self.sent:
            return self.sent[-1 - number % len(self.sent)]
        if what == "other bytes" and self.sent:
            seq, _ = self.sent[-1 - number % len(self.sent)]
            return seq, payload_of(self.life, seq, 1_000.0 * self.life + seq + 5.0 * (number % 2), other=True)
        if what == "restart":
            self.life, self.next_seq, self.sent = self.life + 1, number % 3 and number, []
        if what == "hole":
            self.next_seq += 1 + number % 6
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        ts = 1_000.0 * self.life + seq
        if what == "older":
            ts -= 3.0
        batch = (seq, b"no batch" if what == "junk" else payload_of(self.life, seq, ts))
        self.sent.append(batch)
        return batch


ODD = ("again", "other bytes", "restart", "hole", "older", "junk")


def arrivals_of(items: list[tuple[str, int]]) -> list[tuple[int, bytes]]:
    """What one publisher makes of them."""
    publisher = Publisher()
    return [publisher.arrival(*item) for item in items]


ARRIVALS = st.lists(st.tuples(st.sampled_from(("next",) * 12 + ODD), st.integers(0, 8)), max_size=40).map(arrivals_of)
CUTS = st.lists(st.integers(1, 9), max_size=40)


@dataclass
class Sink:
    """Everything that was told, batches one by one however they came."""

    told: list[object] = field(default_factory=list)
    runs: int = 0

    def on_life(self, reason: str) -> None:
        self.told.append(("life", reason))

    def on_batch(self, seq: int, payload: bytes) -> None:
        self.told.append((seq, payload))

    def on_gap(self, first_seq: int, last_seq: int | None) -> None:
        self.told.append(("gap", first_seq, last_seq))

    def on_status(self, status: str, reason: str) -> None:
        self.told.append((status, reason))


class RunSink(Sink):
    """The same for runs, which have two batches or more."""

    def on_batches(self, first_seq: int, payloads: list[bytes]) -> None:
        assert len(payloads) > 1
        self.runs += 1
        self.told.extend(enumerate(payloads, first_seq))


class Follower:
    """A core with its sink; questions wait until they are answered."""

    def __init__(self, sink: Sink, *, replay: bool) -> None:
        self.sink = sink
        self.questions: list[AskReplay] = []
        self.core = SubscriberCore(
            SubscriberConfig("tcp://engine:1", "tcp://engine:2" if replay else None),
            sink,
            counters=StreamCounters(),
            ask=self.questions.append,
            spread=Spread(most=1.0),
            limits=LIMITS,
        )
        self.core.connected()
        self.settle()

    def settle(self) -> None:
        self.core.carry_out_all()
        self.core.report_order()

    def answer(self, ring: list[tuple[int, bytes]], how: str) -> None:
        """Answer the newest question, if it is open."""
        if not self.questions or not self.core.is_wanted(self.questions[-1]):
            return
        question = self.questions[-1]
        self.core.asked(question, 0.0)
        if how != "silent":
            for seq, payload in ring:
                if seq >= question.from_seq:
                    self.core.take_replayed(seq, payload)
                    self.core.carry_out_all()
        self.core.end_replay(complete=how == "whole")
        self.settle()

    def state(self) -> tuple[object, ...]:
        tracker = self.core.tracker
        held = (tracker.last_seq, tracker.is_live, tracker.held_batches, tracker.duplicates, tracker.stale)
        return self.sink.told, self.core.counters, self.core.last_seq, self.questions, *held


def parts_of(arrivals: list[tuple[int, bytes]], cuts: list[int]) -> list[list[tuple[int, bytes]]]:
    """The arrivals cut into parts of these lengths, the rest in one."""
    parts, at = [], 0
    for length in [*cuts, len(arrivals)]:
        parts.append(arrivals[at : at + length])
        at += length
    return [part for part in parts if part]


@given(seqs=st.lists(st.integers(0, 5) | st.integers(2**64 - 3, 2**64 - 1), max_size=30))
def test_batches_are_joined_where_they_follow_by_number(seqs: list[int]) -> None:
    """Batch by batch as they come, whatever their numbers; nothing follows the last number there is."""
    runs: list[Run] = []
    for at, seq in enumerate(seqs):
        append_batch(runs, seq, b"%d" % at)
    told = [(seq, payload) for first_seq, payloads in runs for seq, payload in enumerate(payloads, first_seq)]
    assert told == [(seq, b"%d" % at) for at, seq in enumerate(seqs)]
    breaks = sum(after != before + 1 for before, after in itertools.pairwise(seqs))
    assert len(runs) == (breaks + 1 if seqs else 0)


ANSWERS = st.lists(st.sampled_from(["not yet", "whole", "whole", "cut off", "silent"]), min_size=41, max_size=41)


@settings(max_examples=400)
@given(arrivals=ARRIVALS, cuts=CUTS, answers=ANSWERS, replay=st.booleans(), takes_runs=st.booleans())
def test_runs_are_the_same_batches(
    arrivals: list[tuple[int, bytes]], cuts: list[int], answers: list[str], replay: bool, takes_runs: bool
) -> None:
    """However arrivals are cut into runs, the sink hears of them as one by one, and all that follows is the same."""
    single, joined = Follower(Sink(), replay=replay), Follower(RunSink() if takes_runs else Sink(), replay=replay)
    seen: list[tuple[int, bytes]] = []
    for part, how in zip(parts_of(arrivals, cuts), answers, strict=False):
        for batch in part:
            single.core.take(*batch)
        for run in runs_of(part):
            joined.core.take_run(*run)
        for follower in (single, joined):
            follower.settle()
        assert joined.state() == single.state()
        seen += part
        if how != "not yet":
            ring = sorted({seq: (seq, payload) for seq, payload in seen}.values())
            for follower in (single, joined):
                follower.answer(ring, how)
            assert joined.state() == single.state()


@given(count=st.integers(2, 40), cuts=CUTS)
def test_a_stream_in_order_comes_in_runs(count: int, cuts: list[int]) -> None:
    """Nothing is judged or asked in between: each run is one call."""
    arrivals = [(seq, payload_of(1, seq, 1_000.0 + seq)) for seq in range(count)]
    follower = Follower(RunSink(), replay=False)
    parts = parts_of(arrivals, cuts)
    for part in parts:
        follower.core.take_run(part[0][0], [payload for _, payload in part])
        assert not follower.core.steps
    assert follower.sink.runs == sum(len(part) > 1 for part in parts)
    assert follower.core.counters.batches == count


def new_tracker(replay: bool, resumed: bool) -> SequenceTracker:
    position = StreamPosition.at(3, payload_of(1, 3, 1_003.0)) if resumed else None
    return SequenceTracker(can_replay=replay, limits=LIMITS, resume_at=position)


def end_replays(tracker: SequenceTracker, ring: list[tuple[int, bytes]], how: str) -> list[Step]:
    """Answer what the tracker waits for."""
    steps: list[Step] = []
    token = tracker.replay_token
    if token is not None and how != "not yet":
        for seq, payload in ring if how != "silent" else []:
            steps += tracker.replayed(token, seq, payload)
        if tracker.replay_token == token:
            steps += tracker.replay_ended(token, complete=how == "whole")
    return steps


def take_quickly(tracker: SequenceTracker, first_seq: int, payloads: list[bytes]) -> list[list[Step]]:
    """What is to be done for each batch of a run, if all that the tracker accepts at once is applied."""
    steps: list[list[Step]] = []
    while len(steps) < len(payloads):
        at = len(steps)
        count = tracker.accept_run(first_seq + at, payloads[at:])
        steps += [[Apply(first_seq + place, payloads[place])] for place in range(at, at + count)]
        if count:
            assert tracker.last_seq == first_seq + at + count - 1
            assert tracker.is_live
        if len(steps) < len(payloads):
            at = len(steps)
            steps.append(tracker.live(first_seq + at, payloads[at]))
    return steps


@settings(max_examples=400)
@given(
    arrivals=ARRIVALS,
    cuts=CUTS,
    answers=ANSWERS,
    reconnects=st.sets(st.integers(0, 39), max_size=3),
    replay=st.booleans(),
    resumed=st.booleans(),
)
def test_accept_run_is_the_usual_case_of_live(
    arrivals: list[tuple[int, bytes]],
    cuts: list[int],
    answers: list[str],
    reconnects: set[int],
    replay: bool,
    resumed: bool,
) -> None:
    """What it takes `live` would have applied and nothing else; what it leaves would not have been the usual case."""
    plain, quick = new_tracker(replay, resumed), new_tracker(replay, resumed)
    assert plain.connected() == quick.connected()
    seen: dict[int, bytes] = {}
    for number, part in enumerate(parts_of(arrivals, cuts)):
        expected = [plain.live(seq, payload) for seq, payload in part]
        steps = [step for first_seq, payloads in runs_of(part) for step in take_quickly(quick, first_seq, payloads)]
        assert steps == expected
        seen.update(part)
        ring = sorted(seen.items())
        assert end_replays(plain, ring, answers[number]) == end_replays(quick, ring, answers[number])
        if number in reconnects:
            assert plain.connected() == quick.connected()
        for name in ("last_seq", "is_live", "held_batches", "replay_token", "duplicates", "stale"):
            assert getattr(plain, name) == getattr(quick, name), name


@given(arrivals=ARRIVALS, probe=ARRIVALS, replay=st.booleans())
def test_a_refusal_changes_nothing(
    arrivals: list[tuple[int, bytes]], probe: list[tuple[int, bytes]], replay: bool
) -> None:
    """However often nothing of a run is taken, what comes later is judged as if it had not been offered."""
    plain, asked = new_tracker(replay, False), new_tracker(replay, False)
    assert plain.connected() == asked.connected()
    for seq, payload in arrivals:
        for first_seq, payloads in runs_of(probe):
            for at in range(len(payloads)):
                if first_seq + at != asked.last_seq + 1 or asked.replay_token is not None:
                    assert asked.accept_run(first_seq + at, payloads[at:]) == 0
        assert asked.accept_run(asked.last_seq + 1, []) == 0
        assert plain.live(seq, payload) == asked.live(seq, payload)
        assert end_replays(plain, [], "whole") == end_replays(asked, [], "whole")
