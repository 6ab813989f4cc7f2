"""The subscriber without sockets: when it polls, how it fails, what it believes."""

import pytest

from kvatlas.chaos import Timeline, VirtualSubscriber
from kvatlas.simulator import FaultPlan, FaultyStream, parse_faults
from kvatlas.stream import SubscriberConfig


class Sink:
    """Notes what it is told, with the time."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.seen: list[tuple[object, ...]] = []

    def on_life(self, _reason: str) -> None:
        self.seen.append((round(self.timeline.now_s, 3), "life"))

    def on_batch(self, seq: int, _payload: bytes) -> None:
        self.seen.append((round(self.timeline.now_s, 3), seq))

    def on_gap(self, first_seq: int, last_seq: int | None) -> None:
        self.seen.append((round(self.timeline.now_s, 3), "gap", first_seq, last_seq))

    def on_status(self, status: str, _reason: str) -> None:
        self.seen.append((round(self.timeline.now_s, 3), status))


class Desk:
    def __init__(self, *faults: str, replay: bool = True) -> None:
        self.timeline = Timeline()
        self.plan = FaultPlan(parse_faults(faults), clock=self.timeline.clock)
        self.stream = FaultyStream(self.plan)
        self.sink = Sink(self.timeline)
        config = SubscriberConfig(endpoint="live", replay_endpoint="replay" if replay else None)
        self.subscriber = VirtualSubscriber(config, self.stream, self.sink, self.timeline)
        self.subscriber.start()

    def publish(self) -> None:
        self.subscriber.take(self.stream.publish(b"payload %d" % self.stream.next_seq))

    def until(self, seconds: float) -> list[tuple[object, ...]]:
        """What the sink was told until a time, without what it was told before."""
        before = len(self.sink.seen)
        self.timeline.run_until(seconds)
        return self.sink.seen[before:]


def test_polls_become_rare_and_come_back_with_the_first_batch() -> None:
    """At 5, 15, 35, 75 and 135 s of quiet; five seconds after a batch again."""
    desk = Desk("silence:from=1")
    desk.until(0.5)
    assert desk.subscriber.next_probe_s == 5.0
    polls = set()
    for second in range(1, 140):
        desk.until(float(second))
        polls.add(desk.subscriber.next_probe_s)
    assert sorted(polls) == [5.0, 15.0, 35.0, 75.0, 135.0, 195.0]
    desk.publish()
    desk.publish()
    assert desk.until(143.9) == []
    assert desk.until(144.1) == [(144.001, 1)]


def test_a_refused_replay_is_retried_with_patience_and_then_given_up() -> None:
    """Three questions, three seconds each; then the hole is lost and what was held applies."""
    desk = Desk("drop:from=0,count=1", "replay:mode=refused,at=1s")
    desk.until(1.0)
    desk.publish()
    desk.publish()
    assert desk.until(12.0) == [(10.6, "gap", 0, 0), (10.6, 1), (10.6, "live")]


def test_a_distrusted_stream_stays_lost_until_it_speaks() -> None:
    """Somebody knows that it is silent; only a batch lifts that."""
    desk = Desk()
    desk.until(1.0)
    desk.subscriber.distrust("its engine works")
    assert [each[1] for each in desk.until(30.0)] == []
    assert desk.sink.seen[-1] == (1.0, "lost")
    desk.publish()
    assert desk.sink.seen[-2:] == [(30.0, 0), (30.0, "live")]


@pytest.mark.parametrize("replay", [True, False])
def test_a_broken_connection_is_told_at_once(*, replay: bool) -> None:
    """And made again a moment after the publisher is back."""
    desk = Desk("cut:at=1s,for=2s", replay=replay)
    desk.publish()
    desk.until(1.0)
    desk.subscriber.take(desk.stream.due())
    assert desk.sink.seen[-1] == (1.0, "lost")
    desk.until(3.0)
    desk.subscriber.take(desk.stream.due())
    back = [(3.1, "syncing"), (3.101, "live")] if replay else [(3.1, "syncing"), (3.1, "gap", 1, None)]
    assert desk.until(4.0) == back
