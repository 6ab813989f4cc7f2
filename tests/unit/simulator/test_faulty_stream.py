"""Each fault of the event stream by itself: exactly which batches go live, when, and what replay answers."""

import pytest

from kvatlas.clock import ManualClock
from kvatlas.events import decode_batch
from kvatlas.simulator import Crash, FaultPlan, FaultyStream, Restart, parse_faults
from kvatlas.stream import LinkDown, ReplayAnswer, Sent


class Bench:
    """A stream on a manual clock. Steps are written down as (time, what): a number, "down" or "up"."""

    def __init__(self, *specs, buffer_steps=10_000, rank=0, seed=0):
        self.clock = ManualClock()
        self.plan = FaultPlan(parse_faults(specs), clock=self.clock, seed=seed)
        self.stream = FaultyStream(self.plan, rank=rank, buffer_steps=buffer_steps)
        self.log = []

    def note(self, steps):
        """Write steps down."""
        for step in steps:
            what = step.seq if isinstance(step, Sent) else "down" if isinstance(step, LinkDown) else "up"
            self.log.append((round(self.clock.monotonic_s(), 6), what))

    def publish(self, count=1, every_s=0.0):
        """Publish batches, each some time after the one before."""
        for _ in range(count):
            self.wait(every_s)
            self.note(self.stream.publish(b"payload %d" % self.stream.next_seq))

    def wait(self, seconds):
        """Let time pass, stopping wherever the stream asked to be woken."""
        end_s = self.clock.monotonic_s() + seconds
        while (wait_s := self.stream.next_due_s()) is not None and self.clock.monotonic_s() + wait_s <= end_s:
            self.clock.advance(wait_s)
            steps = self.stream.due()
            self.note(steps)
            assert wait_s > 0 or self.stream.next_due_s() != 0
        self.clock.advance(max(0.0, end_s - self.clock.monotonic_s()))
        self.note(self.stream.due())

    @property
    def live(self):
        """What went live, without the times."""
        return [what for _, what in self.log]

    def replayed(self, from_seq=0):
        """Numbers that a question brings."""
        return [sent.seq for sent in self.stream.replay(from_seq).batches]


def test_without_faults_everything_goes_live_and_into_the_ring():
    """No fault: numbers from 0, live at once, the newest for replay, a marker at the end, no waiting."""
    bench = Bench(buffer_steps=3)
    bench.publish(5)
    assert bench.log == [(0.0, seq) for seq in range(5)]
    assert bench.stream.next_due_s() is None
    sent = [Sent(seq, b"payload %d" % seq) for seq in (3, 4)]
    assert bench.stream.replay(3) == ReplayAnswer(sent, 0.0, True)
    assert bench.replayed() == [2, 3, 4]


def test_drop_of_a_range():
    """`from` and `count`: exactly those do not go live; replay has them."""
    bench = Bench("drop:from=2,count=3")
    bench.publish(7)
    assert bench.live == [0, 1, 5, 6]
    assert bench.replayed() == list(range(7))


def test_drop_by_chance_is_seeded():
    """`p`: some are lost, the same ones for the same seed, others for another."""
    runs = []
    for seed in (1, 1, 2):
        bench = Bench("drop:p=0.3", seed=seed)
        bench.publish(200)
        runs.append(bench.live)
    assert runs[0] == runs[1] != runs[2]
    assert 100 < len(runs[0]) < 180


def test_drop_in_windows():
    """`at`, `for` and `every`: the batches of each window, begin included, end not."""
    bench = Bench("drop:at=1s,for=2s,every=5s")
    bench.publish(9, every_s=1.0)
    assert bench.live == [2, 3, 4, 7, 8]


def test_duplicate():
    """The copies follow at once; replay has the batch once."""
    bench = Bench("duplicate:from=1,count=1,copies=2")
    bench.publish(3)
    assert bench.live == [0, 1, 1, 1, 2]
    assert bench.replayed() == [0, 1, 2]


def test_delay_keeps_the_order():
    """What comes behind a delayed batch waits for it, and no longer."""
    bench = Bench("delay:from=1,count=1,by=500ms")
    bench.publish(4, every_s=0.2)
    assert bench.stream.next_due_s() == pytest.approx(0.1)
    bench.wait(1.0)
    assert bench.log == [(0.2, 0), (0.9, 1), (0.9, 2), (0.9, 3)]


