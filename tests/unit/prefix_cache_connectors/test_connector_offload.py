"""The connector between scheduler and store: lookups, loads, stores, failures, events, reset."""

from dataclasses import dataclass

import pytest

from kvatlas.clock import ManualClock
from kvatlas.errors import ConfigError, PrefixCacheError
from kvatlas.events import BlockRemoved, BlockStored
from kvatlas.hashing import Lora, RequestExtras, external_hash, key_with_group
from kvatlas.prefix_cache import FullAttentionSpec
from kvatlas.prefix_cache.connector import NO_TRANSFER_RESULTS, ConnectorStats, ExternalHit, TransferResults
from kvatlas.prefix_cache.connectors import (
    BlockFiles,
    DiskConnector,
    DiskTier,
    HostMemoryConnector,
    HostTier,
    OffloadConfig,
    StoreWhen,
    TieredConnector,
)
from kvatlas.prefix_cache.connectors.tier import TierStats
from support.prefix_cache import BLOCK_SIZE, make_request

PROMPT = list(range(13))
BLOCK_BYTES = 1000


class Tables:
    """Block tables as a scheduler's cache would show them."""

    def __init__(self):
        self.of = {}

    def block_ids(self, request_id):
        """One group."""
        return (self.of.get(request_id, []),)


class RunningClock(ManualClock):
    """Time passes with every look at it."""

    def monotonic_s(self):
        """A millisecond later than before."""
        self.advance(0.001)
        return super().monotonic_s()


@dataclass
class Rig:
    """A connector with its clock and tables, driven as a scheduler drives it."""

    connector: HostMemoryConnector
    clock: ManualClock
    tables: Tables

    def step(self, *requests):
        """One step in which these requests are scheduled."""
        return self.connector.run_step(self.connector.build_step(requests))

    def admit(self, request, block_ids, *, local=0):
        """Look up and accept; returns the answer of the lookup."""
        found = self.connector.get_num_new_matched_tokens(request, local)
        self.tables.of[request.request_id] = block_ids
        self.connector.update_state_after_alloc(request, (block_ids,), found.tokens or 0)
        return found

    def finish(self, request, block_ids, *, computed=None):
        """End a request that computed so many tokens (default: all)."""
        request.num_computed_tokens = request.num_tokens if computed is None else computed
        return self.connector.request_finished(request, (block_ids,))

    def store(self, token_ids=PROMPT, request_id="writer", **settings):
        """Have a request's blocks in the store."""
        request = make_request(request_id, token_ids, **settings)
        self.admit(request, list(range(1, 9)))
        request.num_computed_tokens = request.num_tokens
        self.step(request)
        self.finish(request, list(range(1, 9)))
        self.step()
        return request


def make_rig(make=HostMemoryConnector, *, capacity_blocks=100, store_settings=None, **settings):
    """A rig over host memory unless another kind is given."""
    config = OffloadConfig((FullAttentionSpec(BLOCK_SIZE),), BLOCK_SIZE, block_bytes=BLOCK_BYTES, **settings)
    clock = ManualClock()
    if store_settings is None:
        store_settings = {"capacity_blocks": capacity_blocks}
    connector = make(config, clock, **store_settings)
    tables = Tables()
    connector.bind(tables)
    return Rig(connector, clock, tables)


def keys_of(request, *indexes):
    """Keys of blocks of a request."""
    return [key_with_group(request.block_hashes[index], 0) for index in indexes]


def handles_of(request, *indexes):
    """Hashes of blocks as events carry them."""
    return [external_hash(request.block_hashes[index]) for index in indexes]


def test_a_finished_request_is_found_by_the_next():
    """Its complete blocks can be loaded; the incomplete one cannot."""
    rig = make_rig()
    rig.store()
    found = rig.connector.get_num_new_matched_tokens(make_request("next", [*PROMPT, 99]), 0)
    assert found == ExternalHit(12, is_async=True)


