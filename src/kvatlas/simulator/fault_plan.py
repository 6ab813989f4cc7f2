"""Which faults befall an engine now: time windows, batch numbers and seeded chance, without I/O.

One plan belongs to one engine. Faults of its event streams are carried out by `FaultyStream`; those of the engine's
life and of its HTTP side are asked for here by whoever drives the engine, in real or in virtual time. Equal seeds and
equal calls at equal times give equal answers; each fault draws from a generator of its own, so that adding one does not
change what another does.
"""

from collections import Counter
from collections.abc import Iterable

from kvatlas.clock import Clock
from kvatlas.simulator.fault_gate import Gate
from kvatlas.simulator.fault_kinds import ClockJump, Crash, Fault, Hang, Reset, Restart, SlowStart
from kvatlas.simulator.fault_specs import fault_spec

__all__ = ["FaultPlan", "PlacedFault"]


class PlacedFault:
    """A fault of a plan: since when, and what it did. `gates`: one for each place it works at."""

    __slots__ = ("_seed", "fault", "fault_id", "gates", "started_batches", "started_s")

    def __init__(self, fault_id: int, fault: Fault, started_s: float, started_batches: int, seed: str) -> None:
        self.fault_id = fault_id
        self.fault = fault
        self.started_s = started_s
        self.started_batches = started_batches
        self._seed = seed
        self.gates: list[Gate] = [Gate(fault, started_s, seed)]

    @property
    def gate(self) -> Gate:
        """That of the engine."""
        return self.gates[0]

    @property
    def hits(self) -> int:
        """How often it struck, everywhere."""
        return sum(gate.hits for gate in self.gates)

    @property
    def spec(self) -> str:
        """The fault as text."""
        return fault_spec(self.fault)

    def new_gate(self, rank: int) -> Gate:
        """One for the stream of a rank, with a generator of its own."""
        gate = Gate(self.fault, self.started_s, f"{self._seed}/{rank}")
        self.gates.append(gate)
        return gate


class FaultPlan:
    """The faults of one engine.

    Args:
        faults: those in force from now on; faults of other engines are left out.
        clock: tells now; times in faults count from when they are given.
        seed: fixes all chance.
        engine: the engine's index.
    """

    def __init__(self, faults: Iterable[Fault] = (), *, clock: Clock, seed: int = 0, engine: int = 0) -> None:
        self._clock = clock
        self._seed = seed
        self._engine = engine
        self._ids = 0
        self._ordinals: Counter[str] = Counter()
        self._batches: dict[int, int] = {}
        self._placed: tuple[PlacedFault, ...] = ()
        for fault in faults:
            if fault.engine in (None, engine):
                self.add(fault)

    @property
    def engine(self) -> int:
        """The engine's index."""
        return self._engine

    @property
    def placed(self) -> tuple[PlacedFault, ...]:
        """All faults given and not taken back; another tuple after every change."""
        return self._placed

    def now_s(self) -> float:
        """The clock's monotonic time."""
        return self._clock.monotonic_s()

    def wall_s(self) -> float:
        """The engine's wall clock, jumps included: the `ts` of its batches."""
        now_s = self.now_s()
        jumps = (p.fault.jump_s for p in self._placed if isinstance(p.fault, ClockJump) and p.gate.is_open(now_s))
        return self._clock.wall_s() + sum(jumps)

    def add(self, fault: Fault) -> PlacedFault:
        """Put a fault in force from now on, whatever engine it names."""
        name = str(fault.__struct_config__.tag)
        seed = f"{self._seed}/{self._engine}/{name}/{self._ordinals[name]}"
        self._ordinals[name] += 1
        self._ids += 1
        placed = PlacedFault(self._ids, fault, self.now_s(), self.num_batches, seed)
        self._placed = (*self._placed, placed)
        return placed

    def remove(self, fault_id: int) -> bool:
        """Take a fault back; False when there is none of that id. What it held goes out with the next step."""
        left = tuple(placed for placed in self._placed if placed.fault_id != fault_id)
        found = len(left) < len(self._placed)
        self._placed = left
        return found

    def clear(self) -> int:
        """Take all back. Returns how many there were."""
        count = len(self._placed)
        self._placed = ()
        return count

    @property
    def num_batches(self) -> int:
        """Batches published so far, by all ranks in all lives."""
        return sum(self._batches.copy().values())

    def note_batch(self, rank: int) -> None:
        """A rank published a batch; its `FaultyStream` says so."""
        self._batches[rank] = self._batches.get(rank, 0) + 1

    def take_due(self) -> list[Restart | Crash]:
        """Ends of the engine's life that are due now; each is given once. Crashes that wait for an answer are not."""
        return [
            placed.fault
            for placed in self._placed
            if isinstance(placed.fault, Restart | Crash)
            and getattr(placed.fault, "after", None) is None
            and self._ends_now(placed, placed.fault)
        ]

    def on_piece(self, pieces: int) -> Reset | Crash | None:
        """A streamed answer has sent its `pieces`-th piece: what befalls it now."""
        now_s = self.now_s()
        for placed in self._placed:
            fault = placed.fault
            if isinstance(fault, Crash):
                if fault.after is not None and pieces >= fault.after and self._ends_now(placed, fault):
                    return fault
            elif (
                isinstance(fault, Reset) and pieces == fault.after and placed.gate.strikes(now_s, fault.p, fault.count)
            ):
                return fault
        return None

    def _ends_now(self, placed: PlacedFault, fault: Restart | Crash) -> bool:
        now_s = self.now_s()
        if not placed.gate.is_due(now_s) or self.num_batches - placed.started_batches < fault.from_batch:
            return False
        return placed.gate.take_turn(now_s, fault.p)

    def is_hung(self) -> bool:
        """Whether the engine accepts connections and does nothing."""
        now_s = self.now_s()
        return any(isinstance(placed.fault, Hang) and placed.gate.is_open(now_s) for placed in self._placed)

    def slow_start(self) -> SlowStart | None:
        """What holds up a life that begins now: the longest of them."""
        faults = [placed.fault for placed in self._placed if isinstance(placed.fault, SlowStart)]
        return max(faults, key=lambda fault: fault.for_s, default=None)

    def awaits_batch(self) -> bool:
        """Whether an end of the engine's life is due as soon as enough batches are published."""
        now_s = self.now_s()
        return any(
            isinstance(placed.fault, Restart | Crash)
            and placed.gate.is_due(now_s)
            and self.num_batches - placed.started_batches < placed.fault.from_batch
            for placed in self._placed
        )

    def next_due_s(self) -> float | None:
        """Seconds until `take_due` or `is_hung` may answer otherwise; None = not by time alone. 0 = now."""
        now_s = self.now_s()
        times: list[float] = []
        for placed in self._placed:
            next_s: float | None = None
            if isinstance(placed.fault, Hang):
                next_s = placed.gate.next_edge_s(now_s)
            elif isinstance(placed.fault, Restart | Crash):
                next_s = placed.gate.next_turn_s()
                if (
                    next_s is not None
                    and next_s <= now_s
                    and (
                        getattr(placed.fault, "after", None) is not None
                        or self.num_batches - placed.started_batches < placed.fault.from_batch
                    )
                ):
                    next_s = None  # time has come: a batch or an answer is waited for
            if next_s is not None:
                times.append(max(0.0, next_s - now_s))
        return min(times, default=None)
