"""One call for every engine's block hashes: `hash_blocks(dialect, token_ids, block_size, **options)`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvatlas.errors import HashingError
from kvatlas.hashing.dynamo import dynamo_local_hashes, dynamo_padded_tokens, dynamo_seed, dynamo_sequence_hashes
from kvatlas.hashing.extra_keys import Lora, MultimodalItem, PromptEmbeds, RequestExtras
from kvatlas.hashing.llmd import LlmdHasher
from kvatlas.hashing.sglang import SglangNamespace, sglang_chain, sglang_event_hash
from kvatlas.hashing.vllm import VllmHasher, hash64

__all__ = ["DIALECTS", "DIALECT_OPTIONS", "SGLANG_CHAINS", "BlockHash", "HashedBlocks", "hash_blocks"]

SGLANG_CHAINS = ("event", "storage")
"""SGLang's two chains: what its events name, and what HiCache calls a page in storage."""


@dataclass(frozen=True, slots=True)
class BlockHash:
    """One block's names.

    Attributes:
        block: its place in the prompt, from 0.
        first_token: position of its first token.
        hash64: the 64-bit form as the engine writes it: unsigned, but signed in SGLang's dialect.
        digest: what `hash64` is cut from; None in dialects of 64 bits.
        local_hash: Dynamo's hash of the block alone (`hash64` is the chained one); None elsewhere.
    """

    block: int
    first_token: int
    hash64: int
    digest: bytes | None = None
    local_hash: int | None = None


@dataclass(frozen=True, slots=True)
class HashedBlocks:
    """A prompt's complete blocks in one dialect.

    Attributes:
        dialect, algo, block_size: as asked, defaults filled in.
        seed: the seed text as given (vLLM, llm-d), the number local hashes are seeded with (Dynamo), or None.
        root: what stands before the first block: a digest, a 64-bit key as 8 bytes big-endian, or nothing.
        blocks: in the order of the prompt.
        tail_tokens: tokens at the end that no block covers.
    """

    dialect: str
    algo: str
    seed: str | None
    block_size: int
    root: bytes
    blocks: tuple[BlockHash, ...]
    tail_tokens: int


def hash_blocks(dialect: str, token_ids: Sequence[int], block_size: int, **options: object) -> HashedBlocks:
    """Hash the complete blocks of a prompt as an engine (or a router) of this dialect does.

    Args:
        dialect: one of `DIALECTS`.
        token_ids: int[num_tokens]: list, tuple, array.array, or a one-dimensional buffer of 32- or 64-bit integers
            such as a numpy array; int32 and uint32 buffers are hashed in place where the dialect hashes such words.
        block_size: tokens in a block, >= 1. SGLang calls it the page size.
        options: `DIALECT_OPTIONS[dialect]` lists them; docs/hashing.md says what each means.

    Raises:
        HashingError: unknown dialect or option, or a value that cannot be hashed.

    Cost: O(n).
    """
    hash_one = _HASHERS.get(dialect)
    if hash_one is None:
        raise HashingError(f"unknown dialect {dialect!r}: choose one of {', '.join(DIALECTS)}")
    unknown = [name for name in options if name not in DIALECT_OPTIONS[dialect]]
    if unknown:
        raise HashingError(
            f"the {dialect} dialect has no option {', '.join(map(repr, unknown))}; "
            f"it has {', '.join(DIALECT_OPTIONS[dialect])}"
        )
    if block_size < 1:
        raise HashingError(f"block size must be at least 1 token, got {block_size}")
    if not hasattr(token_ids, "__len__"):
        raise HashingError(f"token ids must be a sequence of integers, got {type(token_ids).__name__}")
    return hash_one(token_ids, block_size, **options)


def _hash_vllm(
    token_ids: Sequence[int],
    block_size: int,
    *,
    algo: str = "sha256",
    seed: str | None = None,
    lora: Lora | str | None = None,
    multimodal: Sequence[MultimodalItem] = (),
    cache_salt: str | None = None,
    prompt_embeds: PromptEmbeds | None = None,
) -> HashedBlocks:
    hasher = VllmHasher(algo, seed)
    extras = RequestExtras(_as_lora(lora), tuple(multimodal), cache_salt, prompt_embeds)
    digests = hasher.hash_tokens(token_ids, block_size, extras=extras)
    blocks = tuple(BlockHash(i, i * block_size, hash64(digest), digest) for i, digest in enumerate(digests))
    tail = len(token_ids) - len(blocks) * block_size
    return HashedBlocks("vllm", algo, seed, block_size, hasher.none_hash, blocks, tail)