def test_the_blocks_of_a_finished_request_are_kept_until_they_are_written():
    """The scheduler is told to wait, and told when it may free them; without anything new it need not wait."""
    rig = make_rig(store_bytes_per_s=BLOCK_BYTES)
    request = make_request("a", PROMPT)
    rig.admit(request, [1, 2, 3, 4])
    assert rig.finish(request, [1, 2, 3, 4])
    assert rig.step() == NO_TRANSFER_RESULTS
    assert rig.connector.next_ready_s() == 3.0
    rig.clock.advance(2.9)
    assert rig.step() == NO_TRANSFER_RESULTS
    assert rig.connector.tier.stats.written == 0
    rig.clock.advance(0.1)
    assert rig.step() == TransferResults(finished_sending=frozenset({"a"}))
    assert rig.connector.next_ready_s() is None
    again = make_request("b", PROMPT)
    assert not rig.finish(again, [1, 2, 3, 4])


def test_only_computed_blocks_are_stored():
    """An aborted prefill gives what it computed; the block that the last sampled token completes gives nothing."""
    rig = make_rig()
    aborted = make_request("aborted", PROMPT)
    rig.finish(aborted, [1, 2, 3, 4], computed=9)
    rig.step()
    assert rig.connector.tier.keys == tuple(keys_of(aborted, 1, 0))
    ended = make_request("ended", range(100, 107))
    ended.append_output(1)
    rig.finish(ended, [5, 6], computed=8)
    rig.step()
    assert len(rig.connector.tier) == 3


def test_filled_blocks_are_stored_with_the_step_that_completes_them():
    """Chunk by chunk, each block once; drafts beyond the known tokens never."""
    rig = make_rig(store_when=StoreWhen.FILLED)
    request = make_request("a", PROMPT)
    rig.admit(request, [1, 2, 3, 4])
    planned = []
    for computed in (3, 9, 13, 17):
        request.num_computed_tokens = computed
        transfers = rig.connector.build_step([request])
        planned.append([key for job in transfers.stores for key in job.keys])
        rig.connector.run_step(transfers)
    assert planned == [[], keys_of(request, 0, 1), keys_of(request, 2), []]
    assert not rig.finish(request, [1, 2, 3, 4])


def test_a_request_that_ends_in_mid_store_waits_for_it():
    """With stores of filled blocks on their way the end is reported later, once."""
    rig = make_rig(store_when=StoreWhen.FILLED, store_bytes_per_s=BLOCK_BYTES)
    request = make_request("a", PROMPT)
    rig.admit(request, [1, 2, 3, 4])
    request.num_computed_tokens = 9
    rig.step(request)
    request.num_computed_tokens = 13
    transfers = rig.connector.build_step([request])
    assert rig.finish(request, [1, 2, 3, 4])
    rig.connector.run_step(transfers)
    rig.clock.advance(2)
    assert rig.step().finished_sending == frozenset()
    rig.clock.advance(1)
    assert rig.step().finished_sending == {"a"}
    assert rig.step().finished_sending == frozenset()


def test_links_without_speed_take_no_time_by_a_clock_that_runs():
    """A store ends with its step, a load too, although the time moved on in between."""
    rig = make_rig()
    rig.connector._clock = RunningClock()
    rig.store()
    assert len(rig.connector.tier) == 3
    rig.admit(make_request("a", PROMPT), [1, 2, 3, 4])
    assert rig.step().finished_receiving == {"a"}


def test_an_asynchronous_load_takes_the_time_of_its_bytes():
    """Loads queue on one link; each request is named once, in the first step after its end."""
    rig = make_rig(load_bytes_per_s=BLOCK_BYTES)
    rig.store()
    first, second = make_request("first", PROMPT), make_request("second", PROMPT)
    assert rig.admit(first, [10, 11, 12, 13]).tokens == 12
    assert rig.admit(second, [20, 21, 22, 23], local=8).tokens == 4
    assert rig.step() == NO_TRANSFER_RESULTS
    assert rig.connector.next_ready_s() == 3.0
    rig.clock.advance(3)
    assert rig.step() == TransferResults(finished_receiving=frozenset({"first"}))
    rig.clock.advance(1)
    assert rig.step() == TransferResults(finished_receiving=frozenset({"second"}))
    assert rig.step() == NO_TRANSFER_RESULTS


