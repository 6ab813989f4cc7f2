"""The joint hit rule against the engine-side cache: its events alone must tell what its next lookup finds.

A cache of several kinds of layers runs requests in a small pool. A reader keeps books from its events only: kinds,
windows, block sizes, and copies of each hash in each group. For random prompts the rule's answer from these books is
held against the cache's own lookup: equal where the join is known, never more where it is not.
"""

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.events import AllBlocksCleared, BlockStored
from kvatlas.hashing import hash64
from kvatlas.index.match import GroupProfile, has_known_join, joint_hit_blocks, max_hit_blocks
from kvatlas.prefix_cache import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from support.prefix_cache_groups import Cache

FULL, FULL8, WINDOW, MAMBA = FullAttentionSpec(4), FullAttentionSpec(8), SlidingWindowSpec(4, 8), MambaSpec(8)
CHUNKED = ChunkedLocalAttentionSpec(4, 8)
EXPORTING = MambaSpec(8, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=4)
KNOWN = (
    {"specs": (FULL,)},
    {"specs": (WINDOW,)},
    {"specs": (MAMBA,)},
    {"specs": (FULL, WINDOW)},
    {"specs": (FULL, SlidingWindowSpec(4, 1))},
    {"specs": (FULL, WINDOW, SlidingWindowSpec(4, 20))},
    {"specs": (SlidingWindowSpec(4, 13), FULL, MLAAttentionSpec(4))},
    {"specs": (FULL8, WINDOW, WINDOW)},
    {"specs": (FULL, SlidingWindowSpec(8, 12))},
    {"specs": (RSWASpec(4, rswa_window=8), SlidingWindowMLASpec(12, 20))},
    {"specs": (WINDOW, SlidingWindowSpec(8, 17))},
    {"specs": (FULL8, MAMBA)},
    {"specs": (FULL8, MAMBA), "hash_block_size": 4},
    {"specs": (FULL8, EXPORTING), "hash_block_size": 4},
    {"specs": (FULL, MAMBA)},
    {"specs": (FULL8, MambaSpec(16), MambaSpec(8))},
    {"specs": (FULL, FullAttentionSpec(4, layout="x"), MAMBA)},
    {"specs": (FULL8, MAMBA, SlidingWindowSpec(8, 16))},
    {"specs": (MAMBA, SlidingWindowSpec(8, 16))},
    {"specs": (FULL8, MAMBA, SlidingWindowSpec(8, 16)), "hash_block_size": 4},
    {"specs": (FULL, CHUNKED), "chunk_tokens": 8},
    {"specs": (CHUNKED,), "chunk_tokens": 8},
    {"specs": (FULL, WINDOW, CHUNKED), "chunk_tokens": 8},
    {"specs": (FULL, MAMBA), "dcp_world_size": 2},
    {"specs": (FULL8, MambaSpec(16), SlidingWindowSpec(8, 16)), "hash_block_size": 4},
    {"specs": (FullAttentionSpec(16), MAMBA), "hash_block_size": 4},
)
"""Configurations whose every lookup follows from the events, the last two once something has ended inside a block."""
OPEN = (
    {"specs": (FULL, CHUNKED)},
    {"specs": (CHUNKED,)},
    {"specs": (FULL, WINDOW, CHUNKED)},
    {"specs": (FULL, MAMBA, WINDOW)},
    {"specs": (FullAttentionSpec(16), MAMBA)},
    {"specs": (FULL, MambaSpec(4)), "dcp_world_size": 2},
    {"specs": (FULL8, FULL, MAMBA)},
    {"specs": (FULL8, FullAttentionSpec(8, layout="x"), MAMBA), "hash_block_size": 2},
    {"specs": (FULL8, FullAttentionSpec(16), FULL8, MambaSpec(16))},
    {"specs": (FULL8, FullAttentionSpec(16), MambaSpec(16)), "hash_block_size": 4},
    {"specs": (CircularBufferSpec(3), FULL, WINDOW)},
    {"specs": (FULL, SlidingWindowMLASpec(8, 8, bounded_replay=True), WINDOW)},
)
"""Configurations where events leave more than one answer: chunks, ends inside blocks, groups that announce nothing."""


