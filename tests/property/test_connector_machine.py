"""Stores of blocks, and the connector over them, against naive models: lists, sets, and a count of promises."""

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvatlas.clock import ManualClock
from kvatlas.hashing import key_with_group
from kvatlas.prefix_cache import FullAttentionSpec
from kvatlas.prefix_cache.connectors import (
    BlockFiles,
    DiskTier,
    HostMemoryConnector,
    HostTier,
    OffloadConfig,
    StoreWhen,
    encode_block,
    namespace_digest,
    synthetic_payload,
)
from support.prefix_cache import BLOCK_SIZE, make_request

KEYS = [bytes([number]) * 32 + bytes(4) for number in range(12)]
keys = st.sampled_from(KEYS)


def payload_of(key):
    """The bytes of a block; blocks differ in size."""
    return synthetic_payload(key, 20 + 40 * (key[0] % 3))


class NaiveTier:
    """A list of keys, used longest ago first, and the bytes each takes."""

    def __init__(self, bound, size_of):
        self.bound, self.size_of = bound, size_of
        self.order = []
        self.pins = Counter()

    @property
    def total(self):
        """Sum of the sizes."""
        return sum(map(self.size_of, self.order))

    def use(self, key):
        """Move a key to the end; whether it is there."""
        if key not in self.order:
            return False
        self.order.remove(key)
        self.order.append(key)
        return True

    def make_room(self, key):
        """Drop unpinned keys, oldest first, until one more fits; whether it does."""
        if self.size_of(key) > self.bound:
            return False
        while self.total + self.size_of(key) > self.bound:
            victims = [one for one in self.order if not self.pins[one]]
            if not victims:
                return False
            self.order.remove(victims[0])
        return True

    def write(self, key):
        """Use or add a key; whether it is there now."""
        if self.use(key):
            return True
        if not self.make_room(key):
            return False
        self.order.append(key)
        return True


class TierMachine(RuleBasedStateMachine):
    """What every tier promises: the bound, exact recency, only right bytes, and changes that mirror the content."""

    tier: HostTier | DiskTier
    model: NaiveTier

    def __init__(self):
        super().__init__()
        self.told = set()

    @rule(key=keys)
    def write(self, key):
        """A block arrives."""
        assert self.tier.write(key, payload_of(key)) == self.model.write(key)

    @rule(key=keys)
    def read(self, key):
        """A block is wanted."""
        expected = payload_of(key) if self.model.use(key) else None
        assert self.tier.read(key) == expected

    @rule(some=st.lists(keys, max_size=5))
    def touch(self, some):
        """Blocks are used elsewhere."""
        self.tier.touch(some)
        for key in some:
            self.model.use(key)

    @rule(data=st.data())
    def pin(self, data):
        """A load begins, mostly of a block that is here."""
        key = data.draw(st.sampled_from(self.model.order) if self.model.order else keys)
        self.tier.pin(key)
        self.model.pins[key] += 1

    @precondition(lambda self: self.model.pins)
    @rule(data=st.data())
    def unpin(self, data):
        """A load ends."""
        key = data.draw(st.sampled_from(sorted(self.model.pins)))
        self.tier.unpin(key)
        self.model.pins -= Counter([key])

    @rule()
    def clear(self):
        """The store is reset."""
        self.tier.clear()
        self.model.order.clear()

    @invariant()
    def content_and_order_agree(self):
        """Same keys in the same order, within the bound; every key is found, no other is."""
        assert list(self.tier.keys) == self.model.order
        assert self.model.total <= self.model.bound
        assert [key for key in KEYS if self.tier.contains(key)] == sorted(self.model.order)

    @invariant()
    def changes_mirror_content(self):
        """Who applies the changes to a set holds the content: nothing stored twice, nothing removed that was not there."""
        for change in self.tier.take_changes():
            for key in change.keys:
                assert (key in self.told) is not change.stored
                (self.told.add if change.stored else self.told.discard)(key)
        assert self.told == set(self.model.order)


class HostTierMachine(TierMachine):
    """Host memory: every block counts one."""

    @initialize(capacity=st.integers(1, 6))
    def make(self, capacity):
        """A small tier."""
        self.tier = HostTier(capacity)
        self.model = NaiveTier(capacity, lambda key: 1)


class Killed(BaseException):
    """The process dies here."""


