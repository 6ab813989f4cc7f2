"""Random publishers, networks and restarts: what reaches the sink must be true.

The model is a publisher with a ring of its last batches, a live channel that keeps order, drops and repeats, and a replay
channel that drops too. Payloads name their life and number, so that the test can judge every step on its own.
"""

import struct
from collections import deque

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvatlas.events import Apply, AskReplay, Lost, NewLife, SequenceTracker, TrackerLimits

RECONNECT = "reconnect"


def payload_of(life, seq, ts):
    return b"\x93\xcb" + struct.pack(">d", ts) + b"\x90" + f"{life}:{seq}".encode()


def name_of(payload):
    life, seq = payload[11:].decode().split(":")
    return int(life), int(seq)


class Publisher:
    """The obviously right model: a life, its numbers, its ring.

    A new life keeps all batches until the subscriber heard of the new connection: real rings hold minutes, not seconds.
    """

    def __init__(self, ring_size):
        self.ring_size = ring_size
        self.life = 0
        self.now = 1.0
        self.restart()

    def restart(self):
        self.life += 1
        self.next_seq = 0
        self.ring = deque()
        self.heard_of = False

    def publish(self):
        self.now += 1.0
        batch = (self.next_seq, payload_of(self.life, self.next_seq, self.now))
        self.ring.append(batch)
        self.next_seq += 1
        while self.heard_of and len(self.ring) > self.ring_size:
            self.ring.popleft()
        return batch

    def answer(self, from_seq):
        return [batch for batch in self.ring if batch[0] >= from_seq]


class Judge:
    """Carries out the tracker's steps and checks each against what it was promised."""

    def __init__(self):
        self.lives_begun = 0
        self.expected = 0  # next number of this life
        self.life = None  # the publisher life whose batches were applied since the last NewLife
        self.newest_life = 0
        self.unsure = False  # it was said that the life could not be proven
        self.question = None
        self.applied = []

    def carry_out(self, steps):
        for step in steps:
            if isinstance(step, NewLife):
                self.life, self.expected = None, 0
            elif isinstance(step, Lost):
                assert step.first_seq == self.expected
                if step.last_seq is None:
                    self.unsure = True
                else:
                    assert step.last_seq >= step.first_seq
                    self.expected = step.last_seq + 1
            elif isinstance(step, AskReplay):
                self.question = step
            else:
                assert isinstance(step, Apply)
                self._apply(step)

    def _apply(self, step):
        life, seq = name_of(step.payload)
        assert seq == step.seq, "the number belongs to another batch"
        assert seq == self.expected, "applied out of order, twice, or over an unreported gap"
        self.expected += 1
        assert life >= self.newest_life, "a batch of an older life after one of a newer"
        assert self.life in {None, life} or self.unsure, "two publisher lives within one"
        self.life = self.newest_life = life
        self.unsure = False
        self.applied.append((life, seq))


