"""The order of batches, case by case; the random cases are in tests/property/test_sequence_machine.py."""

import pytest

from kvatlas.events import (
    AllBlocksCleared,
    Apply,
    AskReplay,
    BlockRemoved,
    EventBatch,
    Lost,
    NewLife,
    SequenceTracker,
    TrackerLimits,
    encode_batch,
)


def batch(seq, life=0):
    """Bytes of one batch; a later life has a later clock."""
    return encode_batch(EventBatch(1000.0 * life + seq, [BlockRemoved([seq])], life))


def applied(steps):
    """Numbers of the batches applied, in order; any other step but a question fails the test."""
    assert all(isinstance(step, Apply | AskReplay) for step in steps), steps
    return [step.seq for step in steps if isinstance(step, Apply)]


def replay(tracker, seqs, life=0, *, complete=True):
    """Answer the running replay and return all steps."""
    token = tracker.replay_token
    steps = []
    for seq in seqs:
        steps += tracker.replayed(token, seq, batch(seq, life))
    return steps + tracker.replay_ended(token, complete=complete)


def live(tracker, seqs, life=0):
    return [step for seq in seqs for step in tracker.live(seq, batch(seq, life))]


@pytest.fixture
def tracker():
    """A tracker that has applied batches 0..4 and is live."""
    tracker = SequenceTracker(can_replay=True)
    tracker.connected()
    assert applied(replay(tracker, range(5))) == [0, 1, 2, 3, 4]
    return tracker


def test_replay_is_asked_from_zero_at_connect():
    """The first thing after the connection is a question for everything."""
    tracker = SequenceTracker(can_replay=True)
    assert tracker.connected() == [AskReplay(1, 0, 0)]
    assert not tracker.is_live


def test_live_batches_wait_for_the_replay():
    """A live batch that overtakes the replay is held, then applied in order, once (scenario 17 of the rough edges)."""
    tracker = SequenceTracker(can_replay=True)
    tracker.connected()
    assert live(tracker, [3, 4]) == []
    assert applied(replay(tracker, [0, 1, 2, 3])) == [0, 1, 2, 3, 4]
    assert tracker.is_live


def test_an_empty_publisher_is_live_at_once():
    """A fresh publisher answers with the end marker only: nothing is missing."""
    tracker = SequenceTracker(can_replay=True)
    tracker.connected()
    assert replay(tracker, []) == []
    assert (tracker.is_live, tracker.last_seq) == (True, -1)
    assert applied(live(tracker, [0, 1])) == [0, 1]


def test_a_clear_at_batch_zero_is_an_ordinary_batch():
    """SGLang starts its stream with AllBlocksCleared at 0: that is no second life."""
    tracker = SequenceTracker(can_replay=True)
    tracker.connected()
    replay(tracker, [])
    payload = encode_batch(EventBatch(1.0, [AllBlocksCleared()], 0))
    assert tracker.live(0, payload) == [Apply(0, payload)]


def test_a_replay_that_starts_late_reports_what_is_gone():
    """A truncated ring at connect: the gap is told before the first batch."""
    tracker = SequenceTracker(can_replay=True)
    tracker.connected()
    steps = replay(tracker, [7, 8])
    assert steps == [Lost(0, 6), Apply(7, batch(7)), Apply(8, batch(8))]
    assert tracker.is_live


def test_a_gap_is_filled_by_replay(tracker):
    """Batches 5..7 were dropped: 8 waits, the replay is asked from the last one applied, all apply in order (T8)."""
    assert tracker.live(8, batch(8)) == [AskReplay(2, 4, 0)]
    assert not tracker.is_live
    assert applied(replay(tracker, [4, 5, 6, 7, 8])) == [5, 6, 7, 8]
    assert tracker.is_live
    assert applied(live(tracker, [9])) == [9]


def test_a_gap_older_than_the_ring_is_lost(tracker):
    """The replay starts above what is missing: the hole is reported once, at the end, and the rest applies."""
    tracker.live(20, batch(20))
    steps = replay(tracker, [15, 16, 17, 18, 19, 20])
    assert steps[0] == Lost(5, 14)
    assert applied(steps[1:]) == [15, 16, 17, 18, 19, 20]


def test_a_replay_does_not_declare_lost_what_is_still_to_be_read(tracker):
    """The answer overtakes live batches that wait in the other socket: they still count."""
    tracker.probe()
    token = tracker.replay_token
    assert tracker.replayed(token, 8, batch(8)) == []
    assert applied(live(tracker, [5, 6, 7])) == [5, 6, 7, 8]
    assert tracker.replay_ended(token, complete=True) == []
    assert tracker.is_live