class MortalFiles(BlockFiles):
    """Dies at one step of the next write when told to."""

    step: str | None = None
    written_bytes = 0

    def open_temporary(self):
        """Dies with the file made, and gives its lock up as a process does."""
        self.fd, path = super().open_temporary()
        self._perhaps_die("open")
        return self.fd, path

    def write_all(self, fd, data):
        """Dies after some bytes."""
        if self.step == "write":
            os.write(fd, data[: self.written_bytes])
        self._perhaps_die("write")
        super().write_all(fd, data)

    def rename(self, temporary, path):
        """Dies before or after the name appears."""
        self._perhaps_die("before rename")
        super().rename(temporary, path)
        self._perhaps_die("after rename")

    def _perhaps_die(self, step):
        if step == self.step:
            if step == "open":
                os.close(self.fd)
            raise Killed


class DiskTierMachine(TierMachine):
    """Disk: sizes differ, files are cut and damaged, writers die, processes restart."""

    def __init__(self):
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvatlas-tier-"))

    def teardown(self):
        """Leave nothing in /tmp."""
        shutil.rmtree(self.directory)

    @initialize(bound=st.integers(200, 1200), shared=st.booleans())
    def make(self, bound, shared):
        """A small tier; the smallest bounds hold one block, or not even every one."""
        self.shared = shared
        self.space = namespace_digest("")
        self.model = NaiveTier(bound, lambda key: len(encode_block(key, payload_of(key), self.space)))
        self.open()

    def open(self):
        """Start anew on the directory."""
        self.files = MortalFiles(self.directory)
        self.tier = DiskTier(
            self.files, self.model.bound, clock=ManualClock(), shared=self.shared, announce_existing=True
        )
        self.model.pins.clear()
        self.told.clear()

    @rule()
    def restart(self):
        """The process ends in peace, and another takes over."""
        self.open()

    @precondition(lambda self: self.model.order)
    @rule(data=st.data(), cut=st.integers(1, 200))
    def tear(self, data, cut):
        """A file loses its end; whoever reads it next gets nothing, and the file goes."""
        key = data.draw(st.sampled_from(self.model.order))
        path = self.files.path_of(key)
        os.truncate(path, max(0, path.stat().st_size - cut))
        if data.draw(st.booleans(), label="restart"):
            self.open()
        else:
            assert self.tier.read(key) is None
        assert not path.exists()
        self.model.order.remove(key)

    @precondition(lambda self: self.model.order)
    @rule(data=st.data(), bit=st.integers(0, 7))
    def damage(self, data, bit):
        """A bit flips anywhere in a file: it is never served."""
        key = data.draw(st.sampled_from(self.model.order))
        path = self.files.path_of(key)
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << bit
        path.write_bytes(content)
        assert self.tier.read(key) is None
        assert not path.exists()
        self.model.order.remove(key)

    @rule(key=keys, step=st.sampled_from(["open", "write", "before rename", "after rename"]), data=st.data())
    def die_while_writing(self, key, step, data):
        """The process dies between or within the steps of a write; the next one finds all or nothing of the block."""
        self.files.step = step
        self.files.written_bytes = data.draw(st.integers(0, self.model.size_of(key)))
        try:
            died = False
            kept = self.tier.write(key, payload_of(key))
        except Killed:
            died = True
        self.files.step = None
        if not died:
            assert kept == self.model.write(key)
            return
        assert self.model.make_room(key)
        if step == "after rename":
            self.model.order.append(key)
        self.open()

    @invariant()
    def the_directory_is_the_index(self):
        """No file is unknown, none left over, and their sizes are within the bound."""
        paths = [path for path in self.directory.rglob("*") if path.is_file()]
        assert sorted(path.name for path in paths) == sorted(f"{key.hex()}.kv" for key in self.model.order)
        assert sum(path.stat().st_size for path in paths) == self.tier.total_bytes <= self.model.bound