def test_a_load_names_the_blocks_after_the_local_hit():
    """Keys go to the device blocks of their positions, in order."""
    rig = make_rig()
    rig.store()
    request = make_request("a", PROMPT)
    rig.admit(request, [7, 8, 9, 10], local=4)
    (job,) = rig.connector.build_step([]).loads
    assert job.blocks == tuple(zip(keys_of(request, 1, 2), (8, 9), strict=True))
    assert (job.request_id, job.is_async) == ("a", True)


def test_a_synchronous_load_leaves_a_token_to_compute():
    """A prompt of whole blocks is loaded up to its last block; asynchronously as a whole. The step lasts longer."""
    rig = make_rig(async_loads=False, load_bytes_per_s=BLOCK_BYTES)
    rig.store(range(12))
    request = make_request("a", range(12))
    assert rig.admit(request, [1, 2, 3]) == ExternalHit(8, is_async=False)
    transfers = rig.connector.build_step([request])
    assert rig.connector.sync_load_s(transfers) == 2.0
    assert rig.connector.run_step(transfers) == NO_TRANSFER_RESULTS
    whole = make_rig()
    whole.store(range(12))
    assert whole.connector.get_num_new_matched_tokens(make_request("a", range(12)), 0).tokens == 12


def test_the_answer_is_not_known_while_the_next_block_is_on_its_way():
    """A request that would go on from blocks being written, or wrote some itself, is asked to wait."""
    rig = make_rig(store_bytes_per_s=BLOCK_BYTES)
    rig.finish(make_request("a", PROMPT), [1, 2, 3, 4])
    rig.step()
    request = make_request("b", PROMPT)
    assert rig.connector.get_num_new_matched_tokens(request, 0) == ExternalHit(None)
    other = make_request("c", range(50, 63))
    assert rig.connector.get_num_new_matched_tokens(other, 0) == ExternalHit(0)
    rig.clock.advance(3)
    rig.step()
    assert rig.connector.get_num_new_matched_tokens(request, 0).tokens == 12


def test_blocks_being_loaded_are_not_evicted():
    """New blocks find no room while all that is stored is being read; afterwards they do."""
    rig = make_rig(capacity_blocks=3, load_bytes_per_s=BLOCK_BYTES)
    rig.store()
    reader = make_request("reader", PROMPT)
    rig.admit(reader, [1, 2, 3, 4])
    rig.step()
    rig.store(range(50, 63), "other")
    assert rig.connector.tier.stats.refused == 3
    rig.clock.advance(3)
    assert rig.step() == TransferResults(finished_receiving=frozenset({"reader"}))
    rig.store(range(50, 63), "another")
    assert rig.connector.tier.stats.evicted == 3


def test_the_end_of_a_chain_leaves_first():
    """Whatever order blocks were stored and used in, the start of a prompt outlives its end."""
    rig = make_rig(capacity_blocks=4)
    writer = rig.store()
    assert rig.connector.tier.keys == tuple(keys_of(writer, 2, 1, 0))
    rig.store(range(50, 58), "two blocks")
    assert [rig.connector.tier.contains(key) for key in keys_of(writer, 0, 1, 2)] == [True, True, False]


def test_a_local_hit_counts_as_a_use():
    """Blocks that the device still has stay in the store although nobody loads them."""
    rig = make_rig(capacity_blocks=5)
    writer = rig.store()
    rig.store(range(50, 58), "b")
    hot = make_request("hot", PROMPT)
    rig.admit(hot, [1, 2, 3, 4], local=12)
    rig.store(range(70, 78), "c")
    assert [rig.connector.tier.contains(key) for key in keys_of(writer, 0, 1, 2)] == [True, True, True]