def test_holes_inside_a_replay_are_asked_for_again(tracker):
    """The marker came although 6 is missing: it is asked for again, from the last batch applied."""
    tracker.live(8, batch(8))
    steps = replay(tracker, [4, 5, 7, 8])
    assert applied(steps) == [5]
    assert steps[-1] == AskReplay(3, 5, 0)
    assert applied(replay(tracker, [5, 6, 7, 8])) == [6, 7, 8]


def test_a_hole_that_never_comes_is_lost_after_the_last_attempt():
    """A number consumed by a failed send is in no replay: three fruitless questions, then it is reported."""
    tracker = SequenceTracker(can_replay=True, limits=TrackerLimits(max_attempts=3))
    tracker.connected()
    attempts = [0]
    steps = replay(tracker, [0, 2])
    while isinstance(steps[-1], AskReplay):
        attempts.append(steps[-1].attempt)
        steps = replay(tracker, [0, 2])
    assert attempts == [0, 0, 1, 2]
    assert steps == [Lost(1, 1), Apply(2, batch(2))]
    assert tracker.is_live


def test_timeouts_are_retried_and_then_given_up(tracker):
    """A replay endpoint that never answers costs the hole, not the stream."""
    tracker.live(7, batch(7))
    assert replay(tracker, [], complete=False) == [AskReplay(3, 4, 1)]
    assert replay(tracker, [], complete=False) == [AskReplay(4, 4, 2)]
    assert replay(tracker, [], complete=False) == [Lost(5, 6), Apply(7, batch(7))]
    assert tracker.is_live


def test_a_dead_replay_endpoint_at_connect_never_counts_as_synced():
    """Nothing was heard at all: not live, until a live batch shows what was missed."""
    tracker = SequenceTracker(can_replay=True, limits=TrackerLimits(max_attempts=1))
    tracker.connected()
    assert replay(tracker, [], complete=False) == []
    assert not tracker.is_live
    assert tracker.live(3, batch(3)) == [AskReplay(2, 0, 0)]
    assert replay(tracker, [], complete=False) == [Lost(0, 2), Apply(3, batch(3))]
    assert tracker.is_live


def test_without_replay_a_late_start_and_a_gap_are_lost_at_once():
    """No replay endpoint: what is missing before a batch is reported just before that batch."""
    tracker = SequenceTracker(can_replay=False)
    assert tracker.connected() == []
    assert not tracker.is_live
    assert live(tracker, [3]) == [Lost(0, 2), Apply(3, batch(3))]
    assert live(tracker, [4, 7]) == [Apply(4, batch(4)), Lost(5, 6), Apply(7, batch(7))]
    assert tracker.is_live


def test_late_duplicates_do_nothing(tracker):
    """A batch that was applied comes again, live or replayed: nothing happens, it is counted."""
    assert live(tracker, [0, 4, 2]) == []
    tracker.probe()
    assert replay(tracker, [4]) == []
    assert (tracker.duplicates, tracker.is_live) == (4, True)


def test_restart_seen_at_batch_zero(tracker):
    """Batch 0 with other bytes: another life, and it applies at once (scenario 62)."""
    steps = live(tracker, [0], life=1)
    assert steps == [NewLife("batch 0 came again with other bytes"), Apply(0, batch(0, 1))]
    assert applied(live(tracker, [1], life=1)) == [1]


def test_restart_seen_late_asks_from_zero(tracker):
    """The first batch we see of the new life is 2: its beginning is replayed first."""
    steps = live(tracker, [2], life=1)
    assert steps == [NewLife("batch 2 came again with other bytes"), AskReplay(2, 0, 0)]
    assert applied(replay(tracker, [0, 1, 2], life=1)) == [0, 1, 2]


def test_restart_without_replay(tracker):
    """No replay: the new life's beginning is reported lost."""
    tracker = SequenceTracker(can_replay=False)
    tracker.connected()
    live(tracker, range(5))
    assert live(tracker, [2], life=1) == [
        NewLife("batch 2 came again with other bytes"),
        Lost(0, 1),
        Apply(2, batch(2, 1)),
    ]


def test_restart_that_overtook_us_is_unmasked_by_the_overlap(tracker):
    """After a reconnect the publisher is at 9, in another life: batch 4 has other bytes, so nothing of it is mixed in."""
    assert tracker.connected() == [AskReplay(2, 4, 0)]
    steps = replay(tracker, [4, 5, 6, 7, 8, 9], life=1)
    assert steps == [NewLife("batch 4 was replayed with other bytes than we applied"), AskReplay(3, 0, 0)]
    assert applied(replay(tracker, range(10), life=1)) == list(range(10))


def test_restart_with_fewer_batches_is_unmasked_by_an_empty_answer(tracker):
    """A publisher always keeps its last batch: one that has nothing from ours on is another."""
    tracker.connected()
    steps = replay(tracker, [])
    assert steps == [NewLife("the publisher no longer has batch 4, which we applied"), AskReplay(3, 0, 0)]


