"""Names of blocks: every engine's digest byte for byte, and kvatlas's own block key.

Pure functions of their arguments (and one random seed): no files, sockets, clocks or caches of requests live here.
"""

from kvatlas.hashing.block_extras import NO_BLOCK_EXTRAS, BlockExtras
from kvatlas.hashing.block_key import BlockKeyHasher
from kvatlas.hashing.dialects import (
    DIALECT_OPTIONS,
    DIALECTS,
    SGLANG_CHAINS,
    BlockHash,
    HashedBlocks,
    hash_blocks,
)
from kvatlas.hashing.dynamo import (
    dynamo_block_hash,
    dynamo_local_hashes,
    dynamo_multimodal_hash,
    dynamo_padded_tokens,
    dynamo_seed,
    dynamo_sequence_hashes,
)
from kvatlas.hashing.extra_keys import (
    NO_EXTRAS,
    Lora,
    MultimodalItem,
    PromptEmbeds,
    PublishedKeys,
    RequestExtras,
    TaggedKeys,
    block_extra_keys,
    published_extra_keys,
)
from kvatlas.hashing.llmd import LLMD_ALGOS, LlmdHasher, fnv1a_64
from kvatlas.hashing.sglang import (
    SGLANG_EVENT_FORMATS,
    SglangNamespace,
    sglang_chain,
    sglang_event_hash,
    sglang_namespaced_hash,
    sglang_page_digest,
)
from kvatlas.hashing.vllm import VLLM_ALGOS, VllmHasher, external_hash, hash64, key_with_group
from kvatlas.hashing.words import signed64, unsigned64

__all__ = [
    "DIALECTS",
    "DIALECT_OPTIONS",
    "LLMD_ALGOS",
    "NO_BLOCK_EXTRAS",
    "NO_EXTRAS",
    "SGLANG_CHAINS",
    "SGLANG_EVENT_FORMATS",
    "VLLM_ALGOS",
    "BlockExtras",
    "BlockHash",
    "BlockKeyHasher",
    "HashedBlocks",
    "LlmdHasher",
    "Lora",
    "MultimodalItem",
    "PromptEmbeds",
    "PublishedKeys",
    "RequestExtras",
    "SglangNamespace",
    "TaggedKeys",
    "VllmHasher",
    "block_extra_keys",
    "dynamo_block_hash",
    "dynamo_local_hashes",
    "dynamo_multimodal_hash",
    "dynamo_padded_tokens",
    "dynamo_seed",
    "dynamo_sequence_hashes",
    "external_hash",
    "fnv1a_64",
    "hash64",
    "hash_blocks",
    "key_with_group",
    "published_extra_keys",
    "sglang_chain",
    "sglang_event_hash",
    "sglang_namespaced_hash",
    "sglang_page_digest",
    "signed64",
    "unsigned64",
]