def lose(rig, *keys):
    """Damage stored blocks so that a load finds out."""
    for key in keys:
        rig.connector.tier._payloads[key] = b"not the bytes of this block"


def test_blocks_that_fail_to_load_are_named_by_the_device_blocks():
    """Synchronously in the step itself; the others are fine."""
    rig = make_rig(async_loads=False)
    writer = rig.store()
    lose(rig, *keys_of(writer, 1))
    rig.admit(make_request("a", PROMPT), [7, 8, 9, 10])
    assert rig.step() == TransferResults(invalid_block_ids=frozenset({8}))
    assert (rig.connector.loads.blocks_wrong, rig.connector.loads.blocks_loaded) == (1, 2)


def test_a_failed_asynchronous_load_is_reported_with_its_end():
    """The request is named as received, and its bad blocks in the same step."""
    rig = make_rig(load_bytes_per_s=BLOCK_BYTES)
    writer = rig.store()
    lose(rig, *keys_of(writer, 2))
    rig.admit(make_request("a", PROMPT), [7, 8, 9, 10])
    assert rig.step() == NO_TRANSFER_RESULTS
    rig.clock.advance(3)
    assert rig.step() == TransferResults(finished_receiving=frozenset({"a"}), invalid_block_ids=frozenset({9}))


def test_what_was_computed_on_bad_blocks_is_not_stored():
    """Neither by the request itself nor by one that shares the block; both may store once it was recomputed."""
    rig = make_rig(async_loads=False, store_when=StoreWhen.FILLED)
    writer = rig.store()
    lose(rig, *keys_of(writer, 2))
    own, sharer = make_request("own", range(20)), make_request("sharer", range(21))
    own.append_output([7] * 4)
    rig.admit(own, [7, 8, 9, 10, 11, 12])
    rig.admit(sharer, [7, 8, 9, 20, 21, 22], local=12)
    own.num_computed_tokens, sharer.num_computed_tokens = 24, 21
    before = rig.connector.tier.stats.written
    assert rig.step(own, sharer).invalid_block_ids == {9}
    assert rig.connector.tier.stats.written == before
    assert rig.connector.stores.blocks_dropped == 3
    assert rig.step(own, sharer) == NO_TRANSFER_RESULTS
    assert rig.connector.tier.stats.written == before + 3


def test_an_aborted_load_is_still_reported():
    """The request ends while its blocks are being filled: nothing of it is stored, and the end of the load is told."""
    rig = make_rig(load_bytes_per_s=BLOCK_BYTES)
    rig.store()
    request = make_request("a", [*PROMPT, *range(60, 70)])
    rig.admit(request, [1, 2, 3, 4, 5, 6])
    rig.step()
    assert not rig.finish(request, [1, 2, 3, 4, 5, 6], computed=12)
    rig.clock.advance(3)
    assert rig.step().finished_receiving == {"a"}
    assert rig.connector.tier.stats.written == 3


def test_plain_events_are_placeholders():
    """One hash, no parent, no tokens, block size 0, medium CPU and the group; removals of one burst share an event."""
    rig = make_rig(capacity_blocks=3)
    writer = rig.store()
    stored = rig.connector.take_events()
    assert stored == [
        BlockStored([handle], None, [], 0, None, "CPU", None, group_idx=0) for handle in handles_of(writer, 0, 1, 2)
    ]
    assert rig.connector.take_events() == []
    other = rig.store(range(50, 58), "b")
    removed = [BlockRemoved([handle], "CPU", 0) for handle in handles_of(writer, 2, 1)]
    added = [BlockStored([h], None, [], 0, None, "CPU", None, group_idx=0) for h in handles_of(other, 0, 1)]
    assert rig.connector.take_events() == [removed[0], added[0], removed[1], added[1]]


