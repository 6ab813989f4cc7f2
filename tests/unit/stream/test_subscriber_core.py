"""The rules between arrivals and a sink, without sockets and with the time given."""

import random

import pytest

from kvatlas.events import AskReplay, EventBatch, TrackerLimits, encode_batch
from kvatlas.stream import Spread, StreamCounters, SubscriberConfig, SubscriberCore
from support.runs import runs_of

REPLAY = "tcp://engine:2"
LIVE = ("status", "live", "caught up with the publisher")
WAITING = ("status", "syncing", f"waiting for {REPLAY} to replay what was missed")


def payload(seq: int, ts: float | None = None) -> bytes:
    """A batch of that number; later ones are younger unless told otherwise."""
    return encode_batch(EventBatch(100.0 + seq if ts is None else ts, []))


def row(first: int, end: int) -> list[tuple[int, bytes]]:
    """Batches that follow one another."""
    return [(seq, payload(seq)) for seq in range(first, end)]


class Plain:
    """Writes down what it is told, batches by their numbers."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def on_life(self, reason: str) -> None:
        self.told.append(("life", reason))

    def on_batch(self, seq: int, data: bytes) -> None:
        assert data == payload(seq)
        self.told.append(seq)

    def on_gap(self, first_seq: int, last_seq: int | None) -> None:
        self.told.append(("gap", first_seq, last_seq))

    def on_status(self, status: str, reason: str) -> None:
        self.told.append(("status", status, reason))

    @property
    def statuses(self) -> list[str]:
        return [told[1] for told in self.told if isinstance(told, tuple) and told[0] == "status"]


class Runs(Plain):
    """The same, and takes runs."""

    def on_batches(self, first_seq: int, payloads: list[bytes]) -> None:
        assert payloads == [payload(seq) for seq in range(first_seq, first_seq + len(payloads))]
        self.told.append(list(range(first_seq, first_seq + len(payloads))))


class Link:
    """A core with its sink and the questions it had; answers bring what they are told."""

    def __init__(
        self, sink: Plain | None = None, *, replay: bool = True, limits: TrackerLimits | None = None, **config: object
    ) -> None:
        self.sink = sink or Plain()
        self.questions: list[AskReplay] = []
        self.core = SubscriberCore(
            SubscriberConfig("tcp://engine:1", REPLAY if replay else None, **config),
            self.sink,
            counters=StreamCounters(),
            ask=self.questions.append,
            spread=Spread(most=1.0),
            limits=limits,
        )

    def settle(self) -> "Link":
        self.core.carry_out_all()
        self.core.report_order()
        return self

    def take(self, *seqs: int) -> "Link":
        for seq in seqs:
            self.core.take(seq, payload(seq))
        return self.settle()

    def take_all(self, arrivals: list[tuple[int, bytes]]) -> None:
        """Bring them as the reader does: those that follow one another by number as one run."""
        for run in runs_of(arrivals):
            self.core.take_run(*run)

    def answer(self, *seqs: int, complete: bool = True) -> "Link":
        """Send the newest question and answer it."""
        self.core.asked(self.questions[-1], 0.0)
        for seq in seqs:
            self.core.take_replayed(seq, payload(seq))
        self.core.end_replay(complete=complete)
        return self.settle()

    def live(self, *seqs: int) -> "Link":
        """Connect, and catch up by these batches. What was told until then is forgotten."""
        self.core.connected()
        self.settle()
        if self.questions:
            self.answer(*seqs)
        else:
            self.take(*seqs)
        assert self.sink.statuses[-1] == "live"
        self.sink.told.clear()
        return self


# -- the connection --


def test_a_stream_is_live_once_replay_brought_all_before_it() -> None:
    """Connected is not live: the first question goes out, and its answer makes it so."""
    link = Link()
    link.core.connecting("no connection yet")
    link.core.connected()
    assert not link.core.tracker.is_live
    link.settle()
    assert [(question.from_seq, question.attempt) for question in link.questions] == [(0, 0)]
    link.answer(0, 1)
    assert link.sink.told == [("status", "connecting", "no connection yet"), WAITING, 0, 1, LIVE]
    assert (link.core.last_seq, link.core.counters.connections, link.core.counters.replays) == (1, 1, 1)


def test_without_replay_the_first_batch_proves() -> None:
    """Without a replay endpoint nothing is asked: the first batch tells whether something was missed."""
    link = Link(replay=False)
    link.core.connected()
    link.settle()
    assert link.sink.statuses == ["syncing"]
    link.take(2)
    assert link.sink.told[1:] == [("gap", 0, 1), 2, LIVE]
    assert link.questions == []
    assert link.core.counters.gaps == 1


def test_connecting_is_told_until_there_was_a_connection_or_a_loss() -> None:
    """Each new reason once; a stream that was there is lost, not connecting."""
    link = Link()
    for reason in ("refused", "refused", "no route"):
        link.core.connecting(reason)
    assert [told[2] for told in link.sink.told] == ["refused", "no route"]
    link.live(0)
    link.core.connecting("refused")
    link.core.gone("reset")
    link.core.connecting("refused")
    link.core.gone("again")
    assert link.sink.told == [("status", "lost", "reset")]


def test_a_stream_that_is_gone_is_live_only_after_another_connection() -> None:
    """What still comes is delivered, and the status stays; then replay proves the same life."""
    link = Link().live(0)
    link.core.gone("reset")
    link.take(1)
    assert link.sink.told == [("status", "lost", "reset"), 1]
    link.core.connected()
    link.settle().answer(1)
    assert link.sink.told[2:] == [WAITING, LIVE]
    assert link.core.counters.connections == 2


def test_a_lost_stream_that_hears_of_a_new_life_stays_lost() -> None:
    """A replay may bring the new life before the live connection does: its listener must not wait for "live" then."""
    link = Link().live(0)
    link.core.probe()
    link.settle()
    link.core.asked(link.questions[-1], 0.0)
    link.core.gone("reset")
    link.core.take_replayed(0, payload(0, 500.0))
    link.settle()
    assert [told[0] for told in link.sink.told] == ["status", "life", "status"]
    assert link.sink.told[-1] == ("status", "lost", "reset")
    assert link.core.counters.lives == 1


def test_an_overflow_after_the_connection_broke_leaves_it_lost() -> None:
    """What the owner drops from a dead connection's rest is no news of a living one."""
    link = Link().live(0)
    link.core.gone("reset")
    link.core.must_mend = True
    link.core.report_syncing()
    assert link.sink.told == [("status", "lost", "reset")]
    link.core.connected()
    assert link.sink.told[-1][1] == "syncing"
    assert "dropped" in link.sink.told[-1][2]