def test_reorder():
    """The batch goes after the next `span`; each pair is swapped when every batch is befallen."""
    bench = Bench("reorder:from=1,count=1,span=2")
    bench.publish(5)
    assert bench.live == [0, 2, 3, 1, 4]
    bench = Bench("reorder")
    bench.publish(6)
    assert bench.live == [1, 0, 3, 2, 5, 4]


def test_reorder_lets_a_batch_go_when_none_overtakes_it():
    """After `by` it goes anyway: a reordered batch is not a lost one."""
    bench = Bench("reorder:by=2s")
    bench.publish()
    bench.wait(3.0)
    assert bench.log == [(2.0, 0)]


def test_publisher_hwm():
    """A burst: one is read, `size` wait, the rest is lost; what waits comes at the reader's pace, then all at once."""
    bench = Bench("hwm:size=3,rate=2,for=10s")
    bench.publish(8)
    bench.wait(5.0)
    assert bench.log == [(0.0, 0), (0.5, 1), (1.0, 2), (1.5, 3)]
    assert bench.plan.placed[0].hits == 4
    bench.publish(4)
    bench.wait(0.6)
    assert bench.live[4:] == [8, 9]
    bench.wait(20.0)
    bench.publish()
    assert bench.live[4:] == [8, 9, 10, 11, 12]


def test_publisher_hwm_ends_with_its_window():
    """When the reader is quick again, it reads what waits at that moment."""
    bench = Bench("hwm:rate=0.01,for=3s")
    bench.publish(3)
    bench.wait(10.0)
    assert bench.log == [(0.0, 0), (3.0, 1), (3.0, 2)]


def test_silence():
    """Nothing goes live, the connection stands, replay works, and afterwards the numbers go on."""
    bench = Bench("silence:at=1s,for=2s")
    bench.publish(5, every_s=0.75)
    assert bench.live == [0, 3, 4]
    assert bench.replayed() == [0, 1, 2, 3, 4]


def test_lost_tail():
    """The last `count` before quiet never go live; those before them do, `count` late."""
    bench = Bench("lost_tail:count=2,quiet=1s")
    bench.publish(5, every_s=0.1)
    assert bench.live == [0, 1, 2]
    bench.wait(5.0)
    bench.publish(3, every_s=0.1)
    assert bench.live == [0, 1, 2, 5]
    assert bench.replayed(3) == [3, 4, 5, 6, 7]
    assert bench.plan.placed[0].hits == 2


def test_a_spared_tail_goes_live():
    """`times`: later tails go live when the stream is quiet."""
    bench = Bench("lost_tail:count=2,quiet=1s,times=1")
    for _ in range(2):
        bench.publish(3)
        bench.wait(2.0)
    assert bench.live == [0, 3, 4, 5]


def test_cut():
    """Connections break and come back; batches in between are lost to the live channel, replay does not answer."""
    bench = Bench("cut:at=1s,for=2s")
    bench.publish(1)
    bench.wait(1.5)
    bench.publish(1)
    assert bench.stream.replay(0) is None
    bench.wait(2.0)
    bench.publish(1)
    assert bench.log == [(0.0, 0), (1.0, "down"), (3.0, "up"), (3.5, 2)]
    assert bench.replayed() == [0, 1, 2]


def test_restart():
    """Ring and numbers start anew, nobody can connect meanwhile, what was held is gone."""
    bench = Bench("delay:count=1,from=2", "restart:down=2s")
    bench.publish(3)
    (fault,) = bench.plan.take_due()
    assert isinstance(fault, Restart)
    assert bench.plan.take_due() == []
    bench.note(bench.stream.restart(fault))
    assert bench.stream.replay(0) is None
    bench.publish(1)
    bench.wait(5.0)
    bench.publish(1)
    assert bench.log == [(0.0, 0), (0.0, 1), (0.0, "down"), (2.0, "up"), (5.0, 1)]
    assert bench.replayed() == [0, 1]
    assert (bench.stream.life, bench.stream.boot_id) == (1, 0)