def test_self_describing_events_tell_tokens_and_parent():
    """Everything but extra keys, so that onlookers can place the block without having seen it on the device."""
    rig = make_rig(self_describing_events=True)
    extras = RequestExtras(lora=Lora("tuned"))
    writer = rig.store(extras=extras)
    first, second, third = handles_of(writer, 0, 1, 2)
    kind = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    assert rig.connector.take_events() == [
        BlockStored([first], None, [0, 1, 2, 3], 4, None, "CPU", "tuned", **kind),
        BlockStored([second], first, [4, 5, 6, 7], 4, None, "CPU", "tuned", **kind),
        BlockStored([third], second, [8, 9, 10, 11], 4, None, "CPU", "tuned", **kind),
    ]


def test_descriptions_are_kept_no_longer_than_blocks():
    """After a thousand blocks went through a small store only those in it are described."""
    rig = make_rig(capacity_blocks=5, self_describing_events=True)
    for number in range(200):
        rig.store(range(number * 100, number * 100 + 21), f"r{number}")
        rig.connector.take_events()
    assert len(rig.connector._events._descriptions) == 5


def test_raw_digests_in_events_when_the_engine_sends_them():
    """The hash form follows the engine's setting."""
    rig = make_rig(int_block_hashes=False)
    writer = rig.store()
    assert [event.block_hashes[0] for event in rig.connector.take_events()] == writer.block_hashes


def test_a_reset_forgets_silently_as_the_engine_does():
    """Nothing is found afterwards, what is on its way does not arrive, and no event tells of it unless asked for."""
    rig = make_rig(store_bytes_per_s=BLOCK_BYTES)
    rig.finish(make_request("a", PROMPT), [1, 2, 3, 4])
    rig.step()
    rig.clock.advance(3)
    rig.step()
    rig.finish(make_request("b", range(50, 63)), [1, 2, 3, 4])
    rig.step()
    assert rig.connector.reset_cache() is True
    stores = rig.connector.take_events()
    assert [type(event) for event in stores] == [BlockStored] * 3
    rig.clock.advance(3)
    assert rig.step().finished_sending == {"b"}
    assert (len(rig.connector.tier), rig.connector.take_events()) == (0, [])


def test_a_reset_may_be_announced():
    """With `announce_reset` onlookers are told that the blocks are gone."""
    rig = make_rig(announce_reset=True)
    writer = rig.store()
    rig.connector.take_events()
    rig.connector.reset_cache()
    assert rig.connector.take_events() == [BlockRemoved(handles_of(writer, 2, 1, 0), "CPU", 0)]


def test_a_running_request_stores_again_after_a_reset():
    """What it had stored is gone, so its blocks count as new."""
    rig = make_rig(store_when=StoreWhen.FILLED)
    request = make_request("a", PROMPT)
    rig.admit(request, [1, 2, 3, 4])
    request.num_computed_tokens = 13
    rig.step(request)
    rig.connector.reset_cache()
    rig.step(request)
    assert len(rig.connector.tier) == 3


def test_no_reset_while_a_load_runs():
    """It fails and changes nothing: the blocks are needed."""
    rig = make_rig(load_bytes_per_s=BLOCK_BYTES)
    rig.store()
    rig.admit(make_request("a", PROMPT), [1, 2, 3, 4])
    assert rig.connector.reset_cache() is False
    assert len(rig.connector.tier) == 3


