"""Caches of several kinds of layers against a naive model: contents as whole prefixes, reference counts as uses.

The model does not choose blocks. It knows what each block was given to hold, from the tables alone, and holds the cache
to what must be true of every configuration: nothing leaks, nothing is freed twice, a hit names matching content only,
names are of what the block holds, and the events are the map.
"""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvatlas.events import AllBlocksCleared, BlockStored
from kvatlas.hashing import NO_EXTRAS, Lora, RequestExtras, hash64
from kvatlas.prefix_cache import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    MambaSpec,
    SlidingWindowSpec,
)
from support.prefix_cache_groups import Cache

EXTRAS = (NO_EXTRAS, RequestExtras(cache_salt="x"), RequestExtras(lora=Lora("x")))
TOKENS = st.sampled_from([[0] * 4, [0] * 9, [0] * 17, [0, 1] * 12]) | st.lists(
    st.integers(0, 1), min_size=1, max_size=40
)
FULL, WINDOW = FullAttentionSpec(4), SlidingWindowSpec(4, 8)
CONFIGURATIONS = (
    {"specs": (WINDOW,)},
    {"specs": (ChunkedLocalAttentionSpec(4, 8),)},
    {"specs": (FULL, WINDOW)},
    {"specs": (FULL, WINDOW, SlidingWindowSpec(4, 20))},
    {"specs": (FullAttentionSpec(8), WINDOW, WINDOW)},
    {"specs": (FULL, SlidingWindowSpec(8, 12))},
    {"specs": (FULL, KVCacheGroup(WINDOW, is_eagle=True)), "use_eagle": True},
    {"specs": (FULL, WINDOW), "use_eagle": True},
    {"specs": (FullAttentionSpec(8), MambaSpec(8))},
    {"specs": (FullAttentionSpec(8), MambaSpec(8)), "hash_block_size": 4},
    {"specs": (FullAttentionSpec(8), MambaSpec(8)), "hash_block_size": 2, "use_eagle": True},
    {"specs": (FullAttentionSpec(8), MambaSpec(16), WINDOW), "hash_block_size": 4},
    {"specs": (FULL, MambaSpec(8)), "dcp_world_size": 2},
)


