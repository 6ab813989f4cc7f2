"""Prefix caches of several kinds of layers, driven as a scheduler drives them."""

from kvatlas.hashing import VllmHasher
from kvatlas.prefix_cache import KVCacheConfig, KVCacheGroup, KVCacheManager, Request, resolve_block_sizes

HASHER = VllmHasher("sha256_cbor", "0")


class Cache:
    """A manager for these specs and short ways to run requests through it.

    The hash block size is what an engine would derive, unless it is given.
    """

    def __init__(self, *specs, num_blocks=60, residency=None, **settings):
        groups = tuple(spec if isinstance(spec, KVCacheGroup) else KVCacheGroup(spec) for spec in specs)
        sizes = resolve_block_sizes(
            groups,
            dcp_world_size=settings.get("dcp_world_size", 1),
            hashing=settings.get("enable_caching", True),
        )
        settings = {"hash_block_size": sizes.hash_block_size, "max_model_len": 4096, **settings}
        self.config = KVCacheConfig(num_blocks=num_blocks, groups=groups, **settings)
        self.manager = KVCacheManager(self.config, residency)

    def request(self, request_id, token_ids, **settings):
        """A request hashed as this cache needs it."""
        hasher = HASHER if self.config.enable_caching else None
        return Request(request_id, token_ids, hasher, self.config.hash_block_size, **settings)

    def look_up(self, token_ids, **settings):
        """(hit tokens, hit block ids of each group) of a prompt that is not admitted."""
        found = self.manager.get_computed_blocks(self.request("probe", token_ids, **settings))
        return found.hit_tokens, block_ids(found)

    def admit(self, request, *chunk_ends, **settings):
        """Look up and compute the prompt up to each of the chunk ends (default: all of it); returns the lookup.

        None when the first chunk does not fit.
        """
        self.manager.new_step_starts()
        found = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = found.shared_prefix_boundary
        first, *others = [end for end in chunk_ends if end > found.hit_tokens] or [request.num_tokens]
        new = self.manager.allocate_slots(
            request,
            first - found.hit_tokens,
            new_computed_tokens=found.hit_tokens,
            computed_blocks=found,
            **settings,
        )
        if new is None:
            return None
        request.num_computed_tokens = first
        for end in others:
            self.step(request, end - request.num_computed_tokens)
        return found

    def run(self, request_id, token_ids, *chunk_ends, **settings):
        """Admit a new request; returns it."""
        request = self.request(request_id, token_ids, **settings)
        assert self.admit(request, *chunk_ends) is not None
        return request

    def step(self, request, num_tokens=1, **settings):
        """Compute further tokens of a prompt; returns the new block ids."""
        self.manager.new_step_starts()
        new = self.manager.allocate_slots(request, num_tokens, **settings)
        if new is not None:
            request.num_computed_tokens += num_tokens
        return new

    def decode(self, request, *token_ids):
        """Accept sampled tokens one by one and give each its slot."""
        for token_id in token_ids:
            request.append_output(token_id)
            assert self.step(request) is not None

    def tables(self, request):
        """Block ids of each group."""
        return list(self.manager.block_ids(request.request_id))

    def block(self, block_id):
        """A block of the pool."""
        return self.manager._pool.blocks[block_id]


def block_ids(found):
    """Ids of the hit blocks of each group."""
    return [[block.block_id for block in blocks] for blocks in found.blocks]


def hashed(cache, group_id=0):
    """Ids of the blocks of a group that can be hit."""
    blocks = cache.manager._pool.blocks
    return [block.block_id for block in blocks if block.digest is not None and block.group_id == group_id]
