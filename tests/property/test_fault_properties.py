"""Faulty streams under any mixture of faults and calls: seeded, and nothing else than the named fault changes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.clock import ManualClock
from kvatlas.simulator import FaultPlan, FaultyStream, Restart, fault_spec, parse_fault, parse_faults
from kvatlas.stream import LinkDown, LinkUp, Sent

WINDOWS = st.sampled_from(["", "at=1s,for=2s", "for=1s,every=3s", "from=3", "at=0.5s"])
CHANCES = st.sampled_from(["", "p=0.3", "count=4"])
KINDS = {
    "drop": "",
    "duplicate": "copies=2",
    "delay": "by=700ms",
    "reorder": "span=2,by=1s",
    "hwm": "size=2,rate=3",
    "silence": "",
    "lost_tail": "quiet=400ms",
    "cut": "",
    "replay": "mode=holes",
}
LOSING = {"drop", "hwm", "silence", "lost_tail", "cut"}


@st.composite
def specs(draw, kinds=tuple(KINDS)):
    """A spec that is well formed."""
    kind = draw(st.sampled_from(kinds))
    parts = [KINDS[kind], draw(WINDOWS)]
    if kind == "cut":
        parts = [part for part in parts if not part.startswith("from")]
    elif kind == "silence":
        parts.append(draw(st.sampled_from(["", "count=4"])))
    elif kind != "hwm":
        parts.append(draw(CHANCES))
    text = ",".join(part for part in parts if part)
    return f"{kind}:{text}" if text else kind


ACTIONS = st.lists(
    st.one_of(
        st.just(("publish", 0.0)),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.1, 0.5, 2.0])),
        st.just(("replay", 0.0)),
        st.just(("restart", 0.0)),
    ),
    max_size=60,
)


class Run:
    """One stream driven through actions, and all that came of it."""

    def __init__(self, faults, actions, seed=0):
        self.clock = ManualClock()
        self.plan = FaultPlan(parse_faults(faults), clock=self.clock, seed=seed)
        self.stream = FaultyStream(self.plan, buffer_steps=16)
        self.log = []
        self.published = [[]]
        for name, value in actions:
            getattr(self, name)(value)
            assert (self.stream.next_due_s() or 0.0) >= 0.0

    def note(self, steps):
        self.log += [(self.clock.monotonic_s(), self.stream.life, step) for step in steps]

    def publish(self, _):
        payload = b"%d/%d" % (len(self.published), self.stream.next_seq)
        self.published[-1].append((self.stream.next_seq, payload))
        self.note(self.stream.publish(payload))

    def wait(self, seconds):
        end_s = self.clock.monotonic_s() + seconds
        while (wait_s := self.stream.next_due_s()) is not None and self.clock.monotonic_s() + wait_s < end_s:
            self.clock.advance(wait_s)
            self.note(self.stream.due())
        self.clock.advance(max(0.0, end_s - self.clock.monotonic_s()))
        self.note(self.stream.due())

    def replay(self, _):
        self.log.append((self.clock.monotonic_s(), self.stream.life, self.stream.replay(0)))

    def restart(self, _):
        self.published.append([])
        self.note(self.stream.restart(Restart(down_s=0.3)))

    @property
    def live(self):
        """(life, number, payload) of what went live."""
        return [(life, step.seq, step.payload) for _, life, step in self.log if isinstance(step, Sent)]


@given(st.lists(specs(), max_size=4), ACTIONS, st.integers(0, 3))
def test_the_same_seed_gives_the_same_run(faults, actions, seed):
    """Faults, calls and times decide everything."""
    assert Run(faults, actions, seed).log == Run(faults, actions, seed).log


@given(st.lists(specs(), max_size=4), ACTIONS)
def test_what_goes_live_was_published_in_this_life(faults, actions):
    """Whatever is lost, held or repeated: numbers and bytes are never mixed up, nobody hears while the link is down."""
    run = Run(faults, actions)
    is_up = True
    for _, life, step in run.log:
        if isinstance(step, Sent):
            assert (step.seq, step.payload) in run.published[life]
            assert is_up
        elif isinstance(step, LinkDown | LinkUp):
            assert isinstance(step, LinkUp) is not is_up
            is_up = isinstance(step, LinkUp)
    assert is_up is run.stream.is_up


@given(specs(kinds=("delay", "reorder", "duplicate")), st.lists(st.sampled_from([0.0, 0.1, 0.5, 2.0]), max_size=40))
def test_faults_that_lose_nothing_lose_nothing(spec, waits):
    """Delayed, reordered and duplicated batches all arrive in the end, and only duplicates come twice."""
    actions = [action for wait_s in waits for action in (("publish", 0.0), ("wait", wait_s))]
    run = Run([spec], [*actions, ("wait", 50.0)])
    counts = Counter(seq for _, seq, _ in run.live)
    assert set(counts) == set(range(len(waits)))
    if not spec.startswith("duplicate"):
        assert set(counts.values()) <= {1}
    if not spec.startswith("reorder"):
        assert [seq for _, seq, _ in run.live] == sorted(seq for _, seq, _ in run.live)


@given(specs(kinds=tuple(sorted(LOSING))), st.lists(st.sampled_from([0.0, 0.1, 0.5, 2.0]), max_size=40))
def test_faults_that_lose_keep_the_order_and_the_ring(spec, waits):
    """What is left is in order and comes once; replay has all; the plan counts what is missing."""
    actions = [action for wait_s in waits for action in (("publish", 0.0), ("wait", wait_s))]
    run = Run([spec], [*actions, ("wait", 50.0)])
    live = [seq for _, seq, _ in run.live]
    assert live == sorted(set(live))
    if not spec.startswith("cut"):
        assert run.plan.placed[0].hits == len(waits) - len(live)
    if run.stream.is_up:
        answer = run.stream.replay(0)
        assert [sent.seq for sent in answer.batches] == list(range(len(waits)))[-16:]


@given(st.lists(specs(), max_size=3), ACTIONS)
def test_faults_whose_time_never_comes_change_nothing(faults, actions):
    """Faults that begin in a year leave a run as it is without them."""
    late = [fault_spec(type(f)(**{**_fields(f), "at_s": 3.2e7})) for f in parse_faults(faults)]
    assert Run(late, actions).log == Run([], actions).log


def _fields(fault):
    return {name: getattr(fault, name) for name in fault.__struct_fields__}


@given(st.sampled_from(["delay:p=0", "duplicate:at=1000h", "replay:mode=refused,at=1000h"]), ACTIONS)
def test_an_added_fault_leaves_the_draws_of_others_alone(spec, actions):
    """The same batches are dropped beside a fault that never strikes."""
    assert Run([spec, "drop:p=0.3"], actions).log == Run(["drop:p=0.3"], actions).log


@given(specs())
def test_a_spec_survives_its_text(spec):
    """Reading, writing and reading again gives an equal fault."""
    fault = parse_fault(spec)
    assert parse_fault(fault_spec(fault)) == fault


def test_the_properties_see_losses():
    """A run that loses is told from one that does not, so the properties above mean something."""
    actions = [("publish", 0.0)] * 5
    assert len(Run(["drop:from=1,count=1"], actions).live) == 4
    with pytest.raises(AssertionError):
        assert Run(["drop:count=1"], actions).log == Run([], actions).log
