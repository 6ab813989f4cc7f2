"""Names of blocks: every engine's digest byte for byte, and kvatlas's own block key.

Pure functions of their arguments (and one random seed): no files, sockets, clocks or caches of requests live here.
"""

from kvatlas.hashing.block_extras import NO_BLOCK_EXTRAS, BlockExtras
from kvatlas.hashing.block_key import BlockKeyHasher
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
from kvatlas.hashing.vllm import VLLM_ALGOS, VllmHasher, external_hash, hash64, key_with_group

__all__ = [
    "NO_BLOCK_EXTRAS",
    "NO_EXTRAS",
    "VLLM_ALGOS",
    "BlockExtras",
    "BlockKeyHasher",
    "Lora",
    "MultimodalItem",
    "PromptEmbeds",
    "PublishedKeys",
    "RequestExtras",
    "TaggedKeys",
    "VllmHasher",
    "block_extra_keys",
    "external_hash",
    "hash64",
    "key_with_group",
    "published_extra_keys",
]
