"""Faults of an engine's life and of its HTTP side, on a manual clock; and what a plan keeps of its faults."""

import pytest

from kvatlas.clock import ManualClock
from kvatlas.simulator import Crash, FaultPlan, FaultyStream, Reset, Restart, SlowStart, parse_fault, parse_faults


def plan_of(*specs, engine=0, seed=0):
    """A plan and its clock."""
    clock = ManualClock()
    return FaultPlan(parse_faults(specs), clock=clock, engine=engine, seed=seed), clock


def test_a_restart_comes_once_at_its_time():
    """Due from its time on, given once, told beforehand."""
    plan, clock = plan_of("restart:at=20s,identity=other")
    assert (plan.take_due(), plan.next_due_s()) == ([], 20.0)
    clock.advance(20.0)
    assert plan.next_due_s() == 0.0
    assert plan.take_due() == [Restart(at_s=20.0, identity="other")]
    assert (plan.take_due(), plan.next_due_s()) == ([], None)
    assert plan.placed[0].hits == 1


def test_a_restart_comes_again():
    """`every`: one for each turn; turns nobody looked at count as one."""
    plan, clock = plan_of("restart:at=1s,every=10s")
    counts = []
    for _ in range(5):
        clock.advance(5.0)
        counts.append(len(plan.take_due()))
    assert counts == [1, 0, 1, 0, 1]
    clock.advance(100.0)
    assert len(plan.take_due()) == 1
    assert plan.next_due_s() == 6.0


def test_a_restart_by_chance():
    """`p`: turns without one pass."""
    plan, clock = plan_of("restart:every=1s,p=0.5")
    counts = []
    for _ in range(100):
        counts.append(len(plan.take_due()))
        clock.advance(1.0)
    assert 30 < sum(counts) < 70


def test_a_crash_waits_for_a_batch():
    """`from`: the time has come, but only that many batches make it due."""
    plan, _ = plan_of("crash:from=2")
    stream = FaultyStream(plan)
    stream.publish(b"")
    assert (plan.take_due(), plan.next_due_s()) == ([], None)
    stream.publish(b"")
    assert plan.next_due_s() == 0.0
    assert plan.take_due() == [Crash(from_batch=2)]


def test_a_crash_waits_for_an_answer():
    """`after`: the streamed answer that reaches so many pieces first is cut."""
    plan, clock = plan_of("crash:after=3,at=1s")
    assert plan.on_piece(3) is None
    clock.advance(1.0)
    assert plan.take_due() == []
    assert [plan.on_piece(pieces) for pieces in (1, 2)] == [None, None]
    assert plan.on_piece(3) == Crash(after=3, at_s=1.0)
    assert plan.on_piece(3) is None


def test_resets():
    """Each answer at its piece, `count` of them."""
    plan, _ = plan_of("reset:after=2,count=2")
    assert [plan.on_piece(pieces) for pieces in (1, 2, 3)] == [None, Reset(after=2, count=2), None]
    assert plan.on_piece(2) is not None
    assert plan.on_piece(2) is None


def test_a_hang_begins_and_ends():
    """In its window only; the plan says when to look again."""
    plan, clock = plan_of("hang:at=3s,for=5s")
    seen = []
    while (wait_s := plan.next_due_s()) is not None:
        clock.advance(wait_s)
        seen.append((clock.monotonic_s(), plan.is_hung()))
    assert seen == [(3.0, True), (8.0, False)]


def test_clock_jumps_add_up():
    """The wall clock is off while they last; the monotonic one is not."""
    plan, clock = plan_of("clock:jump=-3600s,at=10s", "clock:jump=30,for=20s")
    start_s = clock.wall_s()
    offsets = []
    for _ in range(3):
        offsets.append(plan.wall_s() - clock.wall_s())
        clock.advance(10.0)
    assert offsets == [30.0, -3570.0, -3600.0]
    assert clock.wall_s() == start_s + 30.0


def test_the_slowest_start_counts():
    """Of several the longest."""
    plan, _ = plan_of("slow_start:for=1s", "slow_start:for=2s,mode=unhealthy")
    assert plan.slow_start() == SlowStart(for_s=2.0, mode="unhealthy")
    assert plan_of()[0].slow_start() is None


def test_faults_of_other_engines_are_left_out():
    """`engine` picks one of a fleet."""
    plan, _ = plan_of("hang:engine=1", "drop:engine=0", "cut")
    assert [placed.spec for placed in plan.placed] == ["drop:engine=0", "cut"]


def test_adding_a_fault_changes_no_other():
    """Each fault draws for itself, and engines draw differently."""

    def lost(*specs, engine=0):
        stream = FaultyStream(plan_of(*specs, engine=engine)[0])
        return [seq for seq in range(100) if not stream.publish(b"")]

    alone = lost("drop:p=0.2")
    assert lost("delay:p=0", "drop:p=0.2", "replay:mode=refused") == alone
    assert lost("drop:p=0.2", engine=1) != alone


def test_faults_come_and_go():
    """Ids are never used twice; states are told in words."""
    plan, clock = plan_of("hang:at=1s,for=1s")
    second = plan.add(parse_fault("cut:for=3s"))
    states = []
    for _ in range(3):
        states.append([placed.gate.state(clock.monotonic_s()) for placed in plan.placed])
        clock.advance(1.0)
    assert states == [["waiting", "active"], ["active", "active"], ["over", "active"]]
    assert plan.remove(second.fault_id)
    assert not plan.remove(second.fault_id)
    assert plan.clear() == 1
    assert plan.add(parse_fault("cut")).fault_id == 3


@pytest.mark.parametrize("every_s", [0.1, 0.3, 1 / 3, 0.7])
def test_edges_are_where_windows_open_and_close(every_s):
    """However rounding falls: at each told edge the state changes, never between, and no edge is told twice."""
    plan, clock = plan_of(f"hang:at=0.1,for={every_s / 2:.9f},every={every_s:.9f}")
    gate, hung, last_s = plan.placed[0].gate, False, -1.0
    for _ in range(2000):
        edge_s = gate.next_edge_s(clock.monotonic_s())
        assert edge_s > last_s
        assert gate.is_open(edge_s) is not hung
        last_s, hung = edge_s, not hung
        clock = ManualClock(edge_s)
