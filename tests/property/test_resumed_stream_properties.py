"""A stream taken up from a snapshot, against every publisher it may meet: kept only when proven."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.events import (
    Apply,
    BlockRemoved,
    EventBatch,
    Lost,
    NewLife,
    SequenceTracker,
    Step,
    StreamPosition,
    encode_batch,
)


def batch(seq: int, life: int) -> bytes:
    return encode_batch(EventBatch(1000.0 * life + seq, [BlockRemoved([seq, life])], 0))


def meet(tracker: SequenceTracker, ring: dict[int, bytes], live: dict[int, bytes], live_first: bool) -> list[Step]:
    """Connect, answer every replay from the ring, and bring what comes live, before the answers or after them."""
    steps = tracker.connected()
    if live_first:
        steps += [step for seq, payload in live.items() for step in tracker.live(seq, payload)]
    for _ in range(10):
        token = tracker.replay_token
        if token is None:
            break
        asked_from = max(tracker.last_seq, 0)
        for seq, payload in ring.items():
            if seq >= asked_from:
                steps += tracker.replayed(token, seq, payload)
        steps += tracker.replay_ended(token, complete=True)
    if not live_first:
        steps += [step for seq, payload in live.items() for step in tracker.live(seq, payload)]
    return steps


@given(
    stood_at=st.integers(0, 30),
    newest=st.integers(0, 60),
    buffer=st.integers(1, 20),
    late=st.integers(0, 3),
    reborn=st.booleans(),
    live_first=st.booleans(),
    can_replay=st.booleans(),
)
@settings(max_examples=600, deadline=None)
def test_what_is_not_proven_is_doubted_or_forgotten(
    stood_at: int, newest: int, buffer: int, late: int, reborn: bool, live_first: bool, can_replay: bool
) -> None:
    """Nothing applies to an unproven past; a proven one loses nothing, and applies all that came since, once."""
    newest = newest if reborn else max(newest, stood_at)
    life = 2 if reborn else 1
    tracker = SequenceTracker(can_replay=can_replay, resume_at=StreamPosition.at(stood_at, batch(stood_at, 1)))
    published = {seq: batch(seq, life) for seq in range(newest + 1)}
    ring = {seq: payload for seq, payload in published.items() if seq > newest - buffer} if can_replay else {}
    live = {newest + 1 + i: batch(newest + 1 + i, life) for i in range(late)}
    steps = meet(tracker, {**ring, **(live if live_first and can_replay else {})}, live, live_first)
    first_apply = next((i for i, step in enumerate(steps) if isinstance(step, Apply)), len(steps))
    warnings = [step for step in steps[:first_apply] if isinstance(step, Lost | NewLife)]
    applied = [step.seq for step in steps if isinstance(step, Apply)]
    provable = can_replay and min(ring) <= stood_at <= newest
    if provable and not reborn:
        assert not [step for step in steps if isinstance(step, Lost | NewLife)]
        assert applied == list(range(stood_at + 1, newest + 1 + late))
    elif applied:
        assert warnings
    if reborn and (provable or (can_replay and newest < stood_at)):
        assert any(isinstance(step, NewLife) for step in steps)
    assert applied == sorted(set(applied))
    for step in steps:
        if isinstance(step, Apply):
            assert step.payload == {**published, **live}[step.seq]
