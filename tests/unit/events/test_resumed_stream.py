"""A stream taken up where a snapshot left it: the same life, another one, or one that nobody can prove."""

import pytest

from kvatlas.events import (
    Apply,
    AskReplay,
    BlockRemoved,
    EventBatch,
    Lost,
    NewLife,
    SequenceTracker,
    StreamPosition,
    encode_batch,
)


def batch(seq, life=0):
    """Bytes of one batch; a later life has a later clock."""
    return encode_batch(EventBatch(1000.0 * life + seq, [BlockRemoved([seq])], life))


def resumed(seq=9, life=0, *, can_replay=True):
    """A tracker that stands after batch `seq`, and what it says when the stream is connected."""
    position = StreamPosition.at(seq, batch(seq, life))
    tracker = SequenceTracker(can_replay=can_replay, resume_at=position)
    return tracker, tracker.connected()


def replay(tracker, seqs, life=0):
    """Answer the running replay and return all steps."""
    token = tracker.replay_token
    steps = [step for seq in seqs for step in tracker.replayed(token, seq, batch(seq, life))]
    return steps + tracker.replay_ended(token, complete=True)


def test_a_position_says_the_same_in_every_process():
    """The digest is of the bytes alone: XXH3-64 with seed 0."""
    assert StreamPosition.at(3, b"abc") == StreamPosition(3, 0x78AF5F94892F3950, None)
    assert StreamPosition.at(9, batch(9)).ts == 9.0


def test_the_first_question_is_about_the_last_batch():
    """The replay is asked from the batch that the snapshot knows, and nothing applies before the answer."""
    tracker, steps = resumed()
    assert steps == [AskReplay(1, 9, 0)]
    assert (tracker.last_seq, tracker.is_live) == (9, False)
    assert tracker.live(10, batch(10)) == []


def test_same_bytes_are_the_same_life():
    """The last batch comes back as it was: the difference applies, nothing is lost or forgotten."""
    tracker, _ = resumed()
    assert replay(tracker, [9, 10, 11]) == [Apply(10, batch(10)), Apply(11, batch(11))]
    assert tracker.is_live


def test_nothing_new_is_the_same_life():
    """Only the last batch comes back: the column is proven as it stands."""
    tracker, _ = resumed()
    assert replay(tracker, [9]) == []
    assert tracker.is_live
    assert tracker.live(10, batch(10)) == [Apply(10, batch(10))]


def test_live_batches_wait_for_the_proof():
    """What comes live before the answer is applied after it, in order."""
    tracker, _ = resumed()
    tracker.live(11, batch(11))
    assert replay(tracker, [9, 10, 11]) == [Apply(10, batch(10)), Apply(11, batch(11))]


def test_other_bytes_are_another_life():
    """A restarted engine has reached our number: its batch differs, so all is forgotten and asked for anew."""
    tracker, _ = resumed()
    steps = tracker.replayed(tracker.replay_token, 9, batch(9, life=1))
    assert [type(step) for step in steps] == [NewLife, AskReplay]
    assert [step.seq for step in replay(tracker, range(3), life=1) if isinstance(step, Apply)] == [0, 1, 2]


def test_an_engine_without_our_batch_is_another_life():
    """The replay is empty: the publisher has not got so far, so it is not the one we knew."""
    tracker, _ = resumed()
    assert [type(step) for step in replay(tracker, [])] == [NewLife, AskReplay]


def test_a_replay_that_no_longer_reaches_is_a_loss():
    """The ring has moved on: what lies between is lost, and the life goes on in doubt instead of being forgotten."""
    tracker, _ = resumed()
    assert replay(tracker, [50, 51]) == [Lost(10, 49), Apply(50, batch(50)), Apply(51, batch(51))]
    assert tracker.is_live


def test_a_replay_that_just_misses_our_batch_is_a_possible_loss():
    """The ring begins right after our batch: the numbers fit, but nothing proves the life, so a loss is reported."""
    tracker, _ = resumed()
    assert replay(tracker, [10, 11]) == [Lost(10, None), Apply(10, batch(10)), Apply(11, batch(11))]


def test_a_later_replay_with_an_older_clock_is_another_life():
    """Batches above ours, but older than ours: no publisher goes back in time."""
    tracker, _ = resumed(seq=9, life=3)
    steps = tracker.replayed(tracker.replay_token, 50, batch(50, life=0))
    assert isinstance(steps[0], NewLife)


def test_the_lenience_ends_with_the_first_proof():
    """Once proven, a stream that reconnects is judged as any other: a replay that starts above is another life."""
    tracker, _ = resumed()
    replay(tracker, [9, 10])
    tracker.connected()
    assert any(isinstance(step, NewLife) for step in replay(tracker, [50]))


def test_lower_live_numbers_are_another_life():
    """After a start nothing old can come live: a number below ours is a restart."""
    tracker, _ = resumed()
    assert any(isinstance(step, NewLife) for step in tracker.live(2, batch(2, life=1)))


@pytest.mark.parametrize("seq", [10, 57])
def test_without_replay_all_may_be_lost(seq):
    """Nobody can prove the life: a loss is told at once, and batches that follow apply."""
    tracker, steps = resumed(can_replay=False)
    assert steps == [Lost(10, None)]
    later = tracker.live(seq, batch(seq))
    assert [step for step in later if isinstance(step, Apply)] == [Apply(seq, batch(seq))]
    assert not any(isinstance(step, NewLife) for step in later)


def test_without_replay_a_restart_shows_in_the_numbers():
    """Numbers that go back are another life, with or without a replay endpoint."""
    tracker, _ = resumed(can_replay=False)
    assert any(isinstance(step, NewLife) for step in tracker.live(0, batch(0, life=1)))


def test_silent_replays_end_in_a_loss_and_not_in_oblivion():
    """The replay endpoint is dead and batches come live: after the last attempt what lies between is given up."""
    tracker, _ = resumed()
    tracker.live(20, batch(20))
    steps = []
    for _ in range(10):
        if tracker.replay_token is not None:
            steps += tracker.replay_ended(tracker.replay_token, complete=False)
    assert Lost(10, 19) in steps
    assert Apply(20, batch(20)) in steps
    assert not any(isinstance(step, NewLife) for step in steps)
