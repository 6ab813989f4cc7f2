"""One timer for all busy streams of a loop."""

import asyncio
import gc
import weakref
from collections.abc import Callable

import pytest

from kvatlas.stream.pacer import ReadPacer
from support.gateway import LOOPS


class Timers:
    """A loop as far as the pacer uses it; timers fire when told to."""

    def __init__(self) -> None:
        self.set: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.set.append((delay_s, call))

    def fire(self) -> None:
        timers, self.set = self.set, []
        for _, call in timers:
            call()


def test_all_who_wait_share_a_timer_and_are_called_once() -> None:
    """In the order in which they asked; whoever asks again is called again with the next."""
    loop, pacer, called = Timers(), ReadPacer(0.5), []

    def first() -> None:
        called.append("first")
        pacer.call_next(loop, first)

    def second() -> None:
        called.append("second")

    for call in (first, second, first):
        pacer.call_next(loop, call)
    assert [delay_s for delay_s, _ in loop.set] == [0.5]
    loop.fire()
    assert called == ["first", "second"]
    assert len(loop.set) == 1
    loop.fire()
    assert called == ["first", "second", "first"]


def test_whoever_ends_is_not_called() -> None:
    """What was withdrawn is forgotten, whether it waited or not; the others are called."""
    loop, pacer, called = Timers(), ReadPacer(), []
    calls = [lambda name=name: called.append(name) for name in "abc"]
    for call in calls[:2]:
        pacer.call_next(loop, call)
    pacer.discard(calls[0])
    pacer.discard(calls[2])
    loop.fire()
    assert called == ["b"]
    pacer.discard(calls[1])
    loop.fire()
    assert called == ["b"]


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_has_one_pacer_as_long_as_it_lives(name: str) -> None:
    """The same for all its streams, another for another loop; it keeps no closed loop alive."""
    loops = [LOOPS[name]() for _ in range(2)]
    pacers = [ReadPacer.of(loop) for loop in loops]
    assert pacers[0] is ReadPacer.of(loops[0])
    assert pacers[0] is not pacers[1]
    called = asyncio.Event()
    pacers[0].call_next(loops[0], called.set)
    loops[0].run_until_complete(asyncio.wait_for(called.wait(), 5))
    ends = [weakref.ref(each) for each in (*loops, *pacers)]
    for loop in loops:
        loop.close()
    del loop, loops, pacers, called
    gc.collect()
    assert [end() for end in ends] == [None] * 4