def test_two_tiers_load_from_the_nearer_and_name_each(tmp_path):
    """What the small host tier lost comes from disk, is counted as disk, and returns to the host tier."""
    host = HostTier(2)
    disk = DiskTier(BlockFiles(tmp_path), 10**6, clock=ManualClock())
    rig = make_rig(TieredConnector, store_settings={"host": host, "disk": disk})
    writer = rig.store()
    assert {event.medium for event in rig.connector.take_events()} == {"CPU", "STORAGE"}
    assert (len(host), len(disk)) == (2, 3)
    reader = make_request("reader", PROMPT)
    assert rig.admit(reader, [1, 2, 3, 4]).tokens == 12
    sources = rig.connector.external_hit_sources(reader, 12)
    assert sum(sources.values()) == 12
    assert sources == {"host": 8, "disk": 4}
    assert rig.step().invalid_block_ids == frozenset()
    assert (host.stats.read, disk.stats.read) == (2, 1)
    assert not host._recency.num_pinned
    assert not disk._recency.num_pinned
    host.clear()
    assert rig.connector.get_num_new_matched_tokens(make_request("c", PROMPT), 0).tokens == 12
    assert writer.block_hashes == reader.block_hashes


def test_a_restarted_disk_connector_tells_what_it_found(tmp_path):
    """Blocks of a former life are served and announced as STORAGE; torn ones are not."""
    settings = {"directory": tmp_path, "max_bytes": 10**6, "namespace": "m"}
    first = make_rig(DiskConnector, store_settings=settings)
    writer = first.store()
    BlockFiles(tmp_path).path_of(keys_of(writer, 1)[0]).write_bytes(b"kvatlasB")
    second = make_rig(DiskConnector, store_settings=settings)
    assert second.connector.disk.stats == TierStats(torn=1)
    assert {event.block_hashes[0] for event in second.connector.take_events()} == set(handles_of(writer, 0, 2))
    reader = make_request("reader", PROMPT)
    assert second.admit(reader, [1, 2, 3, 4]).tokens == 4
    assert second.connector.external_hit_sources(reader, 4) == {"disk": 4}


@pytest.mark.parametrize(
    "settings",
    [{"block_bytes": 0}, {"payload_bytes": 0}, {"specs": (FullAttentionSpec(4),) * 2, "async_loads": False}],
)
def test_settings_that_cannot_work_are_refused(settings):
    """With a sentence that says what to change."""
    with pytest.raises(ConfigError, match=r"must be|need"):
        OffloadConfig(**{"specs": (FullAttentionSpec(4),), "hash_block_size": 4, **settings})


def test_links_and_stores_without_size_are_refused():
    """A speed of 0, a host tier of 0 blocks, a connector without groups."""
    with pytest.raises(ConfigError, match="bytes_per_s"):
        make_rig(load_bytes_per_s=0)
    with pytest.raises(ConfigError, match="capacity_blocks"):
        HostTier(0)
    with pytest.raises(ConfigError, match="group"):
        HostMemoryConnector(OffloadConfig((), 4), ManualClock(), capacity_blocks=1)


def test_driven_against_its_rules_it_says_so():
    """A lookup from the middle of a block; a step without the cache."""
    rig = make_rig()
    with pytest.raises(PrefixCacheError, match="block-aligned"):
        rig.connector.get_num_new_matched_tokens(make_request("a", PROMPT), 3)
    config = OffloadConfig((FullAttentionSpec(BLOCK_SIZE),), BLOCK_SIZE, async_loads=False)
    unbound = HostMemoryConnector(config, ManualClock(), capacity_blocks=9)
    with pytest.raises(PrefixCacheError, match="bind"):
        unbound._block_ids("a")


def test_the_stats_of_a_scheduler_split_hits_by_source():
    """Preempted requests are apart; sources that do not add up become unspecified."""
    stats = ConnectorStats()
    stats.record(13, 12, {"host": 8, "disk": 4}, preempted=False)
    stats.record(10, 4, {"host": 3}, preempted=False)
    stats.record(9, 0, {}, preempted=False)
    stats.record(16, 8, {"host": 8}, preempted=True)
    assert (stats.requests, stats.queries, stats.hits) == (3, 32, 16)
    assert stats.hits_by_source == {"host": 8, "disk": 4, "external_unspecified": 4}
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 16, 8)
