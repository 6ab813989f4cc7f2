"""Kernels of the hot path, in C where it is built, in Python otherwise: hashes of blocks, and the fleet index's core.

What lives here: loops whose cost is measured. What must not: anything that knows a request, an engine's settings, or a
file; the C files do not even know Python.
"""

from kvatlas._native._pure_column import NativeBatch
from kvatlas._native._pure_index import IndexCore
from kvatlas._native.arguments import MAX_TOKEN_ID
from kvatlas._native.runs import Run, append_batch
from kvatlas._native.select import Kernels, choose, kernels, load_native
from kvatlas._native.select_index import load_native_index, new_index_core

__all__ = [
    "MAX_TOKEN_ID",
    "IndexCore",
    "Kernels",
    "NativeBatch",
    "Run",
    "append_batch",
    "backend_name",
    "chain_fnv1a_cbor",
    "chain_sha256_cbor",
    "chain_sha256_pages",
    "chain_xxh3",
    "chain_xxh3_128_cbor",
    "chain_xxh3_pairs",
    "chain_xxh64",
    "choose",
    "fnv1a_64",
    "load_native",
    "load_native_index",
    "new_index_core",
    "pack_tokens",
    "scan_zmtp",
    "xxh3_64",
    "xxh3_128",
    "xxh3_blocks",
]

accept_run = kernels.accept_run
chain_fnv1a_cbor = kernels.chain_fnv1a_cbor
chain_sha256_cbor = kernels.chain_sha256_cbor
chain_sha256_pages = kernels.chain_sha256_pages
chain_xxh3 = kernels.chain_xxh3
chain_xxh3_128_cbor = kernels.chain_xxh3_128_cbor
chain_xxh3_pairs = kernels.chain_xxh3_pairs
chain_xxh64 = kernels.chain_xxh64
fnv1a_64 = kernels.fnv1a_64
pack_tokens = kernels.pack_tokens
scan_zmtp = kernels.scan_zmtp
xxh3_64 = kernels.xxh3_64
xxh3_128 = kernels.xxh3_128
xxh3_blocks = kernels.xxh3_blocks


def backend_name() -> str:
    """Return which backend runs: "pure", or "native" with the SHA-256 it found, as in "native (sha-ni)"."""
    return kernels.BACKEND