class ConnectorMachine(RuleBasedStateMachine):
    """Promises of the connector: hits are what is stored, and every end that is owed is told once."""

    def __init__(self):
        super().__init__()
        self.live = {}
        self.loading = {}
        self.owed = set()
        self.next_id = 0
        self.next_block = 1
        self.cancelled = set()

    @initialize(
        capacity=st.integers(1, 12), is_async=st.booleans(), when=st.sampled_from(StoreWhen), slow=st.booleans()
    )
    def make(self, capacity, is_async, when, slow):
        """A small store with instant or slow links."""
        speed = 4.0 if slow else None
        config = OffloadConfig(
            (FullAttentionSpec(BLOCK_SIZE),),
            BLOCK_SIZE,
            store_when=when,
            async_loads=is_async,
            block_bytes=1,
            payload_bytes=16,
            load_bytes_per_s=speed,
            store_bytes_per_s=speed,
        )
        self.clock = ManualClock()
        self.connector = HostMemoryConnector(config, self.clock, capacity_blocks=capacity)
        self.connector.bind(self)

    def block_ids(self, request_id):
        """The block table of a live request."""
        return (self.live[request_id][1] if request_id in self.live else [],)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24), local_blocks=st.integers(0, 3))
    def admit(self, tokens, local_blocks):
        """A request comes; the device has some of its blocks."""
        self.next_id += 1
        request = make_request(f"r{self.next_id}", [token for token in tokens for _ in range(2)])
        limit = request.num_tokens - (0 if self.connector.config.async_loads else 1)
        local = min(local_blocks, (request.num_tokens - 1) // BLOCK_SIZE)
        found = self.connector.get_num_new_matched_tokens(request, local * BLOCK_SIZE)
        if found.tokens is None:
            return
        expected = 0
        for index in range(local, limit // BLOCK_SIZE):
            if not self.connector.host.contains(key_with_group(request.block_hashes[index], 0)):
                break
            expected += BLOCK_SIZE
        assert found.tokens == expected
        assert not found.is_async or found.tokens > 0
        table = list(range(self.next_block, self.next_block + request.num_tokens // BLOCK_SIZE + 1))
        self.next_block += len(table)
        self.live[request.request_id] = (request, table)
        self.connector.update_state_after_alloc(request, (table,), found.tokens)
        assert sum(self.connector.external_hit_sources(request, found.tokens).values()) == found.tokens
        request.num_computed_tokens = local * BLOCK_SIZE + found.tokens
        if found.is_async:
            start = local
            self.loading[request.request_id] = set(table[start : start + found.tokens // BLOCK_SIZE])

    @rule(data=st.data(), advance=st.floats(0, 3))
    def step(self, data, advance):
        """A step computes some more of some requests, time passes, and its results are in."""
        ready = [one for one in self.live.values() if one[0].request_id not in self.loading]
        scheduled = [request for request, _ in ready if data.draw(st.booleans())]
        for request in scheduled:
            request.num_computed_tokens = min(request.num_tokens, request.num_computed_tokens + 7)
        transfers = self.connector.build_step(scheduled)
        self.clock.advance(advance)
        before = set(self.connector.host.keys)
        results = self.connector.run_step(transfers)
        assert self.cancelled.isdisjoint(set(self.connector.host.keys) - before)
        self.cancelled &= self.connector.stores._keys
        assert results.finished_sending <= self.owed
        assert results.finished_receiving <= set(self.loading)
        assert results.invalid_block_ids == frozenset()
        self.owed -= results.finished_sending
        for request_id in results.finished_receiving:
            del self.loading[request_id]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data):
        """A request ends, perhaps in the middle of its load."""
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        request, table = self.live.pop(request_id)
        if self.connector.request_finished(request, (table,)):
            self.owed.add(request_id)

    @rule()
    def reset(self):
        """The store is emptied, unless it is being read."""
        done = self.connector.reset_cache()
        assert done or self.loading or not self.connector.loads.is_idle
        if done:
            assert len(self.connector.host) == 0
            self.cancelled = set(self.connector.stores._keys)

    @invariant()
    def a_block_is_on_its_way_once(self):
        """No two jobs carry the same block, and none carries a block that is there."""
        stores = self.connector.stores
        jobs = [*stores._planned, *(running.job for running in stores._running)]
        assert sorted(key for job in jobs for key in job.keys) == sorted(stores._keys)
        assert stores._keys.isdisjoint(self.connector.host.keys)

    @invariant()
    def nothing_is_forgotten_or_kept(self):
        """The bound holds; pins exist only for loads; ends still owed have a transfer on its way."""
        assert len(self.connector.host) <= self.connector.host.capacity_blocks
        assert all(self.connector.stores.has_jobs(request_id) for request_id in self.owed)
        if self.connector.loads.is_idle:
            assert self.connector.host._recency.num_pinned == 0

    def teardown(self):
        """Given time, everything that was promised is told."""
        for _ in range(3):
            self.clock.advance(1e6)
            results = self.connector.run_step(self.connector.build_step([]))
            self.owed -= results.finished_sending
            for request_id in results.finished_receiving:
                del self.loading[request_id]
        assert (self.owed, self.loading) == (set(), {})
        assert self.connector.next_ready_s() is None


STEPS = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestHostTier = HostTierMachine.TestCase
TestHostTier.settings = STEPS
TestDiskTier = DiskTierMachine.TestCase
TestDiskTier.settings = STEPS
TestConnector = ConnectorMachine.TestCase
TestConnector.settings = STEPS
