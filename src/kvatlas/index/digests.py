"""Engine hashes recognised as vLLM's digests of a prompt, where they are: proof of what an orphan hangs from.

Nothing rests on this: handles are opaque, and an engine that hashes otherwise, or with a random seed, is followed as
well. But after a loss, blocks may hang from a prefix that stays in the engine for ever and that no event will name
again; so nobody would ever know what they are. If the digest of a prompt's prefix is the very number they wait for,
that prefix is their parent: 64 bits do not agree by chance.
"""

from array import array
from collections.abc import Container, Iterator, Sequence

from kvatlas._native import IndexCore
from kvatlas.errors import HashingError
from kvatlas.hashing import VLLM_ALGOS, RequestExtras, VllmHasher, external_hash

__all__ = ["DigestBook"]

_SETTINGS = tuple((algo, seed) for algo in VLLM_ALGOS for seed in ((None, "0") if algo.startswith("sha") else ("0",)))
"""What engines commonly run with; without a seed the other two start at random, so that nobody could recognise them."""
_MOST_TRIES = 16
_MOST_BLOCKS = 2048


class DigestBook:
    """How one worker hashes, once it was recognised.

    Args:
        core: gives handles their numbers.
    """

    __slots__ = ("_core", "_known", "_tries")

    def __init__(self, core: IndexCore) -> None:
        self._core = core
        self._known: tuple[VllmHasher, bool] | None = None
        self._tries = 0

    def reset(self) -> None:
        """Another life may hash otherwise."""
        self._known = None
        self._tries = 0

    def numbers(
        self, token_ids: Sequence[int], block_size: int, extras: RequestExtras, waited_for: Container[int]
    ) -> "array[int]":
        """The handles of a prompt's complete blocks.

        Args:
            waited_for: handles that are known only as parents.

        Returns:
            One number for each block, when at least one of them is waited for; none at all when none is, or the
            worker's way to hash is not recognised. Sixteen prompts are tried at most.

        Cost: hashing the prompt, at most 2,048 blocks of it; twelve times that while the worker is not recognised.
        """
        token_ids = token_ids[: _MOST_BLOCKS * block_size]
        for hasher, as_int in self._candidates():
            try:
                digests = hasher.hash_tokens(token_ids, block_size, extras=extras)
            except HashingError:
                continue
            numbers = self._core.handle_numbers([external_hash(digest, as_int=as_int) for digest in digests])
            if any(number in waited_for for number in numbers):
                self._known = (hasher, as_int)
                return numbers
        return array("Q")

    def _candidates(self) -> Iterator[tuple[VllmHasher, bool]]:
        if self._known is not None:
            yield self._known
            return
        if self._tries >= _MOST_TRIES:
            return
        self._tries += 1
        for algo, seed in _SETTINGS:
            hasher = VllmHasher(algo, seed)
            yield hasher, True
            yield hasher, False
