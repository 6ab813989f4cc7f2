"""Messages of both channels, by their frames."""

import pytest

from kvatlas.stream.publisher_sockets import END_OF_REPLAY
from kvatlas.stream.replay_channel import is_end_of_replay, split_frames

SEQ = (258).to_bytes(8, "big")


@pytest.mark.parametrize(
    "frames", [[b"kv-events", SEQ, b"x"], [b"", SEQ, b"x"], [b"", b"topic", SEQ, b"x"], [SEQ, b"x"]]
)
def test_number_and_payload_are_found_from_the_end(frames):
    """Live, replayed with a topic, replayed without one (older engines): number and payload are the last two frames."""
    assert split_frames(frames) == (258, b"x")


@pytest.mark.parametrize("frames", [[], [b"x"], [b"topic", b"short", b"x"], [b"", b"\0" * 9, b"x"]])
def test_other_messages_are_refused(frames):
    """A message without an 8-byte number is none of ours."""
    assert split_frames(frames) is None


@pytest.mark.parametrize("frames", [[b"", b"", END_OF_REPLAY, b""], [b"", END_OF_REPLAY, b""]])
def test_end_marker(frames):
    """The end marker has number -1, with and without a topic frame."""
    seq, payload = split_frames(frames)
    assert (is_end_of_replay(seq), payload) == (True, b"")
    assert not is_end_of_replay(258)
