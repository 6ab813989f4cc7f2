"""Events as a line of text."""

import pytest

from kvatlas.cli.event_text import describe_event, wall_time
from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored, Event


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            BlockStored([11, 12, 13], 10, list(range(48)), 16, medium="GPU", group_idx=0, lora_name="sql"),
            "stored   GPU  group 0  3 blocks 11..13  parent 10  48 tokens (16 a block)  lora sql",
        ),
        (
            BlockStored([bytes(range(32))], None, [1, 2], 2),
            "stored   no medium  1 block 000102030405  no parent  2 tokens (2 a block)",
        ),
        (BlockStored([], None, [], 0, medium="CPU"), "stored   CPU  0 blocks  no parent  0 tokens (0 a block)"),
        (BlockRemoved([7, 8], medium="GPU", group_idx=1), "removed  GPU  group 1  2 blocks 7..8"),
        (AllBlocksCleared(), "cleared: all blocks"),
    ],
)
def test_a_line_has_what_debugging_needs(event: Event, text: str) -> None:
    """Medium, group, first and last hash, parent, tokens; integers whole, digests shortened."""
    assert describe_event(event) == text


def test_time_of_day_has_milliseconds() -> None:
    """The batch's own clock, to the millisecond."""
    assert wall_time(1_700_000_000.25).endswith("20.250")


@pytest.mark.parametrize("ts_s", [float("nan"), float("inf"), 1e300])
def test_what_is_no_time_is_shown_as_it_is(ts_s: float) -> None:
    """An engine's odd timestamp does not end the tail."""
    assert wall_time(ts_s) == f"ts {ts_s!r}"