def test_a_quiet_restart_is_unmasked_by_a_probe(tracker):
    """Without a broken connection too, an empty answer to a probe tells of another life."""
    assert tracker.probe() == [AskReplay(2, 4, 0)]
    assert isinstance(replay(tracker, [])[0], NewLife)


def lose_tail(tracker, last):
    """Give up all after what was applied, up to batch `last`: nobody returns it."""
    steps = live(tracker, [last])
    while isinstance(steps[-1], AskReplay):
        steps = tracker.replay_ended(tracker.replay_token, complete=False)
    return steps


def test_a_restart_behind_a_lost_tail_is_unmasked_by_what_is_remembered():
    """The last batch was given up and has no bytes to compare: the question goes back to the newest that has."""
    limits = TrackerLimits(max_held_bytes=1, max_attempts=1)
    tracker = SequenceTracker(can_replay=True, limits=limits)
    tracker.connected()
    replay(tracker, range(5))
    assert lose_tail(tracker, 7) == [Lost(5, 7)]
    assert tracker.probe()[0].from_seq == 4
    steps = replay(tracker, range(4, 10), life=1)
    assert isinstance(steps[0], NewLife)
    assert not applied(steps[1:])
    assert applied(replay(tracker, range(10), life=1)) == list(range(10))


def test_the_same_life_behind_a_lost_tail_goes_on():
    """What it remembers proves it; what was reported lost stays lost."""
    limits = TrackerLimits(max_held_bytes=1, max_attempts=1)
    tracker = SequenceTracker(can_replay=True, limits=limits)
    tracker.connected()
    replay(tracker, range(5))
    lose_tail(tracker, 7)
    tracker.probe()
    assert applied(replay(tracker, range(4, 10))) == [8, 9]
    assert tracker.is_live


def test_a_lost_tail_longer_than_what_is_remembered_is_another_life():
    """Nothing can prove that the publisher is the same: all it tells from then on is of another one."""
    limits = TrackerLimits(max_held_bytes=1, max_attempts=1, remembered=3)
    tracker = SequenceTracker(can_replay=True, limits=limits)
    tracker.connected()
    replay(tracker, range(5))
    assert lose_tail(tracker, 7) == [Lost(5, 7)]
    assert tracker.probe()[0].from_seq == 7
    steps = replay(tracker, [7, 8])
    assert isinstance(steps[0], NewLife)
    assert applied(replay(tracker, range(9))) == list(range(9))


def test_an_unprovable_life_after_a_reconnect_is_a_new_one(tracker):
    """The ring no longer has our last batch: the same publisher or another, nobody knows, so nothing is credited."""
    tracker.connected()
    steps = replay(tracker, [8, 9])
    assert isinstance(steps[0], NewLife)
    assert replay(tracker, [8, 9])[0] == Lost(0, 7)


def test_reconnect_to_the_same_life(tracker):
    """The overlap has the same bytes: what was missed is applied and nothing is forgotten."""
    tracker.connected()
    assert live(tracker, [7]) == []
    assert applied(replay(tracker, [4, 5, 6, 7])) == [5, 6, 7]
    assert tracker.is_live


def test_reconnect_without_replay_is_a_doubt():
    """Nobody can say whether batches were missed: a gap of unknown length, and the stream goes on."""
    tracker = SequenceTracker(can_replay=False)
    tracker.connected()
    live(tracker, range(3))
    assert tracker.connected() == [Lost(3, None)]
    assert not tracker.is_live
    assert applied(live(tracker, [3])) == [3]
    assert tracker.is_live


def test_reconnect_without_replay_and_a_jump_is_a_new_life():
    """Neither contiguity nor a replay proves the life: it is another."""
    tracker = SequenceTracker(can_replay=False)
    tracker.connected()
    live(tracker, range(3))
    tracker.connected()
    steps = live(tracker, [9], life=1)
    assert [type(step) for step in steps] == [NewLife, Lost, Apply]
    assert steps[1] == Lost(0, 8)


def test_held_batches_die_with_their_connection(tracker):
    """What was held before a reconnect may be of the old life: the replay must bring it again."""
    tracker.live(9, batch(9))
    tracker.connected()
    steps = replay(tracker, [4, 5])
    assert applied(steps) == [5]
    assert tracker.is_live


def test_answers_to_an_abandoned_question_are_dropped(tracker):
    """A late answer to an earlier question changes nothing."""
    tracker.probe()
    old = tracker.replay_token
    tracker.connected()
    assert tracker.replayed(old, 5, batch(5)) == []
    assert tracker.replay_ended(old, complete=True) == []
    assert tracker.replay_token not in {None, old}


