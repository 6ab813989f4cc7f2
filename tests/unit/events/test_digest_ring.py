"""The ring of digests: what it remembers, however it grew."""

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.events.digest_ring import DigestRing


@given(
    st.sampled_from([1, 3, 64, 100, 5_000]),
    st.sampled_from([0, 5, 10**6, 2**63]),
    st.lists(st.tuples(st.sampled_from(["note", "run", "lose"]), st.integers(1, 300)), max_size=30),
)
def test_it_remembers_the_last_batches(most, first, steps):
    """As a dictionary of all batches would, of the last `most` of them; beyond these it may know some more, or none."""
    ring, known, last = DigestRing(most), {}, first - 1
    for step, count in steps:
        if step == "lose":
            ring.pass_by(last, last + count)
            last += count
        elif step == "note":
            known[last + 1] = last % 1_000 + 1
            ring.note(last, last + 1, known[last + 1])
            last += 1
        else:  # as accept_run does
            ring.make_room(last, last + count)
            for seq in range(last + 1, last + count + 1):
                known[seq] = seq % 777 + 1
                ring.words[seq % len(ring.words)] = known[seq]
            last += count
        assert len(ring.words) <= most
        for seq in range(max(first - 2, last - most + 1), last + 1):
            assert ring.find(last, seq) == known.get(seq)
        assert ring.find(last, last + 1) is None
        assert ring.newest(last) == max((seq for seq in known if seq > last - most), default=None)


def test_a_quiet_stream_costs_little():
    """A kilobyte for few batches, and no more than asked for in the end; joining late is no reason to grow."""
    ring = DigestRing(16_384)
    ring.pass_by(-1, 10**6)
    ring.note(10**6, 10**6 + 1, 7)
    assert len(ring.words) == 64
    ring.make_room(10**6 + 1, 10**6 + 100_000)
    assert len(ring.words) == 16_384
    assert ring.find(10**6 + 1, 10**6 + 1) == 7
