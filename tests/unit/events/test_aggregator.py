"""Reducing the events of several workers to those that all of them reported."""

import pytest

from kvatlas.errors import EventDecodeError
from kvatlas.events import AllBlocksCleared, BlockRemoved, BlockStored, EventAggregator

STORED = BlockStored(block_hashes=[1], parent_block_hash=None, token_ids=[1, 2], block_size=2, medium="CPU")
REMOVED = BlockRemoved(block_hashes=[1], medium="CPU")


def test_only_what_all_workers_report_is_common() -> None:
    """Scenario 64: an event seen by one of two workers is left out, one seen by both is there once."""
    aggregator = EventAggregator(2)
    aggregator.add_events([STORED, REMOVED])
    aggregator.add_events([STORED])
    assert aggregator.common_events() == [STORED]
    assert aggregator.all_events() == [STORED, STORED, REMOVED]


def test_occurrences_are_counted_not_workers() -> None:
    """As in vLLM, one worker's duplicate passes for agreement."""
    aggregator = EventAggregator(2)
    aggregator.add_events([STORED, STORED])
    assert aggregator.common_events() == [STORED]


def test_equality_is_of_every_field() -> None:
    """Events that differ in the LoRA name only are two events."""
    aggregator = EventAggregator(2)
    aggregator.add_events([STORED])
    aggregator.add_events(
        [
            BlockStored(
                block_hashes=[1], parent_block_hash=None, token_ids=[1, 2], block_size=2, medium="CPU", lora_name="a"
            )
        ]
    )
    assert aggregator.common_events() == []
    assert len(aggregator.all_events()) == 2


def test_workers_may_join_and_everything_may_be_reset() -> None:
    """The accumulator starts at one worker, grows with each that reports, and starts anew."""
    aggregator = EventAggregator(1)
    aggregator.add_events([STORED, AllBlocksCleared()])
    aggregator.increment_workers()
    aggregator.add_events([STORED])
    assert aggregator.common_events() == [STORED]
    aggregator.reset_workers()
    aggregator.clear_events()
    assert aggregator.num_workers == 1
    assert aggregator.all_events() == []


def test_bad_input_is_told_and_counts_nothing() -> None:
    """Not an event, or no workers: a clear error, and the call leaves no trace."""
    aggregator = EventAggregator(1)
    with pytest.raises(EventDecodeError, match="cannot aggregate str"):
        aggregator.add_events([STORED, "x"])  # type: ignore[list-item]
    assert aggregator.all_events() == []
    for bad in (lambda: EventAggregator(0), lambda: aggregator.increment_workers(0)):
        with pytest.raises(EventDecodeError, match="1 or more"):
            bad()
