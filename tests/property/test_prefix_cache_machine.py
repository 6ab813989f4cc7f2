"""The prefix cache against a naive model that keeps lists of tokens where the real one keeps hashes and links."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvatlas.events import AllBlocksCleared, BlockStored
from kvatlas.hashing import NO_EXTRAS, Lora, RequestExtras, hash64
from support.prefix_cache import BLOCK_SIZE, admit, make_manager, make_request, table

EXTRAS = (NO_EXTRAS, RequestExtras(cache_salt="x"), RequestExtras(lora=Lora("x")), RequestExtras(cache_salt="y"))
# Short equal prompts among others: copies of one content arise only where a lookup may not reach the last block.
TOKENS = st.sampled_from([[0] * 4, [0] * 5, [0] * 9]) | st.lists(st.integers(0, 1), min_size=1, max_size=30)


class NaiveCache:
    """Blocks as list positions, contents as whole prefixes, the queue as a list: slow and plain."""

    def __init__(self, num_blocks):
        self.free = list(range(1, num_blocks))
        self.content = [None] * num_blocks
        self.cached_at = [0] * num_blocks
        self.tables = {}
        self.num_cached = {}
        self.time = 0

    @staticmethod
    def prefix(request, blocks):
        """What a block means: extras and all tokens up to its end."""
        return (request.extras, tuple(request.all_token_ids[: blocks * BLOCK_SIZE]))

    def uses(self, block):
        """How many tables hold a block."""
        return sum(block in blocks for blocks in self.tables.values())

    def hit(self, request):
        """Longest run of blocks whose meaning is a prefix of the request; of equal blocks the one cached first."""
        found = []
        for count in range(1, (request.num_tokens - 1) // BLOCK_SIZE + 1):
            equal = [i for i, content in enumerate(self.content) if content == self.prefix(request, count)]
            if not equal:
                break
            found.append(min(equal, key=self.cached_at.__getitem__))
        return found

    def allocate(self, request, hits, num_slots, num_tokens):
        """New block ids, or None when they do not fit together with the free hit blocks."""
        blocks = self.tables.get(request.request_id, []) + hits
        count = max(0, -(-num_slots // BLOCK_SIZE) - len(blocks))
        if count + sum(block in self.free for block in hits) > len(self.free):
            return None
        self.free = [block for block in self.free if block not in hits]
        new, self.free = self.free[:count], self.free[count:]
        for block in new:
            self.content[block] = None
        self.tables[request.request_id] = blocks = blocks + new
        first = self.num_cached.get(request.request_id, len(hits))
        full = max(first, num_tokens // BLOCK_SIZE)
        for index in range(first, full):
            self.content[blocks[index]] = self.prefix(request, index + 1)
            self.time += 1
            self.cached_at[blocks[index]] = self.time
        self.num_cached[request.request_id] = full
        return new

    def release(self, request_id):
        """Free a request's blocks: blank ones to the front, named ones to the end, tail first."""
        self.num_cached.pop(request_id)
        gone = [block for block in reversed(self.tables.pop(request_id)) if self.uses(block) == 0]
        blank = [block for block in gone if self.content[block] is None]
        self.free = blank + self.free + [block for block in gone if block not in blank]