# -- doubts --


@pytest.mark.parametrize("run", [False, True])
def test_a_batch_ends_a_distrust(run: bool) -> None:
    """An answer that has nothing new does not, a batch in order does; told again, another reason is told too."""
    link = Link(Runs()).live(0)
    link.core.distrust("silent")
    link.core.distrust("silent")
    link.core.distrust("silent for long")
    link.core.probe()
    link.settle().answer(0)
    reasons = [told[2] for told in link.sink.told]
    assert reasons == ["silent", "silent for long"]
    if run:
        link.take_all(row(1, 3))
        link.settle()
    else:
        link.take(1)
    assert link.sink.told[2:] == [[1, 2] if run else 1, LIVE]


def test_a_replayed_batch_ends_a_distrust() -> None:
    """The tail that was asked for says where the engine is."""
    link = Link().live(0)
    link.core.distrust("silent")
    link.core.probe()
    link.settle().answer(0, 1)
    assert link.sink.told == [("status", "lost", "silent"), 1, LIVE]


def test_a_duplicate_ends_no_distrust() -> None:
    """What was delivered before is no batch of a living stream."""
    link = Link().live(0)
    link.core.distrust("silent")
    link.take(0)
    assert link.sink.told == [("status", "lost", "silent")]


def test_a_new_connection_ends_a_distrust() -> None:
    """The doubt was about the connection before."""
    link = Link().live(0)
    link.core.distrust("silent")
    link.core.gone("reset")
    link.core.connected()
    link.settle().answer(0)
    assert link.sink.statuses == ["lost", "lost", "syncing", "live"]


# -- batches --


def test_a_run_is_one_call() -> None:
    """Batches that follow one another reach a sink that takes runs in one call; a single one as ever."""
    link = Link(Runs()).live(0)
    link.take_all(row(1, 6))
    link.take_all(row(6, 7))
    link.take_all([])
    assert link.sink.told == [[1, 2, 3, 4, 5], 6]
    assert (link.core.counters.batches, link.core.last_seq) == (7, 6)


def test_a_run_is_a_call_each_for_others() -> None:
    """A sink without `on_batches` hears of each batch."""
    link = Link(Plain()).live(0)
    link.take_all(row(1, 4))
    assert link.sink.told == [1, 2, 3]
    assert (link.core.counters.batches, link.core.last_seq) == (4, 3)


