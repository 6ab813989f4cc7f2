"""One physical KV-cache block: who uses it, what content it is known by, and where it stands in the free queue."""

__all__ = ["Block"]


class Block:
    """A block of the pool. Only the pool and the free queue write its fields.

    Attributes:
        block_id: position in the pool, 0..num_blocks-1; 0 is the null block.
        ref_cnt: requests using it. 0 if and only if it is in the free queue (the null block aside).
        digest: hash it is cached under, or None when its content is unknown or incomplete.
        num_hashed_tokens: length in tokens of the prefix that `digest` names.
        group_id: KV cache group the digest belongs to; meaningful while `digest` is set.
        is_null: the placeholder for positions that need no memory; never freed, never cached.
        prev_free, next_free: neighbours in the free queue, None outside it.
    """

    __slots__ = ("block_id", "digest", "group_id", "is_null", "next_free", "num_hashed_tokens", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.digest: bytes | None = None
        self.num_hashed_tokens = 0
        self.group_id = 0
        self.is_null = False
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        name = self.digest.hex()[:8] if self.digest is not None else None
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, digest={name})"