class SequenceMachine(RuleBasedStateMachine):
    @initialize(
        ring_size=st.sampled_from([1, 3, 8, 100]),
        can_replay=st.sampled_from([True, True, False]),
        max_held=st.sampled_from([1, 4, 100]),
        remembered=st.sampled_from([1, 4, 100]),
    )
    def start(self, ring_size, can_replay, max_held, remembered):
        limits = TrackerLimits(max_held_batches=max_held, max_attempts=2, remembered=remembered)
        self.can_replay = can_replay
        self.publisher = Publisher(ring_size)
        self.wire = deque()
        self.tracker = SequenceTracker(can_replay=can_replay, limits=limits)
        self.judge = Judge()
        self.replies = None
        self.reconnect()

    def reconnect(self):
        self.publisher.heard_of = RECONNECT not in self.wire
        self.judge.carry_out(self.tracker.connected())

    # -- the publisher and its network --

    @rule(count=st.integers(1, 6))
    def publish(self, count):
        for _ in range(count):
            self.wire.append(self.publisher.publish())

    @rule(count=st.integers(1, 6))
    def publish_and_deliver(self, count):
        self.publish(count)
        self.deliver(len(self.wire), twice=False)

    @precondition(lambda self: RECONNECT not in self.wire)  # no process restarts twice while we read one message
    @rule(unheard=st.integers(0, 8))
    def restart(self, unheard):
        """The process ends and another publishes before we are connected again; replies under way may still arrive."""
        self.publisher.restart()
        for _ in range(unheard):
            self.publisher.publish()
        self.wire.append(RECONNECT)

    @rule(unheard=st.integers(0, 8), on_the_way=st.booleans())
    def connection_breaks(self, unheard, on_the_way):
        """The publisher lives on and publishes before we are connected again."""
        if not on_the_way:
            self.wire.clear()
        for _ in range(unheard):
            self.publisher.publish()
        self.wire.append(RECONNECT)

    @precondition(lambda self: any(item != RECONNECT for item in self.wire))
    @rule(data=st.data())
    def drop_live(self, data):
        """The publisher drops for a slow subscriber."""
        indexes = [i for i, item in enumerate(self.wire) if item != RECONNECT]
        first = data.draw(st.sampled_from(indexes))
        for _ in range(data.draw(st.integers(1, 4))):
            if first < len(self.wire) and self.wire[first] != RECONNECT:
                del self.wire[first]

    @rule(count=st.integers(1, 6), twice=st.booleans())
    def deliver(self, count, twice):
        for _ in range(min(count, len(self.wire))):
            item = self.wire.popleft()
            if item == RECONNECT:
                self.reconnect()
                continue
            self.judge.carry_out(self.tracker.live(*item))
            if twice:
                before = len(self.judge.applied)
                self.judge.carry_out(self.tracker.live(*item))
                assert len(self.judge.applied) == before, "a repeated live batch did something"

    # -- replay --

    @precondition(lambda self: self.judge.question is not None)
    @rule()
    def answer_fully(self):
        """The whole answer arrives at once."""
        question, self.judge.question = self.judge.question, None
        for batch in self.publisher.answer(question.from_seq):
            self.judge.carry_out(self.tracker.replayed(question.token, *batch))
        self.judge.carry_out(self.tracker.replay_ended(question.token, complete=True))

    @precondition(lambda self: self.judge.question is not None)
    @rule(data=st.data())
    def answer_starts(self, data):
        """The publisher answers the last question; its socket may drop any part but the first, for which there is room."""
        question, self.judge.question = self.judge.question, None
        answer = self.publisher.answer(question.from_seq)
        kept = answer[:1] + [batch for batch in answer[1:] if data.draw(st.sampled_from([True, True, True, False]))]
        complete = data.draw(st.sampled_from([True, True, False]))
        self.replies = (question.token, deque(kept), complete)

    @precondition(lambda self: self.replies is not None)
    @rule(count=st.integers(1, 6))
    def answer_arrives(self, count):
        token, batches, complete = self.replies
        for _ in range(count):
            if batches:
                self.judge.carry_out(self.tracker.replayed(token, *batches.popleft()))
            else:
                self.judge.carry_out(self.tracker.replay_ended(token, complete=complete))
                self.replies = None
                return

    @precondition(lambda self: self.tracker.replay_token is not None)
    @rule()
    def replay_times_out(self):
        self.replies = None
        self.judge.question = None
        self.judge.carry_out(self.tracker.replay_ended(self.tracker.replay_token, complete=False))

    @rule(seq=st.integers(0, 9))
    def stale_answer(self, seq):
        """An answer to an abandoned question changes nothing."""
        assert self.tracker.replayed(10_000, seq, payload_of(99, seq, 1.0)) == []
        assert self.tracker.replay_ended(10_000, complete=True) == []

    @rule()
    def probe(self):
        self.judge.carry_out(self.tracker.probe())

    # -- what must hold --

    @invariant()
    def position_is_what_was_told(self):
        assert self.tracker.last_seq == self.judge.expected - 1

    def teardown(self):
        """With a quiet, lossless network the tracker comes to know exactly the publisher's present."""
        if not hasattr(self, "tracker"):
            return
        self.replies = None
        while self.wire:
            item = self.wire.popleft()
            if item == RECONNECT:
                self.reconnect()
            else:
                self.judge.carry_out(self.tracker.live(*item))
        self.reconnect()
        self.judge.carry_out(self.tracker.live(*self.publisher.publish()))
        for _ in range(60):
            if self.tracker.replay_token is None:
                break
            question, self.judge.question = self.judge.question, None
            answer = self.publisher.answer(question.from_seq)
            for batch in answer:
                self.judge.carry_out(self.tracker.replayed(question.token, *batch))
            self.judge.carry_out(self.tracker.replay_ended(question.token, complete=True))
        assert self.tracker.is_live
        assert self.tracker.last_seq == self.publisher.next_seq - 1
        if self.can_replay:
            assert self.judge.life == self.publisher.life


TestSequenceMachine = SequenceMachine.TestCase
TestSequenceMachine.settings = settings(stateful_step_count=60, deadline=None)
