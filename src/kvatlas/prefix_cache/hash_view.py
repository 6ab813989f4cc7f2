"""Block hashes seen at a coarser block size than they were computed at."""

from collections.abc import Sequence

from kvatlas.errors import PrefixCacheError

__all__ = ["hashes_at_block_size"]


def hashes_at_block_size(hashes: Sequence[bytes], hash_block_size: int, block_size: int) -> Sequence[bytes]:
    """Return the hashes of blocks of `block_size` tokens, given those of blocks of `hash_block_size`.

    The last fine hash inside a coarse block names the whole prefix up to its end, so nothing is hashed again.

    Raises:
        PrefixCacheError: the block size is no multiple of the hash block size.

    Cost: O(1) when the sizes are equal (the same sequence is returned), else one slice.
    Source: vLLM 0.32.0 kv_cache_utils.BlockHashListWithBlockSize.
    """
    if block_size == hash_block_size:
        return hashes
    if block_size % hash_block_size:
        raise PrefixCacheError(f"block size {block_size} must be a multiple of the hash block size {hash_block_size}")
    factor = block_size // hash_block_size
    return hashes[factor - 1 :: factor]
