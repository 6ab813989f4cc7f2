"""The subscriber's own queue."""

from kvatlas.stream.inbox import LiveInbox


def test_order_is_kept_and_what_exceeds_the_bounds_is_refused() -> None:
    """First in, first out, run by run; a refusal is remembered until somebody clears it."""
    inbox = LiveInbox(max_batches=2, max_bytes=100)
    assert [inbox.put(seq, [b"x"]) for seq in (4, 9, 10)] == [0, 0, 1]
    assert inbox.has_refused
    assert len(inbox) == 2
    assert inbox.pop_run(3, 100) == (4, [b"x"])
    assert inbox.pop_run(3, 100) == (9, [b"x"])
    assert inbox.pop_run(3, 100) == (0, [])
    assert inbox.has_refused
    assert len(inbox) == 0


def test_the_head_of_a_run_is_taken_as_far_as_there_is_room() -> None:
    """By number of batches and by bytes; all behind the first that does not fit is refused, so no hole is within."""
    inbox = LiveInbox(max_batches=4, max_bytes=10)
    assert inbox.put(0, [b"a", b"b", b"c", b"d", b"e", b"f"]) == 2
    assert inbox.put(6, [b"g", b"h"]) == 2
    assert len(inbox) == 4
    assert inbox.pop_run(10, 100) == (0, [b"a", b"b", b"c", b"d"])
    assert inbox.put(8, [b"12345", b"12345", b"", b"1", b""]) == 2
    assert inbox.pop_run(10, 100) == (8, [b"12345", b"12345", b""])
    assert inbox.put(20, [b"1234", b"12345678", b"1"]) == 2
    assert inbox.pop_run(10, 100) == (20, [b"1234"])


def test_a_run_that_fits_exactly_refuses_nothing() -> None:
    """Both bounds belong to what may be held; an empty run changes nothing."""
    inbox = LiveInbox(max_batches=3, max_bytes=6)
    assert inbox.put(0, [b"xx", b"xx"]) == 0
    assert inbox.put(5, []) == 0
    assert inbox.put(2, [b"xx"]) == 0
    assert not inbox.has_refused
    assert inbox.put(9, []) == 0
    assert not inbox.has_refused
    assert len(inbox) == 3
    assert [inbox.pop_run(9, 9), inbox.pop_run(9, 9), inbox.pop_run(9, 9)] == [(0, [b"xx"] * 2), (2, [b"xx"]), (0, [])]


def test_the_caller_s_list_is_left_as_it_was() -> None:
    """Neither a refusal nor a run read in parts changes what the reader made."""
    payloads = [b"x"] * 5
    inbox = LiveInbox(max_batches=4, max_bytes=100)
    assert inbox.put(0, payloads) == 1
    assert inbox.pop_run(1, 100) == (0, [b"x"])
    assert payloads == [b"x"] * 5


def test_bytes_are_bounded_but_one_batch_always_fits() -> None:
    """A batch larger than the bound is not refused for ever: an empty queue takes it, and nothing else beside it."""
    inbox = LiveInbox(max_batches=10, max_bytes=4)
    assert inbox.put(0, [b"larger than 4", b"", b"x"]) == 2
    assert inbox.put(1, [b""]) == 1
    assert inbox.pop_run(1, 1) == (0, [b"larger than 4"])
    assert inbox.put(2, [b"xx"]) == 0
    assert inbox.put(3, [b"xx", b"x"]) == 1
    assert len(inbox) == 2
    inbox.pop_run(9, 9)
    inbox.pop_run(9, 9)
    assert inbox.put(9, [b"larger than 4"]) == 0
    assert inbox.has_refused  # that this one was taken does not undo it


def test_a_run_ends_at_either_bound() -> None:
    """As many batches as asked for; the one that reaches the bytes is the last; room is given back for each."""
    inbox = LiveInbox(max_batches=6, max_bytes=12)
    assert inbox.put(0, [b"xx"] * 6) == 0
    assert inbox.pop_run(2, 100) == (0, [b"xx", b"xx"])
    assert len(inbox) == 4
    assert inbox.pop_run(10, 3) == (2, [b"xx", b"xx"])
    assert inbox.pop_run(1, 1) == (4, [b"xx"])
    assert inbox.put(6, [b"x", b"x" * 9, b"x"]) == 1
    assert inbox.pop_run(10, 100) == (5, [b"xx"])
    assert inbox.pop_run(10, 1) == (6, [b"x"])
    assert inbox.pop_run(1, 1) == (7, [b"x" * 9])
    assert inbox.pop_run(10, 100) == (0, [])
    assert inbox.put(0, [b"xx"] * 6) == 0


def test_a_batch_larger_than_a_run_is_a_run() -> None:
    """It neither waits for ever nor leaves the books wrong."""
    inbox = LiveInbox(max_batches=2, max_bytes=4)
    assert inbox.put(0, [b"larger than both bounds"]) == 0
    assert inbox.pop_run(8, 2) == (0, [b"larger than both bounds"])
    assert inbox.put(1, [b"xx", b"xx"]) == 0
    assert len(inbox) == 2


def test_the_last_number_is_read_in_parts_like_any_other() -> None:
    """A run up to 2**64 - 1 keeps its numbers when it is split."""
    inbox = LiveInbox(max_batches=9, max_bytes=100)
    assert inbox.put(2**64 - 3, [b"a", b"b", b"c"]) == 0
    assert inbox.pop_run(2, 100) == (2**64 - 3, [b"a", b"b"])
    assert inbox.pop_run(2, 100) == (2**64 - 1, [b"c"])