class PrefixCacheMachine(RuleBasedStateMachine):
    """Random requests come, decode, are preempted and end; blocks are evicted; the cache is reset."""

    requests = Bundle("requests")

    @initialize(num_blocks=st.integers(2, 14))
    def build(self, num_blocks):
        """A pool of any small size."""
        self.manager = make_manager(num_blocks)
        self.naive = NaiveCache(num_blocks)
        self.live = {}
        self.count = 0
        self.published = Counter()

    @rule(
        target=requests,
        token_ids=TOKENS,
        extras=st.just(NO_EXTRAS) | st.sampled_from(EXTRAS),
        chunk=st.none() | st.integers(1, 12),
    )
    def arrive(self, token_ids, extras, chunk):
        """A new request, whole or its first chunk; dropped when it does not fit."""
        self.count += 1
        request = make_request(f"r{self.count}", token_ids, extras=extras)
        return request if self.enter(request, chunk) else multiple()

    def enter(self, request, chunk):
        """Look up and admit in both; True when it fitted."""
        hits = self.naive.hit(request)
        hit_tokens = len(hits) * BLOCK_SIZE
        chunk = min(chunk or request.num_tokens, request.num_tokens - hit_tokens)
        found = self.manager.get_computed_blocks(request)
        assert [block.block_id for block in found.blocks[0]] == hits
        expected = self.naive.allocate(request, hits, hit_tokens + chunk, hit_tokens + chunk)
        assert admit(self.manager, request, chunk) == (hit_tokens, expected)
        if expected is not None:
            self.live[request.request_id] = request
        return expected is not None

    @rule(request=requests, token_id=st.integers(0, 1), drafts=st.integers(0, 3))
    def advance(self, request, token_id, drafts):
        """Compute the rest of the prompt, or one sampled token, with slots for drafts; an ended request stays ended."""
        if request.request_id not in self.live:
            return
        if request.num_computed_tokens < request.num_tokens:
            count = request.num_tokens - request.num_computed_tokens
            expected = self.naive.allocate(request, [], request.num_tokens + drafts, request.num_tokens)
            new = self.manager.allocate_slots(request, count, lookahead_tokens=drafts)
            assert new == (None if expected is None else (expected,))
            if new is not None:
                request.num_computed_tokens += count
            return
        request.append_output(token_id)
        expected = self.naive.allocate(request, [], request.num_tokens, request.num_tokens)
        new = self.manager.allocate_slots(request, 1)
        assert new == (None if expected is None else (expected,))
        if new is not None:
            request.num_computed_tokens += 1

    @rule(request=consumes(requests))
    def end(self, request):
        """A request ends; its blocks stay cached."""
        if self.live.pop(request.request_id, None) is not None:
            self.naive.release(request.request_id)
        self.manager.free(request)

    @rule(request=requests)
    def preempt_and_resume(self, request):
        """Preempted requests lose their blocks, not what the blocks hold."""
        if self.live.pop(request.request_id, None) is None:
            return
        self.naive.release(request.request_id)
        self.manager.free(request)
        request.num_computed_tokens = 0
        self.enter(request, None)

    @rule(block=st.integers(0, 13))
    def evict(self, block):
        """A block's content is forgotten, used or not."""
        if block < len(self.naive.content):
            self.manager.evict_blocks([block])
            self.naive.content[block] = None

    @rule()
    def reset(self):
        """All content is forgotten, when nobody uses any."""
        done = self.manager.reset_prefix_cache()
        assert done == (not self.naive.tables)
        if done:
            self.naive.content = [None] * len(self.naive.content)

    @invariant()
    def same_tables_and_queue(self):
        """Same block tables, same eviction order, nothing lost or used twice."""
        assert self.manager.free_block_ids() == self.naive.free
        for request_id, request in self.live.items():
            assert table(self.manager, request) == self.naive.tables[request_id]

    @invariant()
    def reference_counts_are_uses(self):
        """ref_cnt counts tables, and is 0 exactly in the free queue."""
        free = set(self.manager.free_block_ids())
        for block in self.manager._pool.blocks[1:]:
            assert block.ref_cnt == self.naive.uses(block.block_id)
            assert (block.ref_cnt == 0) == (block.block_id in free)

    @invariant()
    def only_full_blocks_are_named(self):
        """A block has a digest exactly when the model knows its content; the map has one key for each content."""
        for block, content in zip(self.manager._pool.blocks, self.naive.content, strict=True):
            assert (block.digest is None) == (content is None)
        assert self.manager.num_cached_keys == len({content for content in self.naive.content if content})

    @invariant()
    def events_mirror_the_map(self):
        """Stores minus removals, counted by copy, are the blocks that can be hit."""
        for event in self.manager.take_events():
            if isinstance(event, AllBlocksCleared):
                self.published.clear()
            elif isinstance(event, BlockStored):
                self.published.update(event.block_hashes)
                assert len(event.token_ids) == len(event.block_hashes) * BLOCK_SIZE
            else:
                self.published.subtract(event.block_hashes)
                assert min(self.published.values()) >= 0
        named = [hash64(block.digest) for block in self.manager._pool.blocks if block.digest is not None]
        assert +self.published == Counter(named)


TestPrefixCacheMachine = PrefixCacheMachine.TestCase
TestPrefixCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
