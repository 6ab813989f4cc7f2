"""Virtual time: order, cancelling, and a clock that moves from one thing to the next."""

from kvatlas.chaos import Timeline


def test_timers_fire_in_order_of_time_then_of_setting() -> None:
    """Equal times keep the order in which they were set; the clock shows each its own time."""
    timeline = Timeline()
    seen: list[tuple[str, float]] = []
    for name, delay_s in (("late", 2.0), ("first", 1.0), ("second", 1.0)):
        timeline.after(delay_s, lambda name=name: seen.append((name, timeline.now_s)))
    timeline.run_until(1.5)
    assert seen == [("first", 1.0), ("second", 1.0)]
    assert timeline.now_s == 1.5
    timeline.run_until(2.0)
    assert seen[-1] == ("late", 2.0)


def test_a_cancelled_timer_does_not_fire_and_is_not_kept() -> None:
    """However many are cancelled, few of them stay."""
    timeline = Timeline()
    seen: list[int] = []
    for number in range(10_000):
        timeline.after(1000.0, lambda number=number: seen.append(number)).cancel()
    assert len(timeline) <= 256
    timeline.run_until(2000.0)
    assert seen == []


def test_what_fires_may_set_more() -> None:
    """A timer set while another fires belongs to the same run; a negative delay is now."""
    timeline = Timeline()
    seen: list[float] = []

    def again() -> None:
        seen.append(timeline.now_s)
        if len(seen) < 3:
            timeline.after(-1.0 if len(seen) == 1 else 0.5, again)

    timeline.after(1.0, again)
    timeline.run_until(10.0)
    assert seen == [1.0, 1.0, 1.5]


def test_a_run_can_stop_early() -> None:
    """`stop` is asked after each thing that happened."""
    timeline = Timeline()
    seen: list[int] = []
    for number in range(5):
        timeline.after(number, lambda number=number: seen.append(number))
    timeline.run_until(10.0, stop=lambda: len(seen) == 2)
    assert (seen, timeline.now_s) == ([0, 1], 1.0)