def test_a_run_stops_where_order_does() -> None:
    """What followed is delivered before the hole is judged; the rest waits for the answer."""
    link = Link(Runs()).live(0)
    link.take_all([*row(1, 3), *row(4, 6)])
    assert link.sink.told == [[1, 2]]
    assert len(link.core.steps) == 1
    link.settle()
    assert link.questions[-1].from_seq == 2
    link.answer(2, 3)
    assert link.sink.told == [[1, 2], WAITING, 3, 4, 5, LIVE]


def test_nothing_overtakes_what_is_to_be_done() -> None:
    """While steps wait, batches that follow wait behind them."""
    link = Link(Runs()).live(0)
    link.core.take_later(1, payload(1))
    link.core.take(2, payload(2))
    link.take_all(row(3, 5))
    assert link.sink.told == []
    link.settle()
    assert link.sink.told == [1, 2, 3, 4]


def test_a_duplicate_within_a_run_splits_it_only() -> None:
    """It is dropped; what comes before and after is delivered at once."""
    link = Link(Runs()).live(0)
    link.take_all([*row(1, 3), *row(1, 2), *row(3, 5)])
    assert link.sink.told == [[1, 2], [3, 4]]
    assert link.core.tracker.duplicates == 1


def test_another_life_within_a_run() -> None:
    """Its batches wait for the sink to forget the old one."""
    link = Link(Runs(), replay=False).live(0)
    link.take_all([*row(1, 3), (0, payload(0, 900.0)), (1, payload(1, 901.0))])
    assert link.sink.told == [[1, 2]]
    link.sink.on_batch = lambda seq, _: link.sink.told.append(seq)
    link.settle()
    assert [told if isinstance(told, int) else told[0] for told in link.sink.told[1:]] == [
        "status",
        "life",
        0,
        1,
        "status",
    ]
    assert link.core.last_seq == 1


def test_a_sink_that_ends_its_stream_gets_no_more_of_the_run() -> None:
    """`end` holds within a run too."""
    link = Link(Plain()).live(0)
    deliver = link.sink.on_batch

    def on_batch(seq: int, data: bytes) -> None:
        deliver(seq, data)
        if seq == 2:
            link.core.end()

    link.sink.on_batch = on_batch
    link.take_all(row(1, 6))
    assert link.sink.told == [1, 2]
    assert link.core.last_seq == 2


def test_a_sink_that_ends_its_stream_gets_no_later_run() -> None:
    """The same for what follows a duplicate in the same arrivals, and for a sink that takes runs."""
    link = Link(Runs()).live(0)
    deliver = link.sink.on_batches

    def on_batches(first_seq: int, payloads: list[bytes]) -> None:
        deliver(first_seq, payloads)
        link.core.end()

    link.sink.on_batches = on_batches
    link.take_all([*row(1, 3), *row(1, 2), *row(3, 6), *row(3, 4), *row(6, 7)])
    assert link.sink.told == [[1, 2]]


# -- a sink that fails --


