"""Short ways to build small prefix caches and requests in tests."""

from kvatlas.hashing import NO_EXTRAS, VllmHasher
from kvatlas.prefix_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheManager, Request

HASHER = VllmHasher("sha256_cbor", "0")
BLOCK_SIZE = 4


def make_manager(num_blocks=11, **settings):
    """A manager with one full-attention group of block size 4 and 10 usable blocks."""
    settings = {"hash_block_size": BLOCK_SIZE, "max_model_len": 4096, **settings}
    return KVCacheManager(
        KVCacheConfig(num_blocks=num_blocks, groups=(KVCacheGroup(FullAttentionSpec(BLOCK_SIZE)),), **settings)
    )


def make_request(request_id, token_ids, *, extras=NO_EXTRAS, hasher=HASHER, **settings):
    """A request hashed at block size 4."""
    return Request(request_id, token_ids, hasher, BLOCK_SIZE, extras=extras, **settings)


def admit(manager, request, num_new_tokens=None, **settings):
    """Look up and allocate as a scheduler does; returns (hit tokens, new block ids or None)."""
    found = manager.get_computed_blocks(request)
    if num_new_tokens is None:
        num_new_tokens = request.num_tokens - found.hit_tokens
    new = manager.allocate_slots(
        request, num_new_tokens, new_computed_tokens=found.hit_tokens, computed_blocks=found, **settings
    )
    if new is None:
        return found.hit_tokens, None
    request.num_computed_tokens = found.hit_tokens + num_new_tokens
    return found.hit_tokens, new[0]


def decode(manager, request, token_id):
    """Accept one sampled token and give it a slot; returns the new block ids."""
    request.append_output(token_id)
    new = manager.allocate_slots(request, 1)
    if new is not None:
        request.num_computed_tokens += 1
    return None if new is None else new[0]


def table(manager, request):
    """The request's block ids."""
    return manager.block_ids(request.request_id)[0]