def test_overtaking_restart():
    """The next batch has the number the old life would have given it; the ring proves that it is another life."""
    bench = Bench()
    bench.publish(4)
    bench.note(bench.stream.restart(Restart(overtaking=True, identity="other", down_s=0.0)))
    bench.publish(1)
    assert bench.live == [0, 1, 2, 3, "down", "up", 4]
    answer = bench.stream.replay(3)
    assert [sent.seq for sent in answer.batches] == [3, 4]
    filler = decode_batch(answer.batches[0].payload).batch
    assert (list(filler.events), filler.data_parallel_rank, filler.ts) == ([], 0, bench.clock.wall_s())
    assert bench.stream.boot_id == 1


def test_a_crash_changes_the_boot_identity():
    """Unlike a restart with the same identity."""
    bench = Bench()
    bench.stream.restart(Crash())
    bench.stream.restart(Restart())
    bench.stream.restart()
    assert (bench.stream.life, bench.stream.boot_id) == (3, 1)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("replay:mode=refused", None),
        ("replay:mode=slow,interval=200ms", ([2, 3, 4, 5], 0.2, True)),
        ("replay:mode=truncated,keep=2", ([4, 5], 0.0, True)),
        ("replay:mode=truncated", ([], 0.0, True)),
        ("replay:mode=holes,from=3,count=2", ([2, 5], 0.0, True)),
        ("replay:mode=holes,p=1", ([], 0.0, True)),
        ("replay:mode=no_marker", ([2, 3, 4, 5], 0.0, False)),
        ("replay:mode=refused,at=1s", ([2, 3, 4, 5], 0.0, True)),
        ("replay:mode=refused,rank=1", ([2, 3, 4, 5], 0.0, True)),
        ("replay:mode=refused,from=7", ([2, 3, 4, 5], 0.0, True)),
    ],
)
def test_replay_faults(spec, expected):
    """What the endpoint answers; the live channel is untouched."""
    bench = Bench(spec)
    bench.publish(6)
    assert bench.live == list(range(6))
    answer = bench.stream.replay(2)
    seen = answer and ([sent.seq for sent in answer.batches], answer.interval_s, answer.has_marker)
    assert seen == expected


def test_replay_fails_a_number_of_times():
    """`times`: the next question is answered."""
    bench = Bench("replay:mode=refused,times=2")
    bench.publish(1)
    assert [bench.stream.replay(0) is None for _ in range(3)] == [True, True, False]


def test_holes_by_chance_differ_between_answers():
    """Each answer loses its own batches: who asks again gets others."""
    bench = Bench("replay:mode=holes,p=0.5")
    bench.publish(50)
    first, second = bench.replayed(), bench.replayed()
    assert first != second
    assert 10 < len(first) < 40


def test_a_rank_has_its_own_faults():
    """`rank` picks one stream; without it each rank draws by itself."""
    plan = FaultPlan(parse_faults(["drop:rank=1,count=1"]), clock=ManualClock())
    streams = [FaultyStream(plan, rank=rank) for rank in (0, 1)]
    assert [len(stream.publish(b"")) for stream in streams] == [1, 0]
    plan = FaultPlan(parse_faults(["drop:p=0.5"]), clock=ManualClock())
    streams = [FaultyStream(plan, rank=rank) for rank in (0, 1)]
    draws = [[len(stream.publish(b"")) for _ in range(64)] for stream in streams]
    assert draws[0] != draws[1]


def test_a_fault_given_later_counts_from_then():
    """Times and batch numbers begin when the fault is given."""
    bench = Bench()
    bench.publish(3, every_s=1.0)
    (fault,) = parse_faults(["drop:at=1s,from=2,count=1"])
    bench.plan.add(fault)
    assert bench.stream.next_due_s() == 0
    bench.publish(4, every_s=1.0)
    assert bench.live == [0, 1, 2, 3, 4, 6]


def test_a_fault_taken_back_lets_go_what_it_held():
    """In order, with the next step."""
    bench = Bench("delay:by=1h")
    bench.publish(3)
    assert bench.live == []
    assert bench.plan.remove(bench.plan.placed[0].fault_id)
    bench.publish(1)
    assert bench.live == [0, 1, 2, 3]


def test_faults_add_up():
    """Along the way from the publisher to the ear: a duplicate of a delayed batch, none of a dropped one."""
    bench = Bench("duplicate", "delay:count=1,by=1s", "drop:from=1,count=1")
    bench.publish(3)
    bench.wait(2.0)
    assert bench.log == [(1.0, 0), (1.0, 0), (1.0, 2), (1.0, 2)]
