"""Block hashes seen at a coarser block size than they were computed at."""

from collections.abc import Sequence
from typing import overload

from kvatlas.errors import PrefixCacheError

__all__ = ["BlockHashView", "hashes_at_block_size"]


class BlockHashView(Sequence[bytes]):
    """Every `factor`-th hash: the last fine hash inside a coarse block names the whole prefix.

    Nothing is hashed again. A live view: hashes appended later are seen. Source: vLLM 0.32.0 (spec/vllm.md 3.3).
    """

    __slots__ = ("_factor", "_hashes")

    def __init__(self, hashes: Sequence[bytes], factor: int) -> None:
        self._hashes = hashes
        self._factor = factor

    def __len__(self) -> int:
        return len(self._hashes) // self._factor

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        return self._hashes[(index + 1) * self._factor - 1]


def hashes_at_block_size(hashes: Sequence[bytes], hash_block_size: int, block_size: int) -> Sequence[bytes]:
    """Return the hashes of blocks of `block_size` tokens, given those of blocks of `hash_block_size`.

    Raises:
        PrefixCacheError: the block size is no multiple of the hash block size.
    """
    if block_size == hash_block_size:
        return hashes
    if block_size % hash_block_size:
        raise PrefixCacheError(f"block size {block_size} must be a multiple of the hash block size {hash_block_size}")
    return BlockHashView(hashes, block_size // hash_block_size)
