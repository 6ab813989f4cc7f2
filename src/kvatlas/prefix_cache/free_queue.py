"""The eviction order: a doubly linked list threaded through the free blocks themselves.

The head is handed out (and loses its content) next. A linked list, because a cache hit takes a block out of the middle;
links inside the blocks, because every operation must be O(1) without allocating. Two sentinels spare the special cases
at the ends.
"""

from collections.abc import Iterable, Iterator, Sequence

from kvatlas.errors import PrefixCacheError
from kvatlas.prefix_cache.block import Block

__all__ = ["FreeQueue"]


class FreeQueue:
    """Free blocks, next to be evicted first.

    Source: vLLM 0.32.0 FreeKVCacheBlockQueue.
    """

    __slots__ = ("_head", "_tail", "num_blocks")

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self.num_blocks = 0
        """Length of the queue."""
        self.append_n(list(blocks))

    def popleft_n(self, count: int) -> list[Block]:
        """Take the first `count` blocks, in queue order.

        Raises:
            PrefixCacheError: fewer blocks are free.
        """
        if count > self.num_blocks:
            raise PrefixCacheError(f"{count} free blocks were asked for but only {self.num_blocks} are free")
        taken = []
        block = self._head.next_free
        for _ in range(count):
            assert block is not None  # noqa: S101 - the sentinel ends the list
            following = block.next_free
            block.prev_free = block.next_free = None
            taken.append(block)
            block = following
        assert block is not None  # noqa: S101
        self._head.next_free = block
        block.prev_free = self._head
        self.num_blocks -= count
        return taken

    def remove(self, block: Block) -> None:
        """Take a block out of the middle.

        Raises:
            PrefixCacheError: the block is not in the queue.
        """
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise PrefixCacheError(f"{block} is not in the free queue, so it cannot be removed from it")
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self.num_blocks -= 1

    def append_n(self, blocks: Sequence[Block]) -> None:
        """Add blocks at the end, keeping their order: they are evicted last."""
        last = self._tail.prev_free
        assert last is not None  # noqa: S101
        self._link(last, blocks, self._tail)

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        """Add blocks at the front, keeping their order: `blocks[0]` is handed out next."""
        first = self._head.next_free
        assert first is not None  # noqa: S101
        self._link(self._head, blocks, first)

    def _link(self, before: Block, blocks: Sequence[Block], after: Block) -> None:
        for block in blocks:
            before.next_free = block
            block.prev_free = before
            before = block
        before.next_free = after
        after.prev_free = before
        self.num_blocks += len(blocks)

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free
