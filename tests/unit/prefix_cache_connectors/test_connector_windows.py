"""Models with sliding-window groups: only what a window still sees is asked of the store."""

import pytest

from kvatlas.clock import ManualClock
from kvatlas.errors import ConfigError
from kvatlas.hashing import key_with_group
from kvatlas.prefix_cache import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from kvatlas.prefix_cache.connector import TransferResults
from kvatlas.prefix_cache.connectors import HostMemoryConnector, OffloadConfig, StoreWhen, synthetic_payload
from support.prefix_cache import make_request

FULL, WINDOW = 0, 1


class Tables:
    """Block tables by request."""

    def __init__(self):
        self.of = {}

    def block_ids(self, request_id):
        """Two groups."""
        return self.of[request_id]


def make_connector(*, full=4, window=4, **settings):
    """Full attention, and a window of 8 tokens; block sizes as given."""
    specs = (FullAttentionSpec(full), SlidingWindowSpec(window, 8))
    connector = HostMemoryConnector(OffloadConfig(specs, 4, **settings), ManualClock(), capacity_blocks=100)
    tables = Tables()
    connector.bind(tables)
    return connector, tables


def put(connector, request, group, *indexes):
    """Blocks of hash-block size into the store."""
    for index in indexes:
        key = key_with_group(request.block_hashes[index], group)
        connector.host.write(key, synthetic_payload(key, 16))


def hit(connector, request, local=0):
    """External tokens."""
    return connector.get_num_new_matched_tokens(request, local).tokens


def test_a_window_needs_its_last_blocks_only():
    """All blocks of the full group, of the window group those the next token sees; without them the hit moves back."""
    connector, _ = make_connector()
    request = make_request("a", range(30))
    put(connector, request, FULL, *range(7))
    assert hit(connector, request) == 0
    put(connector, request, WINDOW, 5, 6)
    assert hit(connector, request) == 28
    connector.host.clear()
    put(connector, request, FULL, *range(7))
    put(connector, request, WINDOW, 1, 2, 4, 6)
    assert hit(connector, request) == 12


def test_a_local_hit_gives_the_window_what_it_holds():
    """Blocks before the local hit's end are the device's own."""
    connector, _ = make_connector()
    request = make_request("a", range(30))
    put(connector, request, FULL, *range(7))
    put(connector, request, WINDOW, 3)
    assert hit(connector, request, 12) == 4
    assert hit(connector, request, 8) == 0


def test_the_last_token_is_not_loaded():
    """With a window even an asynchronous load leaves a token, and with it its block, to compute."""
    connector, _ = make_connector()
    request = make_request("a", range(28))
    put(connector, request, FULL, *range(7))
    put(connector, request, WINDOW, *range(7))
    assert hit(connector, request) == 24


def test_different_block_sizes_meet_where_both_end():
    """Blocks of 8 and 4 tokens: hits are multiples of 8; a block of 8 has the hash of its second half."""
    connector, _ = make_connector(full=8)
    request = make_request("a", range(30))
    put(connector, request, FULL, 1, 3, 5)
    put(connector, request, WINDOW, 4, 5, 6)
    assert hit(connector, request) == 24
    connector.update_state_after_alloc(request, ([1, 2, 3], [0, 0, 0, 0, 11, 12]), 24)
    (job,) = connector.build_step([]).loads
    assert [block_id for _, block_id in job.blocks] == [1, 2, 3, 11, 12]
    assert connector.external_hit_sources(request, 24) == {"host": 24}


def test_null_blocks_are_not_stored():
    """What fell out of the window is not in the device: neither at the end nor on filling is it claimed to be."""
    for when in StoreWhen:
        connector, tables = make_connector(store_when=when)
        request = make_request("a", range(30))
        request.num_computed_tokens = 30
        tables.of["a"] = ([1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 0, 16, 17, 18])
        transfers = connector.build_step([request])
        connector.request_finished(request, tables.of["a"])
        connector.run_step(transfers)
        connector.run_step(connector.build_step([]))
        expected = {key_with_group(request.block_hashes[index], FULL) for index in range(7)}
        expected |= {key_with_group(request.block_hashes[index], WINDOW) for index in (5, 6)}
        assert set(connector.host.keys) == expected


def test_a_failed_load_names_the_request():
    """Block ids do not tell groups apart, so the whole load counts as failed."""
    connector, _ = make_connector()
    request = make_request("a", range(30))
    put(connector, request, FULL, *range(7))
    put(connector, request, WINDOW, 5, 6)
    connector.update_state_after_alloc(
        request, (list(range(1, 9)), [0, 0, 0, 0, 0, 9, 10, 11]), hit(connector, request)
    )
    connector.host._payloads[key_with_group(request.block_hashes[6], WINDOW)] = b"wrong"
    assert connector.run_step(connector.build_step([])) == TransferResults(
        finished_receiving=frozenset({"a"}), failed_receiving=frozenset({"a"})
    )


def test_kinds_without_blocks_to_keep_are_refused():
    """A chunk or a running state cannot be put together from stored blocks here."""
    with pytest.raises(ConfigError, match="chunked_local_attention"):
        HostMemoryConnector(OffloadConfig((ChunkedLocalAttentionSpec(4, 8),), 4), ManualClock(), capacity_blocks=1)