def test_a_straggler_of_the_old_life_is_dropped(tracker):
    """A live batch older than what was applied, unknown to the replay, was sent by a process now gone."""
    live(tracker, [0], life=1)
    assert isinstance(tracker.live(1, batch(4))[0], AskReplay)
    assert replay(tracker, [0], life=1)[0] == AskReplay(3, 0, 1)
    replay(tracker, [0], life=1)
    assert replay(tracker, [0], life=1) == []
    assert tracker.stale == 1
    assert applied(live(tracker, [1], life=1)) == [1]


def test_a_straggler_with_a_known_number_is_dropped():
    """The new life was replayed before the last words of the old one were read: they are older, so they do not count."""
    tracker = SequenceTracker(can_replay=True)
    tracker.connected()
    replay(tracker, [0, 1], life=1)
    assert live(tracker, [0, 1], life=0) == []
    assert (tracker.stale, tracker.duplicates) == (2, 0)
    assert applied(live(tracker, [2], life=1)) == [2]


def test_live_and_replay_that_disagree_are_not_mixed(tracker):
    """Batch 6 came live and is replayed with other bytes: two lives, so all is forgotten and asked for again."""
    tracker.live(6, batch(6))
    token = tracker.replay_token
    tracker.replayed(token, 4, batch(4))
    steps = tracker.replayed(token, 6, batch(6, 1))
    assert steps == [NewLife("batch 6 came live and replayed with different bytes"), AskReplay(3, 0, 0)]


def test_a_batch_held_twice_takes_its_room_once():
    """A batch that came live and again in the replay is counted once against the bound in bytes."""
    limits = TrackerLimits(max_held_bytes=3 * len(batch(2)))
    tracker = SequenceTracker(can_replay=True, limits=limits)
    tracker.connected()
    live(tracker, [2, 3])
    steps = replay(tracker, [0, 2, 3, 4])
    assert applied(steps) == [0]
    assert applied(replay(tracker, [0, 1])) == [1, 2, 3, 4]


def test_a_full_waiting_room_costs_another_question():
    """Live batches beyond the bound are refused, remembered, and asked for once the others are applied."""
    tracker = SequenceTracker(can_replay=True, limits=TrackerLimits(max_held_batches=2))
    tracker.connected()
    assert live(tracker, [1, 2, 3, 4]) == []
    steps = replay(tracker, [0, 1, 2])
    assert applied(steps) == [0, 1, 2]
    assert steps[-1] == AskReplay(2, 2, 0)
    assert applied(replay(tracker, [2, 3, 4])) == [3, 4]
    assert tracker.is_live


def test_the_waiting_room_is_bounded_in_bytes():
    """Few but huge batches are refused too; when the replay cannot bring them they are reported."""
    limits = TrackerLimits(max_held_bytes=len(batch(5)), max_attempts=1)
    tracker = SequenceTracker(can_replay=True, limits=limits)
    tracker.connected()
    live(tracker, [5, 6, 7])
    assert replay(tracker, [], complete=False) == [Lost(0, 4), Apply(5, batch(5)), Lost(6, 7)]
    assert tracker.is_live


def test_probe_finds_a_lost_tail(tracker):
    """The last batch before silence was dropped: only a question brings it."""
    assert tracker.probe() == [AskReplay(2, 4, 0)]
    assert tracker.probe() == []
    assert applied(replay(tracker, [4, 5])) == [5]


def test_a_hole_during_a_probe_is_known_at_once(tracker):
    """The next live batch shows the hole; that a probe still waits for its answer must not keep the stream live."""
    tracker.probe()
    assert tracker.is_live
    assert live(tracker, [6]) == []
    assert not tracker.is_live
    assert applied(replay(tracker, [4, 5])) == [5, 6]
    assert tracker.is_live


def test_a_quiet_probe_takes_no_patience_from_the_next_hole(tracker):
    """A probe that found nothing missing was no failure: a hole later is asked for at once, and as often as any."""
    tracker.probe()
    replay(tracker, [4])
    (ask,) = live(tracker, [6])
    assert (ask.from_seq, ask.attempt) == (4, 0)


def test_a_replay_that_never_ends_does_not_hold_up_a_live_stream():
    """Batches in a row from 0 to the newest live one are everything, whether or not the replay answers."""
    tracker = SequenceTracker(can_replay=True)
    tracker.connected()
    assert applied(live(tracker, [0, 1])) == [0, 1]
    assert tracker.is_live


def test_a_lost_end_marker_does_not_hold_up_a_stream_that_was_mended(tracker):
    """The hole is filled and the newest live batch applied: the marker has nothing to add."""
    assert applied(live(tracker, [6])) == []
    token = tracker.replay_token
    assert applied(tracker.replayed(token, 4, batch(4)) + tracker.replayed(token, 5, batch(5))) == [5, 6]
    assert tracker.is_live


def test_probe_without_replay_does_nothing():
    """There is nobody to ask."""
    assert SequenceTracker(can_replay=False).probe() == []