class Failing(Runs):
    """Takes nothing."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.fails = names

    def __getattribute__(self, name: str):
        if name.startswith("on_") and name in self.fails:

            def fail(*_: object) -> None:
                raise ValueError(name)

            return fail
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    ("count", "blamed"), [(1, "batch 1: ValueError('on_batch')"), (3, "batches 1 to 3: ValueError('on_batches')")]
)
def test_a_failing_delivery_is_counted_and_the_stream_goes_on(count: int, blamed: str) -> None:
    """The sink is told which batches it failed on, under the status that holds; they count as delivered."""
    link = Link(Failing()).live(0)
    link.sink.fails = ("on_batch", "on_batches")
    link.take_all(row(1, 1 + count))
    link.settle()
    assert link.sink.told == [("status", "live", f"the receiver failed on {blamed}")]
    assert (link.core.counters.sink_errors, link.core.last_seq) == (1, count)
    link.sink.fails = ()
    link.take(count + 1)
    assert link.sink.told[1:] == [count + 1]


def test_a_sink_that_fails_on_everything_ends_nothing() -> None:
    """Every failure is counted, that to take the news of a failure too."""
    sink = Failing("on_batch", "on_batches", "on_gap", "on_life", "on_status")
    link = Link(sink, replay=False)
    link.core.connected()
    link.settle()
    errors = link.core.counters.sink_errors
    assert errors == 1
    link.take_all([*row(1, 3), (0, payload(0, 900.0))])
    link.settle()
    assert (link.core.counters.gaps, link.core.counters.lives, link.core.counters.batches) == (1, 1, 3)
    assert link.core.counters.sink_errors > errors + 5
    assert link.core.tracker.is_live


# -- questions --


def test_failed_questions_are_repeated_ever_later_and_then_given_up() -> None:
    """A hole that nobody fills is reported after as many questions as the tracker may ask."""
    link = Link(limits=TrackerLimits(max_attempts=3), retry_s=0.2, retry_max_s=0.5).live(0)
    link.take(2)
    delays = []
    for _ in range(3):
        delays.append(link.core.ask_delay_s(link.questions[-1].attempt, 100.0))
        link.answer(complete=False)
    assert delays == [0.0, 0.2, 0.4]
    assert link.core.ask_delay_s(3, 100.0) == 0.5
    assert link.sink.told == [WAITING, ("gap", 1, 1), 2, LIVE]
    assert link.core.counters.failed_replays == 3


def test_questions_keep_a_distance() -> None:
    """Never two at once: a fresh one waits for 50 ms since the last."""
    link = Link().live(0)
    link.core.probe()
    link.settle()
    link.core.asked(link.questions[-1], 10.0)
    assert link.core.ask_delay_s(0, 10.0) == pytest.approx(0.05)
    assert link.core.ask_delay_s(0, 10.02) == pytest.approx(0.03)
    assert link.core.ask_delay_s(0, 11.0) == 0.0


def test_answers_belong_to_the_question_that_was_sent() -> None:
    """After a reconnect the tracker waits for another question: what answers the one before is dropped."""
    link = Link().live(0)
    link.core.probe()
    link.settle()
    old = link.questions[-1]
    link.core.asked(old, 0.0)
    link.core.connected()
    link.settle()
    assert not link.core.is_wanted(old)
    assert link.core.is_wanted(link.questions[-1])
    link.core.take_replayed(1, payload(1))
    link.core.end_replay(complete=True)
    link.settle()
    assert link.sink.statuses[-1] == "syncing"
    link.answer(0, 1)
    assert link.sink.told[-2:] == [1, LIVE]


def test_a_question_given_up_by_its_token_leaves_a_newer_one_open() -> None:
    """A timer that comes late ends nothing but what it was set for; it counts as failed."""
    link = Link().live(0)
    link.core.probe()
    link.settle()
    old = link.questions[-1]
    link.core.asked(old, 0.0)
    link.core.connected()
    link.settle()
    link.core.end_replay(old.token, complete=False)
    link.settle()
    assert link.core.is_wanted(link.questions[-1])
    assert link.core.counters.failed_replays == 1


# -- what the owner dropped --


def test_dropped_batches_are_asked_for() -> None:
    """Until the owner says that a replay was complete, the status tells of them."""
    link = Link().live(0)
    link.core.must_mend = True
    link.core.report_syncing()
    link.take(1)
    assert link.sink.statuses == ["syncing"]
    assert "dropped" in link.sink.told[0][2]
    link.core.mend()
    link.settle()
    assert link.questions[-1].from_seq == 1
    link.core.must_mend = False  # the owner, at the end marker
    link.answer(1, 2)
    assert link.sink.told[-2:] == [2, LIVE]


def test_dropped_batches_are_lost_without_replay() -> None:
    """Nobody knows how many: a gap without an end, and the stream goes on."""
    link = Link(replay=False).live(0)
    link.core.must_mend = True
    link.core.mend()
    link.settle()
    assert link.sink.told == [("gap", 1, None)]
    assert not link.core.must_mend
    assert link.core.last_seq == 0
    link.take(1)
    assert link.sink.told[1:] == [1]


# -- the tail --


def quiet_probe(link: Link, *seqs: int) -> Link:
    """The next probe is due and brings these."""
    link.core.probe_quiet_stream(link.core.probe_due_s, idle=True)
    link.settle()
    return link.answer(*seqs)


def test_probes_become_rarer_until_a_batch_comes() -> None:
    """Each waits twice as long as the one before, up to the most; a live batch starts anew."""
    link = Link(probe_s=5.0, probe_max_s=30.0).live(0)
    due = []
    for _ in range(5):
        due.append(link.core.probe_due_s)
        link.core.probe_quiet_stream(link.core.probe_due_s, idle=False)
    assert due == [5.0, 15.0, 35.0, 65.0, 95.0]
    link.core.heard(100.0)
    assert link.core.probe_due_s == 105.0


def test_a_probe_that_is_due_asks_only_of_an_idle_connected_stream() -> None:
    """What waits to be read comes first, and nobody is asked about a connection that is gone."""
    link = Link().live(0)
    asked = len(link.questions)
    link.core.probe_quiet_stream(5.0, idle=False)
    link.settle()
    link.core.gone("reset")
    link.core.probe_quiet_stream(15.0, idle=True)
    link.core.probe()
    link.settle()
    assert len(link.questions) == asked
    link.core.is_connected = True
    link.core.probe_quiet_stream(35.0, idle=True)
    link.settle()
    assert [question.from_seq for question in link.questions[asked:]] == [0]


def test_a_probe_asks_nothing_while_a_question_is_open() -> None:
    """One question at a time."""
    link = Link().live(0)
    for _ in range(3):
        link.core.probe()
        link.settle()
    assert len(link.questions) == 2


def test_without_replay_a_probe_asks_nothing() -> None:
    """There is nobody to ask."""
    link = Link(replay=False).live(0)
    link.core.probe_quiet_stream(5.0, idle=True)
    link.settle()
    assert (link.questions, link.sink.told) == ([], [])


def test_two_late_probes_are_a_wrong_topic() -> None:
    """One that brings a batch may be a lost tail, two mean that nothing comes live; the reason says what to check."""
    link = quiet_probe(Link(topic="kv").live(0), 0, 1)
    assert link.sink.told == [1]
    quiet_probe(quiet_probe(link, 1, 2), 2)
    assert link.sink.told[-1] == (
        "status",
        "syncing",
        "batches come by replay only, late: check tcp://engine:1 and the topic 'kv'",
    )


def test_only_live_batches_clear_late_probes() -> None:
    """A probe that brings nothing says nothing of the topic; a live batch does, and a new connection begins anew."""
    link = Link().live(0)
    quiet_probe(quiet_probe(link, 0, 1), 1)
    quiet_probe(quiet_probe(link, 1), 1, 2)
    quiet_probe(link, 2)
    assert link.sink.statuses[-1] == "syncing"
    assert "the topic" not in link.sink.told[-1][2]
    link.core.heard(50.0)
    link.take(3)
    assert link.sink.told[-2:] == [3, LIVE]
    quiet_probe(quiet_probe(link, 3, 4), 4)
    assert link.sink.told[-1] == 4
    quiet_probe(quiet_probe(link, 4, 5), 5)
    assert link.sink.statuses[-1] == "syncing"
    link.core.connected()
    link.settle().answer(5)
    assert link.sink.told[-1] == LIVE


def test_a_slow_replay_is_no_late_probe() -> None:
    """Probes that fall due while an answer is on its way prove nothing about what comes live."""
    link = Link()
    link.core.connected()
    link.settle()
    link.core.asked(link.questions[-1], 0.0)
    for seq in range(6):
        link.core.take_replayed(seq, payload(seq))
        link.core.probe_quiet_stream(link.core.probe_due_s, idle=True)
        link.settle()
    link.core.end_replay(complete=True)
    link.settle()
    assert link.sink.told[-1] == LIVE


# -- waiting times --


def test_the_spread_stretches_every_wait_but_the_first_probe_after_a_batch() -> None:
    """By up to a half, each by its own draw; the longest pause stays below the configured one."""
    spread = Spread(random.Random(5))
    draws = [spread.stretch(2.0) for _ in range(300)]
    assert 2.0 <= min(draws) < 2.1
    assert 2.9 < max(draws) <= 3.0
    config = SubscriberConfig("tcp://engine:1", REPLAY, probe_s=5.0, probe_max_s=60.0, retry_s=0.2)
    first, longest, retries = [], [], []
    for seed in range(100):
        core = SubscriberCore(
            config,
            Plain(),
            counters=StreamCounters(),
            ask=lambda _: None,
            spread=Spread(random.Random(seed)),
            now_s=100.0,
        )
        first.append(core.probe_due_s - 100.0)
        retries.append(core.ask_delay_s(1, 100.0))
        for _ in range(10):
            core.probe_quiet_stream(100.0, idle=True)
        longest.append(core.probe_due_s - 100.0)
        core.heard(100.0)
        assert core.probe_due_s == 105.0
    for waits, least, most in ((first, 5.0, 7.5), (retries, 0.2, 0.3), (longest, 40.0, 60.0)):
        assert least <= min(waits) < least * 1.1
        assert most * 0.9 < max(waits) <= most