class GroupsMachine(RuleBasedStateMachine):
    """Requests of several groups come, are computed in chunks, decode, are preempted and end; blocks are evicted."""

    requests = Bundle("requests")

    @initialize(
        configuration=st.sampled_from(CONFIGURATIONS),
        num_blocks=st.integers(8, 60),
        retention=st.sampled_from([None, 0, 1, 2]),
    )
    def build(self, configuration, num_blocks, retention):
        """A pool of any kind; retention in scheduler blocks, where it means anything."""
        specs, others = configuration["specs"], {k: v for k, v in configuration.items() if k != "specs"}
        plain = Cache(*specs, num_blocks=num_blocks, **others)
        kinds = {type(group.spec) for group in plain.config.groups}
        if retention and kinds & {SlidingWindowSpec, MambaSpec}:
            retention *= plain.config.scheduler_block_size
        elif retention:
            retention = 0
        self.cache = Cache(*specs, num_blocks=num_blocks, retention_interval=retention, **others)
        self.manager = self.cache.manager
        self.config = self.cache.config
        self.pool = self.manager._pool
        self.is_mamba = MambaSpec in kinds
        self.live = {}
        self.copies = []
        self.written = {}  # digest -> (extras, prefix): what each digest must mean
        self.published = [Counter() for _ in specs]
        self.count = 0

    @rule(
        target=requests, token_ids=TOKENS, extras=st.sampled_from(EXTRAS), whole=st.booleans(), size=st.integers(1, 24)
    )
    def arrive(self, token_ids, extras, whole, size):
        """A new request, whole or its first chunk; dropped when it does not fit."""
        self.count += 1
        request = self.cache.request(f"r{self.count}", token_ids, extras=extras)
        return request if self.enter(request, whole, size) else multiple()

    def enter(self, request, whole, size):
        """Look up and allocate; the hit must be of this request's own tokens."""
        self.manager.new_step_starts()
        found = self.manager.get_computed_blocks(request)
        assert found.hit_tokens < request.num_tokens
        assert found.hit_tokens % self.config.hit_alignment_tokens == 0
        self.know(request)
        self.check_hit(request, found)
        request.shared_prefix_boundary = found.shared_prefix_boundary
        end = self.chunk_end(request, found.hit_tokens, request.num_tokens if whole else found.hit_tokens + size)
        new = self.manager.allocate_slots(
            request, end - found.hit_tokens, new_computed_tokens=found.hit_tokens, computed_blocks=found
        )
        if new is None:
            self.manager.free(request)
            return False
        request.num_computed_tokens = end
        self.live[request.request_id] = request
        return True

    def check_hit(self, request, found):
        """Blocks of a hit are cached under digests of this request, at their own places; none that is needed is missing."""
        for group_id, blocks in enumerate(found.blocks):
            size = self.config.block_sizes[group_id]
            for index, block in enumerate(blocks):
                ends = range(
                    index * size + self.config.hash_block_size, (index + 1) * size + 1, self.config.hash_block_size
                )
                own = {
                    request.block_hashes[end // self.config.hash_block_size - 1]
                    for end in ends
                    if end <= request.num_tokens
                }
                assert block.is_null or (block.group_id == group_id and own & set(self.pool.digests(block)))
            needed = range(
                self.manager._coordinator.managers[group_id].num_skipped_tokens(found.hit_tokens) // size,
                -(-found.hit_tokens // size),
            )
            assert not any(blocks[index].is_null for index in needed)

    def know(self, request):
        """A digest means one prefix with its extras, whoever computed it."""
        size = self.config.hash_block_size
        for index, digest in enumerate(request.block_hashes):
            meaning = (request.extras, tuple(request.all_token_ids[: (index + 1) * size]))
            assert self.written.setdefault(digest, meaning) == meaning

    def chunk_end(self, request, start, end):
        """Where a chunk may end: for Mamba on a block's end, at the prompt's last reusable position, or at the end."""
        end = min(max(end, start + 1), request.num_tokens)
        if not self.is_mamba:
            return end
        block = max(
            size
            for size, group in zip(self.config.block_sizes, self.config.groups, strict=True)
            if isinstance(group.spec, MambaSpec)
        )
        unit = self.config.hash_block_size
        limit = request.num_prompt_tokens if self.config.use_eagle else request.num_prompt_tokens - 1
        tail = limit // unit * unit - (unit if self.config.use_eagle else 0)
        stops = [(start // block + 1) * block, tail if self.config.partial_hits else 0, request.num_tokens]
        return min(stop for stop in stops if stop > start)

    @rule(request=requests, size=st.integers(1, 24), token_id=st.integers(0, 1))
    def go_on(self, request, size, token_id):
        """The next chunk of a prompt, or one decoded token; freed when its blocks cannot be had."""
        if request.request_id not in self.live:
            return
        if request.num_computed_tokens == request.num_tokens:
            request.append_output(token_id)
            self.know(request)
        start = request.num_computed_tokens
        end = self.chunk_end(request, start, start + size)
        self.manager.new_step_starts()
        if self.manager.allocate_slots(request, end - start) is None:
            self.manager.free(self.live.pop(request.request_id))
        else:
            request.num_computed_tokens = end

    @rule(request=consumes(requests))
    def end(self, request):
        """A request ends; its blocks stay cached."""
        self.live.pop(request.request_id, None)
        self.manager.free(request)

    @rule(request=requests, whole=st.booleans(), size=st.integers(1, 24))
    def preempt_and_resume(self, request, whole, size):
        """Preempted requests lose their blocks, not what the blocks hold."""
        if self.live.pop(request.request_id, None) is not None:
            self.manager.free(request)
            request.num_computed_tokens = 0
            self.enter(request, whole, size)

    @rule(release=st.booleans())
    def copies_run(self, release):
        """Copies are taken for a step, and let go of after it."""
        self.copies += self.manager.take_block_copies()
        if release:
            self.manager.release_block_copies(self.copies)
            self.copies = []

    @rule(block_id=st.integers(0, 59))
    def evict(self, block_id):
        """A block's content is forgotten, used or not."""
        if block_id < self.config.num_blocks:
            self.manager.evict_blocks([block_id])

    @rule()
    def reset(self):
        """All content is forgotten, when nobody uses any."""
        in_use = any(any(table) for request in self.live for table in self.manager.block_ids(request))
        assert self.manager.reset_prefix_cache() == (not in_use and not self.held_for_copies())

    def held_for_copies(self):
        """Blocks held until their copy has run, taken or not."""
        pending = [pair for manager in self.manager._coordinator.managers for pair in manager.block_copies]
        pending += [(copy.source, copy.destination) for copy in self.copies]
        return Counter(block.block_id for pair in pending for block in pair)

    @invariant()
    def reference_counts_are_uses(self):
        """ref_cnt counts tables and copies under way, and is 0 exactly in the free queue, where a block is once."""
        uses = self.held_for_copies()
        for request_id in self.live:
            for table in self.manager.block_ids(request_id):
                uses.update(block_id for block_id in table if block_id)
        free = self.manager.free_block_ids()
        assert len(free) == len(set(free)) == self.manager.num_free_blocks
        for block in self.pool.blocks[1:]:
            assert block.ref_cnt == uses[block.block_id]
            assert (block.ref_cnt == 0) == (block.block_id in set(free))

    @invariant()
    def names_are_of_what_was_computed(self):
        """A digest is a known prefix of the length the block claims; a part of a block is named only where hits may end there."""
        for block in self.pool.blocks:
            digests = self.pool.digests(block)
            if not digests:
                continue
            assert len(self.written[digests[0]][1]) == block.num_hashed_tokens
            size = self.config.block_sizes[block.group_id]
            for digest in digests:
                partial = len(self.written[digest][1]) % size > 0
                assert not partial or size > self.config.hash_block_size
                assert block in self.in_map(digest, block.group_id)

    def in_map(self, digest, group_id):
        """All blocks of a group under a digest."""
        hash_map = self.pool.hash_maps[group_id]
        first = hash_map.lookup(digest)
        return [first, *hash_map._copies.get(digest, {}).values()]

    @invariant()
    def tables_hold_their_own_content(self):
        """A named block in a table is named by a prefix of that request, at that place."""
        for request_id, request in self.live.items():
            for group_id, table in enumerate(self.manager.block_ids(request_id)):
                size = self.config.block_sizes[group_id]
                for index, block_id in enumerate(table):
                    block = self.pool.blocks[block_id]
                    for digest in self.pool.digests(block):
                        extras, prefix = self.written[digest]
                        assert extras == request.extras
                        assert list(prefix) == request.all_token_ids[: len(prefix)]
                        assert index * size < len(prefix) <= (index + 1) * size

    @invariant()
    def events_mirror_the_map(self):
        """Stores minus removals, counted by copy and group, are what can be hit."""
        for event in self.manager.take_events():
            if isinstance(event, AllBlocksCleared):
                for counter in self.published:
                    counter.clear()
                continue
            counter = self.published[event.group_idx]
            if isinstance(event, BlockStored):
                counter.update(event.block_hashes)
            else:
                counter.subtract(event.block_hashes)
                assert min(counter.values()) >= 0
        for group_id, counter in enumerate(self.published):
            named = [
                hash64(digest)
                for block in self.pool.blocks
                if block.digest is not None and block.group_id == group_id
                for digest in self.pool.digests(block)
            ]
            assert +counter == Counter(named)
        assert self.manager.num_cached_keys == sum(len(+counter) for counter in self.published)

    def teardown(self):
        """When everybody has left, everything is free."""
        if not hasattr(self, "live"):
            return
        for request in self.live.values():
            self.manager.free(request)
        self.manager.release_block_copies(self.copies + self.manager.take_block_copies())
        assert self.manager.usage == 0
        assert self.manager.reset_prefix_cache()


TestGroupsMachine = GroupsMachine.TestCase
TestGroupsMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
