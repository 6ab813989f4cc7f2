"""What the simulated model says: a reply fixed by the prompt and the seeds.

The same prompt gets the same reply from every engine of a fleet. So a conversation unfolds the same way under every
routing policy, and a client that sends the reply back as part of its next prompt finds it in the cache.
"""

import random
from array import array
from collections.abc import Sequence

import xxhash

from kvatlas.errors import ConfigError
from kvatlas.simulator.sampling import SamplingParams

__all__ = ["Reply", "ReplySampler"]

_CHUNK_TOKENS = 64


class Reply:
    """One request's output tokens, drawn as they are needed.

    Reading an index again gives the same token: a preempted request goes on where it was.
    """

    __slots__ = ("_eos_token_id", "_length", "_random", "_token_ids", "_words")

    def __init__(self, words: Sequence[int], eos_token_id: int | None, length: int | None, seed: int) -> None:
        self._words = words
        self._eos_token_id = eos_token_id
        self._length = length
        self._random = random.Random(seed)
        self._token_ids: list[int] = []

    def token_id(self, index: int) -> int:
        """The output token at `index`, 0 the first; from the reply's own length on, if it has one, the end of text."""
        if self._length is not None and index >= self._length and self._eos_token_id is not None:
            return self._eos_token_id
        token_ids = self._token_ids
        while index >= len(token_ids):
            token_ids.extend(self._random.choices(self._words, k=_CHUNK_TOKENS))
        return token_ids[index]


class ReplySampler:
    """Draws replies from a list of word tokens.

    Args:
        word_token_ids: the tokens replies are made of. They should survive decoding and encoding, or a reply that
            comes back as text is other tokens than those that were cached (`vocabulary.py` finds such tokens).
        eos_token_id: ends a reply; None when the vocabulary has none: then every reply runs to its `max_tokens`.
        mean_tokens: replies end by themselves after mean/2 to mean*3/2 tokens.
        seed: the fleet's.
    """

    __slots__ = ("_eos_token_id", "_mean_tokens", "_seed", "_words")

    def __init__(
        self, word_token_ids: Sequence[int], *, eos_token_id: int | None, mean_tokens: int = 128, seed: int = 0
    ) -> None:
        if not word_token_ids:
            raise ConfigError("replies need at least one token to be made of; the vocabulary has no usable word")
        self._words = tuple(word_token_ids)
        self._eos_token_id = eos_token_id
        self._mean_tokens = mean_tokens
        self._seed = seed

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a reply."""
        return self._eos_token_id

    def reply_to(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Reply:
        """Fix the reply to a prompt. Cost: one pass over the prompt (about 1 us per 100 tokens)."""
        digest = xxhash.xxh3_64(array("q", prompt_token_ids).tobytes(), seed=self._seed & 0xFFFF_FFFF)
        digest.update(f"{params.seed}/{params.choice}".encode())
        seed = digest.intdigest()
        length = None
        if not params.ignore_eos:
            shortest = max(1, self._mean_tokens // 2)
            length = max(params.min_tokens, shortest + seed % (self._mean_tokens + 1))
        return Reply(self._words, self._eos_token_id, length, seed)
