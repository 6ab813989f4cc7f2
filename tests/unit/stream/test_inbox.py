"""The subscriber's own queue."""

from kvatlas.stream.inbox import LiveInbox


def test_order_is_kept_and_what_exceeds_the_bounds_is_refused() -> None:
    """First in, first out; a refusal is remembered until somebody clears it."""
    inbox = LiveInbox(max_batches=2, max_bytes=100)
    assert [inbox.put(seq, b"x") for seq in range(3)] == [True, True, False]
    assert inbox.has_refused
    assert [inbox.pop(), inbox.pop(), inbox.pop()] == [(0, b"x"), (1, b"x"), None]
    assert inbox.has_refused
    assert len(inbox) == 0


def test_bytes_are_bounded_but_one_batch_always_fits() -> None:
    """A batch larger than the bound is not refused for ever: an empty queue takes it."""
    inbox = LiveInbox(max_batches=10, max_bytes=4)
    assert inbox.put(0, b"larger than 4")
    assert not inbox.put(1, b"")
    inbox.pop()
    assert inbox.put(2, b"xx")
    assert inbox.put(3, b"xx")
    assert not inbox.put(4, b"x")