class Reader:
    """What a reader of one worker's stream knows, by the plainest means: no keys, no index."""

    def __init__(self, chunk_tokens):
        self.chunk_tokens = chunk_tokens
        self.kinds = {}
        self.sizes = {}
        self.span_tokens = 0
        self.copies = {}
        self.content = {}

    def read(self, event):
        """Apply one event."""
        if isinstance(event, AllBlocksCleared):
            self.copies = {group: Counter() for group in self.copies}
            return
        copies = self.copies.setdefault(event.group_idx, Counter())
        if not isinstance(event, BlockStored):
            copies.subtract(event.block_hashes)
            return
        self.kinds[event.group_idx] = (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
        self.sizes.setdefault(event.group_idx, set()).add(event.block_size)
        self.span_tokens = math.gcd(self.span_tokens, len(event.token_ids))
        copies.update(event.block_hashes)
        self.learn_content(event)

    def learn_content(self, event):
        """What a hash stands for is known once some group gives the tokens of it and of all before it."""
        parent = () if event.parent_block_hash is None else self.content.get(event.parent_block_hash)
        if parent is None or len(event.token_ids) != len(event.block_hashes) * event.block_size:
            return
        for index, handle in enumerate(event.block_hashes):
            self.content[handle] = (*parent, *event.token_ids[: (index + 1) * event.block_size])

    @property
    def unit(self):
        """The size in which blocks of all groups can be counted."""
        return math.gcd(*[size for sizes in self.sizes.values() for size in sizes])

    @property
    def profiles(self):
        """The groups that have announced themselves."""
        return tuple(
            GroupProfile(
                group,
                kind,
                window,
                block_size=max(self.sizes[group]),
                chunk_tokens=self.chunk_tokens if kind == "chunked_local_attention" else None,
            )
            for group, (kind, window) in sorted(self.kinds.items())
        )

    @property
    def has_gap(self):
        """Some group number below the highest announces nothing."""
        return len(self.kinds) <= max(self.kinds, default=-1)

    def hit_tokens(self, request, hash_block_size, *, only_proven):
        """The rule's answer for a prompt; its hashes stand for the tokens, if the books say they do."""
        unit = self.unit
        names = [hash64(digest) for digest in request.block_hashes]
        tokens = tuple(request.all_token_ids)

        def resident(group, block):
            end = (block + 1) * unit
            handle = names[end // hash_block_size - 1]
            proven = not only_proven or self.content.get(handle) == tokens[:end]
            return proven and self.copies[group][handle] > 0

        full = max_hit_blocks(len(tokens), unit)
        for profile in self.profiles:
            if profile.is_full and profile.block_size == unit:
                full = next((block for block in range(full) if not resident(profile.group_id, block)), full)
        alignment = self.span_tokens if self.has_gap else 1
        return unit * joint_hit_blocks(self.profiles, full, resident, unit, alignment_tokens=alignment)


class Engine:
    """A cache under random requests: they come, are computed in chunks, decode, are preempted, end; blocks are lost."""

    def __init__(self, rng, configuration):
        settings_of_cache = dict(configuration)
        specs, chunk_tokens = settings_of_cache.pop("specs"), settings_of_cache.pop("chunk_tokens", None)
        retention = rng.choice([None, 0, 0, 1, 2])
        if retention:
            has_use = any(isinstance(spec, SlidingWindowSpec | MambaSpec) for spec in specs)
            retention *= Cache(*specs, **settings_of_cache).config.scheduler_block_size if has_use else 0
        self.rng = rng
        self.cache = Cache(*specs, num_blocks=rng.randint(12, 90), retention_interval=retention, **settings_of_cache)
        self.manager, self.config = self.cache.manager, self.cache.config
        self.mamba_sizes = [spec.block_size for spec in specs if isinstance(spec, MambaSpec)]
        self.reader = Reader(chunk_tokens)
        self.texts = [[rng.randint(0, 1) for _ in range(80)] for _ in range(2)]
        self.live = []
        self.count = 0

    def prompt(self):
        """Part of a known text, at times going on otherwise; or what a running request has by now."""
        if self.live and self.rng.random() < 0.2:
            return list(self.rng.choice(self.live).all_token_ids)
        start = self.rng.choice(self.texts)[: self.rng.randint(1, 60)]
        return start + [self.rng.randint(0, 1) for _ in range(self.rng.choice([0, 0, 1, 3, 12]))]

    def operate(self):
        """One random operation; the reader then reads what was published."""
        operations = [self.arrive, self.go_on, self.end, self.evict, self.reset]
        self.rng.choices(operations, [6, 6, 2, 1, 0.2])[0]()
        self.manager.release_block_copies(self.manager.take_block_copies())
        for event in self.manager.take_events():
            self.reader.read(event)

    def arrive(self):
        """A new request; dropped when it does not fit."""
        self.count += 1
        request = self.cache.request(f"r{self.count}", self.prompt())
        self.manager.new_step_starts()
        found = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = found.shared_prefix_boundary
        end = self.chunk_end(request, found.hit_tokens)
        new = self.manager.allocate_slots(
            request, end - found.hit_tokens, new_computed_tokens=found.hit_tokens, computed_blocks=found
        )
        if new is None:
            self.manager.free(request)
        else:
            request.num_computed_tokens = end
            self.live.append(request)

    def chunk_end(self, request, start):
        """Where a chunk may end: with Mamba on a block's end, at the last position a resend can use, or at the end."""
        end = min(start + self.rng.choice([1, 8, 24, 90]), request.num_tokens)
        if not self.mamba_sizes:
            return end
        block, unit = max(self.mamba_sizes), self.config.hash_block_size
        tail = (request.num_prompt_tokens - 1) // unit * unit if self.config.partial_hits else 0
        after = max(start + block, end) // block * block
        return min(stop for stop in (after, tail, request.num_tokens) if stop > start)

    def go_on(self):
        """The next chunk of a prompt, or one decoded token; freed when its blocks cannot be had."""
        if not self.live:
            return
        request = self.rng.choice(self.live)
        if request.num_computed_tokens == request.num_tokens:
            request.append_output(self.rng.randint(0, 1))
        end = self.chunk_end(request, request.num_computed_tokens)
        self.manager.new_step_starts()
        if self.manager.allocate_slots(request, end - request.num_computed_tokens) is None:
            self.live.remove(request)
            self.manager.free(request)
        else:
            request.num_computed_tokens = end

    def end(self):
        """A request ends; its blocks stay cached."""
        if self.live:
            self.manager.free(self.live.pop(self.rng.randrange(len(self.live))))

    def evict(self):
        """The content of some blocks is forgotten, used or not: no longer the tail before its parents."""
        self.manager.evict_blocks(self.rng.sample(range(1, self.config.num_blocks), 3))

    def reset(self):
        """All content is forgotten."""
        while self.live:
            self.end()
        self.manager.reset_prefix_cache()

    def check(self, *, is_known):
        """The answer is the lookup's, or less where events leave it open; never more where content is not proven."""
        reader, config = self.reader, self.config
        if len(reader.kinds) < sum(group.spec.prefix_cacheable for group in config.groups):
            return  # a group is not known before its first store
        known = has_known_join(reader.profiles, reader.unit)
        if any(max(sizes) < config.block_sizes[group] for group, sizes in reader.sizes.items()):
            known = False  # nor its block size while its stores end inside blocks
        elif reader.unit == config.hash_block_size:  # else nothing has ended inside a block yet
            assert known == is_known
        for _ in range(4):
            request = self.cache.request("probe", self.prompt())
            reported = self.manager.get_computed_blocks(request).hit_tokens
            predicted = reader.hit_tokens(request, config.hash_block_size, only_proven=False)
            assert predicted == reported if known else predicted <= reported
            assert reader.hit_tokens(request, config.hash_block_size, only_proven=True) <= predicted


def name_of(configuration):
    """Kinds and block sizes, as a test's id."""
    specs = "-".join(f"{spec.kind.split('_')[0]}{spec.block_size}" for spec in configuration["specs"])
    return "-".join([specs, *[f"{key}{value}" for key, value in configuration.items() if key != "specs"]])


@pytest.mark.parametrize("configuration", KNOWN, ids=name_of)
@settings(max_examples=7)
@given(seed=st.integers(0, 2**32))
def test_known_joins_are_what_the_engine_reports(configuration, seed):
    """From the events alone the rule gives the cache's own lookup, to the token."""
    engine = Engine(random.Random(seed), configuration)
    for _ in range(40):
        engine.operate()
        engine.check(is_known=True)


@pytest.mark.parametrize("configuration", OPEN, ids=name_of)
@settings(max_examples=7)
@given(seed=st.integers(0, 2**32))
def test_open_joins_never_claim_more_than_the_engine_reports(configuration, seed):
    """Where events leave several answers, the rule gives the least and says that it is not exact."""
    engine = Engine(random.Random(seed), configuration)
    for _ in range(40):
        engine.operate()
        engine.check(is_known=False)
