"""One stored block as bytes: only exactly what was written decodes."""

import pytest

from kvatlas.prefix_cache.connectors import decode_block, encode_block, namespace_digest, synthetic_payload
from kvatlas.prefix_cache.connectors.block_file import HEADER_BYTES, Damage, check_size

KEY = bytes(range(36))
SPACE = namespace_digest("model-a")
PAYLOAD = synthetic_payload(KEY, 40)
FILE = encode_block(KEY, PAYLOAD, SPACE)


def verdict(data, *, key=KEY, space=SPACE):
    """What decoding says: the payload, or the name of the damage."""
    found = decode_block(data, key, space)
    return found.value if isinstance(found, Damage) else found


def test_what_was_written_is_read():
    """A whole file gives back its payload; also an empty payload and a key of another length."""
    assert verdict(FILE) == PAYLOAD
    assert verdict(encode_block(b"k", b"", SPACE), key=b"k") == b""


@pytest.mark.parametrize("length", range(len(FILE)))
def test_a_cut_file_is_torn_at_every_length(length):
    """Whatever the length, a file that lost its end is refused as torn, by the full check and by the quick one."""
    cut = FILE[:length]
    assert verdict(cut) == "torn"
    assert check_size(cut[:HEADER_BYTES], len(cut), SPACE) is Damage.TORN


@pytest.mark.parametrize("position", range(len(FILE)))
def test_a_changed_byte_is_noticed_at_every_position(position):
    """Whichever byte changes, the file is refused."""
    changed = bytearray(FILE)
    changed[position] ^= 0x40
    assert verdict(bytes(changed)) in {"torn", "corrupt", "foreign"}


def test_a_tail_that_does_not_belong_is_corrupt():
    """Bytes after the end, as of a longer file overwritten in place, are refused."""
    assert verdict(FILE + b"\0") == "corrupt"


def test_a_block_of_another_key_is_corrupt():
    """A file under a wrong name is whole but not what was asked for."""
    assert verdict(FILE, key=bytes(36)) == "corrupt"
    assert verdict(FILE, key=KEY[:-1]) == "corrupt"


def test_files_of_others_are_foreign():
    """Another namespace, another version, another program."""
    later_version = bytearray(FILE)
    later_version[9] = 2
    assert verdict(FILE, space=namespace_digest("model-b")) == "foreign"
    assert verdict(bytes(later_version)) == "foreign"
    assert verdict(b"#!/bin/sh\necho this is not a block, and longer than a header would be.....\n") == "foreign"
    assert verdict(b"short text") == "foreign"
