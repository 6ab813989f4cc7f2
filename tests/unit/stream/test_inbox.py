"""The subscriber's own queue."""

from kvatlas.stream.inbox import LiveInbox


def test_order_is_kept_and_what_exceeds_the_bounds_is_refused() -> None:
    """First in, first out; a refusal is remembered until somebody clears it."""
    inbox = LiveInbox(max_batches=2, max_bytes=100)
    assert [inbox.put(seq, b"x") for seq in range(3)] == [True, True, False]
    assert inbox.has_refused
    assert inbox.pop_run(3, 100) == [(0, b"x"), (1, b"x")]
    assert inbox.has_refused
    assert len(inbox) == 0


def test_bytes_are_bounded_but_one_batch_always_fits() -> None:
    """A batch larger than the bound is not refused for ever: an empty queue takes it."""
    inbox = LiveInbox(max_batches=10, max_bytes=4)
    assert inbox.put(0, b"larger than 4")
    assert not inbox.put(1, b"")
    assert len(inbox.pop_run(1, 1)) == 1
    assert inbox.put(2, b"xx")
    assert inbox.put(3, b"xx")
    assert not inbox.put(4, b"x")


def test_a_run_ends_at_either_bound() -> None:
    """As many batches as asked for; the one that exceeds the bytes is the last; room is given back for each."""
    inbox = LiveInbox(max_batches=6, max_bytes=12)
    for seq in range(6):
        assert inbox.put(seq, b"xx")
    assert inbox.pop_run(2, 100) == [(0, b"xx"), (1, b"xx")]
    assert inbox.pop_run(10, 3) == [(2, b"xx"), (3, b"xx")]
    assert inbox.pop_run(10, 100) == [(4, b"xx"), (5, b"xx")]
    assert inbox.pop_run(10, 100) == []
    assert inbox.put(6, b"x")
    assert inbox.put(7, b"x" * 11)
    assert not inbox.put(8, b"x")
    assert [seq for seq, _ in inbox.pop_run(10, 1)] == [6]
    assert inbox.pop_run(1, 1) == [(7, b"x" * 11)]


def test_a_batch_larger_than_a_run_is_a_run() -> None:
    """It neither waits for ever nor leaves the books wrong."""
    inbox = LiveInbox(max_batches=2, max_bytes=4)
    assert inbox.put(0, b"larger than both bounds")
    assert inbox.pop_run(8, 2) == [(0, b"larger than both bounds")]
    assert inbox.put(1, b"xx")
    assert inbox.put(2, b"xx")
    assert len(inbox) == 2
