"""A publisher's outlet with faults: which batches go live, when, and what the replay endpoint answers. No I/O.

A driver in virtual time does what the publisher's thread does in real time::

    steps = stream.publish(payload)         # the engine's next batch
    steps = stream.due()                    # when next_due_s() seconds have passed
    answer = stream.replay(from_seq)        # a subscriber asks; None = it waits in vain
    steps = stream.restart(fault)           # the plan's take_due() gave one, the engine's cache is empty now

and carries out the steps in order. What comes out is a function of the plan's seed and of the calls and their times.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvatlas.events import EventBatch, encode_batch
from kvatlas.simulator.fault_gate import Gate
from kvatlas.simulator.fault_kinds import Crash, Cut, ReplayFault, Restart
from kvatlas.simulator.fault_plan import FaultPlan
from kvatlas.simulator.live_faults import LIVE_FAULTS, LiveFault, Numbered
from kvatlas.stream import LinkDown, LinkUp, LiveStep, ReplayAnswer, Sent

__all__ = ["FaultyStream"]

_ORDER = {kind: place for place, kind in enumerate(LIVE_FAULTS)}


@dataclass(frozen=True, slots=True)
class _Stage:
    order: int
    fault_id: int
    stage: LiveFault


@dataclass(frozen=True, slots=True)
class _ReplayPlace:
    fault: ReplayFault
    gate: Gate
    first_batch: int


class FaultyStream:
    """The stream of one rank of one engine, over all lives of the engine. An `Outlet`.

    Args:
        plan: the engine's.
        rank: the data-parallel rank.
        buffer_steps: batches kept for replay.
    """

    def __init__(self, plan: FaultPlan, *, rank: int = 0, buffer_steps: int = 10_000) -> None:
        self._plan = plan
        self._rank = rank
        self._ring: deque[Sent] = deque(maxlen=buffer_steps)
        self._number = 0
        self._known: object = ()
        self._newest_id = 0
        self._stages: list[_Stage] = []
        self._replay_places: dict[int, _ReplayPlace] = {}
        self._cuts: dict[int, Gate] = {}
        self._up_at_s = 0.0
        self.is_up = True
        """Whether subscribers can be connected."""
        self.next_seq = 0
        """Number of the next batch."""
        self.life = 0
        """How many lives ended before this one."""
        self.boot_id = 0
        """The engine's boot identity: equal in lives that cannot be told apart by it."""
        self._follow_plan(plan.now_s())
        self._follow_replay_faults()

    def publish(self, payload: bytes) -> list[LiveStep]:
        """The engine's next batch. O(faults) when nothing is held."""
        now_s = self._plan.now_s()
        out = self.due()
        item = Numbered(self._number, Sent(self.next_seq, payload))
        self._number += 1
        self.next_seq += 1
        self._plan.note_batch(self._rank)
        self._ring.append(item.sent)
        return out + self._pass_on([item], 0, now_s)

    def due(self) -> list[LiveStep]:
        """What time alone brings: batches that were held, connections that break or can be made again."""
        now_s = self._plan.now_s()
        out: list[LiveStep] = []
        if self._plan.placed is not self._known:
            out += self._follow_plan(now_s)
        out += self._link_steps(now_s)
        # The end of the way first: what is further on is older.
        for place in reversed(range(len(self._stages))):
            out += self._pass_on(self._stages[place].stage.due(now_s), place + 1, now_s)
        return out

    def next_due_s(self) -> float | None:
        """Seconds until `due` has something; None = not before another call. 0 = now."""
        now_s = self._plan.now_s()
        times = [stage.stage.next_due_s(now_s) for stage in self._stages]
        times += [gate.next_edge_s(now_s) for gate in self._cuts.values()]
        if now_s < self._up_at_s:
            times.append(self._up_at_s)
        if self._plan.placed is not self._known or self.is_up == self._is_cut(now_s):
            times.append(now_s)
        return min((max(0.0, time_s - now_s) for time_s in times if time_s is not None), default=None)

    def restart(self, fault: Restart | Crash | None = None, *, down_s: float | None = None) -> list[LiveStep]:
        """The engine's life is over: the ring and what was held are gone, numbers start at 0.

        Args:
            fault: says how; None = a plain restart of the same identity.
            down_s: overrides how long nobody can connect.
        """
        now_s = self._plan.now_s()
        old_next_seq = self.next_seq
        for stage in self._stages:
            stage.stage.clear()
        self._ring.clear()
        self.next_seq = 0
        self.life += 1
        self.boot_id += isinstance(fault, Crash) or (fault is not None and fault.identity == "other")
        if fault is not None and fault.overtaking:
            self._overtake(old_next_seq)
        if down_s is None:
            down_s = 0.0 if fault is None else fault.down_s
        self._up_at_s = max(self._up_at_s, now_s + down_s)
        out: list[LiveStep] = [LinkDown("the engine ended")] if self.is_up else []
        self.is_up = False
        return out + self._link_steps(now_s)

    def _overtake(self, next_seq: int) -> None:
        """Batches without events, so that the next one has the number the old life would have given."""
        if next_seq:
            payload = encode_batch(EventBatch(self._plan.wall_s(), [], self._rank))
            self._ring.extend(Sent(seq, payload) for seq in range(next_seq))
            self.next_seq = next_seq

    def replay(self, from_seq: int) -> ReplayAnswer | None:
        """The answer to who asks for all batches from `from_seq` on; None = there is none. O(ring)."""
        if not self.is_up:
            return None
        now_s = self._plan.now_s()
        failing = [
            (place.fault, place.gate)
            for place in self._follow_replay_faults()
            if self._number >= place.first_batch and place.gate.strikes(now_s, 1.0, place.fault.times)
        ]
        modes = {fault.mode for fault, _ in failing}
        if "refused" in modes:
            return None
        batches = list(self._ring)
        for fault, gate in failing:
            if fault.mode == "truncated":
                batches = batches[-fault.keep :] if fault.keep else []
            elif fault.mode == "holes":
                batches = _with_holes(batches, fault, gate)
        interval_s = max((fault.interval_s for fault, _ in failing if fault.mode == "slow"), default=0.0)
        return ReplayAnswer([sent for sent in batches if sent.seq >= from_seq], interval_s, "no_marker" not in modes)

    # -- inside --

    def _pass_on(self, items: Iterable[Numbered], place: int, now_s: float) -> list[LiveStep]:
        """Through the stages from `place` on. Who is not connected hears nothing."""
        batches = list(items)
        for stage in self._stages[place:]:
            batches = [out for item in batches for out in stage.stage.push(item, now_s)]
        return [item.sent for item in batches] if self.is_up else []

    def _is_cut(self, now_s: float) -> bool:
        return now_s < self._up_at_s or any(gate.is_open(now_s) for gate in self._cuts.values())

    def _link_steps(self, now_s: float) -> list[LiveStep]:
        is_up = not self._is_cut(now_s)
        if is_up == self.is_up:
            return []
        self.is_up = is_up
        if is_up:
            return [LinkUp()]
        for gate in self._cuts.values():
            gate.hits += gate.is_open(now_s)
        return [LinkDown("the network is cut")]

    def _follow_plan(self, now_s: float) -> list[LiveStep]:
        """Take up what the plan gained, let go of what it lost."""
        placed_faults = self._plan.placed
        self._known = placed_faults
        ids = {placed.fault_id for placed in placed_faults}
        out: list[LiveStep] = []
        for place in reversed(range(len(self._stages))):
            if self._stages[place].fault_id not in ids:
                out += self._pass_on(self._stages[place].stage.release(), place + 1, now_s)
                del self._stages[place]
        self._cuts = {fault_id: gate for fault_id, gate in self._cuts.items() if fault_id in ids}
        for placed in placed_faults:
            fault = placed.fault
            if placed.fault_id <= self._newest_id or getattr(fault, "rank", None) not in (None, self._rank):
                continue
            if isinstance(fault, Cut):
                self._cuts[placed.fault_id] = placed.new_gate(self._rank)
            elif type(fault) in LIVE_FAULTS:
                first_batch = self._number + getattr(fault, "from_batch", 0)
                stage = LIVE_FAULTS[type(fault)](fault, placed.new_gate(self._rank), first_batch)
                self._stages.append(_Stage(_ORDER[type(fault)], placed.fault_id, stage))
        self._stages.sort(key=lambda stage: (stage.order, stage.fault_id))
        self._newest_id = max(ids, default=self._newest_id)
        return out

    def _follow_replay_faults(self) -> list["_ReplayPlace"]:
        """Those in the plan; each has its gate from the first time it is seen."""
        found = []
        for placed in self._plan.placed:
            if isinstance(placed.fault, ReplayFault) and placed.fault.rank in (None, self._rank):
                place = self._replay_places.get(placed.fault_id)
                if place is None:
                    starts = 0 if placed.fault.mode == "holes" else self._number + placed.fault.from_batch
                    place = _ReplayPlace(placed.fault, placed.new_gate(self._rank), starts)
                    self._replay_places[placed.fault_id] = place
                found.append(place)
        return found


def _with_holes(batches: list[Sent], fault: ReplayFault, gate: Gate) -> list[Sent]:
    if fault.p is not None:
        return [sent for sent in batches if gate.rng.random() >= fault.p]
    return [sent for sent in batches if not fault.from_batch <= sent.seq < fault.from_batch + fault.count]