def _hash_sglang(
    token_ids: Sequence[int],
    block_size: int,
    *,
    extra_key: str | None = None,
    lora_id: str | None = None,
    cache_salt: str | None = None,
    event_format: str = "default",
    chain: str = "event",
    bigram: bool = False,
) -> HashedBlocks:
    if chain not in SGLANG_CHAINS:
        raise HashingError(f"unknown chain {chain!r}: choose one of {', '.join(SGLANG_CHAINS)}")
    namespace = SglangNamespace(extra_key, lora_id, cache_salt)
    in_events = chain == "event"
    root = namespace.event_chain_seed(event_format) if in_events else namespace.storage_seed()
    digests = sglang_chain(token_ids, block_size, previous=root, bigram=bigram)
    blocks = []
    for i, digest in enumerate(digests):
        short = namespace.event_hash(digest, event_format) if in_events else sglang_event_hash(digest)
        blocks.append(BlockHash(i, i * block_size, short, digest))
    tail = _tail_tokens(len(token_ids), len(blocks), block_size, overlap=bigram)
    return HashedBlocks("sglang", "sha256", None, block_size, root or b"", tuple(blocks), tail)


def _hash_llmd(
    token_ids: Sequence[int],
    block_size: int,
    *,
    model: str = "",
    algo: str = "cbor-fnv",
    seed: str = "",
    lora: Lora | str | None = None,
    multimodal: Sequence[MultimodalItem] = (),
    cache_salt: str | None = None,
) -> HashedBlocks:
    hasher = LlmdHasher(algo, seed)
    extras = RequestExtras(_as_lora(lora), tuple(multimodal), cache_salt)
    keys = hasher.chain(token_ids, block_size, model=model, extras=extras)
    root = hasher.root_key(extras.lora.name if extras.lora else model)
    blocks = tuple(BlockHash(i, i * block_size, key) for i, key in enumerate(keys))
    tail = len(token_ids) - len(blocks) * block_size
    return HashedBlocks("llmd", algo, seed, block_size, root.to_bytes(8, "big"), blocks, tail)


def _hash_dynamo(
    token_ids: Sequence[int],
    block_size: int,
    *,
    lora: Lora | str | None = None,
    namespace: str | None = None,
    multimodal: Sequence[MultimodalItem] = (),
    image_token: int | None = None,
    eagle: bool = False,
) -> HashedBlocks:
    adapter = _as_lora(lora)
    seed = dynamo_seed(adapter.name if adapter else None, namespace)
    if image_token is not None:
        token_ids, multimodal = dynamo_padded_tokens(token_ids, multimodal, image_token), ()
    local = dynamo_local_hashes(token_ids, block_size, multimodal=multimodal, eagle=eagle, seed=seed)
    pairs = zip(dynamo_sequence_hashes(local), local, strict=True)
    blocks = tuple(BlockHash(i, i * block_size, key, local_hash=own) for i, (key, own) in enumerate(pairs))
    tail = _tail_tokens(len(token_ids), len(blocks), block_size, overlap=eagle)
    return HashedBlocks("dynamo", "xxh3_64", str(seed), block_size, b"", blocks, tail)


def _as_lora(lora: Lora | str | None) -> Lora | None:
    if isinstance(lora, str):
        return Lora(lora) if lora else None
    if lora is None or isinstance(lora, Lora):
        return lora
    raise HashingError(f"lora must be a name or a Lora, got {type(lora).__name__}")


def _tail_tokens(num_tokens: int, num_blocks: int, block_size: int, *, overlap: bool) -> int:
    """Tokens no block covers; with overlapping windows the last one reaches a token further."""
    covered = num_blocks * block_size + (1 if overlap and num_blocks else 0)
    return num_tokens - covered


_HASHERS: dict[str, Callable[..., HashedBlocks]] = {
    "vllm": _hash_vllm,
    "sglang": _hash_sglang,
    "llmd": _hash_llmd,
    "dynamo": _hash_dynamo,
}

DIALECTS: tuple[str, ...] = tuple(_HASHERS)
"""Whose hashes `hash_blocks` computes."""

DIALECT_OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {name: tuple(inspect.signature(hash_one).parameters)[2:] for name, hash_one in _HASHERS.items()}
)
"""The options of each dialect."""
