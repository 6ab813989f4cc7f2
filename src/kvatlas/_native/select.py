"""Which backend runs: the extension where it is built, else its Python twin.

`KVATLAS_NATIVE=1` makes a missing extension an error, `KVATLAS_NATIVE=0` leaves a built one unused.
"""

import importlib
import os
from array import array
from collections.abc import Sequence
from typing import Protocol, cast

from kvatlas._native import _pure
from kvatlas._native.runs import Run
from kvatlas.errors import ConfigError

__all__ = ["NAMES", "Kernels", "choose", "load_native"]

NAMES = (
    "BACKEND",
    "accept_run",
    "chain_fnv1a_cbor",
    "chain_sha256_cbor",
    "chain_sha256_pages",
    "chain_xxh3",
    "chain_xxh3_128_cbor",
    "chain_xxh3_pairs",
    "chain_xxh64",
    "fnv1a_64",
    "pack_tokens",
    "scan_zmtp",
    "xxh3_64",
    "xxh3_128",
    "xxh3_blocks",
)
"""What a backend consists of. Written out, so that a stale extension is noticed at import and not at the first call."""


class Kernels(Protocol):
    """A backend. What the functions do stands in `_pure`, whose code says it too."""

    BACKEND: str

    def accept_run(
        self,
        payloads: list[bytes],
        seq: int,
        last_ts: float,
        digests: "array[int]",
        must_rise: bool,  # noqa: FBT001 - as in `_pure`
        /,
    ) -> tuple[int, float]: ...

    def scan_zmtp(
        self, received: memoryview, count: int, pending: int | None, most_bytes: int, /
    ) -> tuple[list[Run], int, list[bytes], int, int, int | None]: ...
    def pack_tokens(self, token_ids: Sequence[int], /) -> memoryview: ...
    def chain_sha256_cbor(
        self, token_ids: Sequence[int], block_size: int, parent: bytes, extras: Sequence[bytes | None] | None = None, /
    ) -> list[bytes]: ...
    def chain_sha256_pages(
        self, token_ids: Sequence[int], page_size: int, parent: bytes = b"", /, *, bigram: bool = False
    ) -> list[bytes]: ...
    def chain_xxh3(
        self,
        token_ids: Sequence[int],
        block_size: int,
        parent: int,
        seed: int,
        extras: Sequence[bytes | None] | None = None,
        /,
    ) -> "array[int]": ...
    def chain_fnv1a_cbor(
        self, token_ids: Sequence[int], block_size: int, parent: int, extras: Sequence[bytes | None] | None = None, /
    ) -> "array[int]": ...
    def chain_xxh3_128_cbor(
        self, token_ids: Sequence[int], block_size: int, parent: bytes, extras: Sequence[bytes | None] | None = None, /
    ) -> list[bytes]: ...
    def chain_xxh64(
        self, token_ids: Sequence[int], block_size: int, parent: int, extras: Sequence[bytes | None] | None = None, /
    ) -> "array[int]": ...
    def xxh3_blocks(
        self,
        token_ids: Sequence[int],
        block_size: int,
        seed: int,
        extras: Sequence[bytes | None] | None = None,
        /,
        *,
        overlap: int = 0,
    ) -> "array[int]": ...
    def chain_xxh3_pairs(self, hashes: Sequence[int], parent: int | None, seed: int, /) -> "array[int]": ...
    def fnv1a_64(self, data: bytes, /) -> int: ...
    def xxh3_64(self, data: bytes, seed: int, /) -> int: ...
    def xxh3_128(self, data: bytes, seed: int, /) -> bytes: ...


def load_native() -> Kernels | None:
    """Return the extension, or None when it is not built, does not load here, or is older than these sources."""
    try:
        module = importlib.import_module("kvatlas._native.kernel")
    except ImportError:
        return None
    return cast("Kernels", module) if all(hasattr(module, name) for name in NAMES) else None


def choose(wish: str | None = None) -> Kernels:
    """Return the backend to run.

    Args:
        wish: "0" for Python, "1" for the extension, "" or None for the faster one there is; usually KVATLAS_NATIVE.

    Raises:
        ConfigError: another wish, or "1" without an extension.
    """
    if wish not in {None, "", "0", "1"}:
        raise ConfigError(f"KVATLAS_NATIVE must be 0 (Python), 1 (native) or unset, got {wish!r}")
    native = None if wish == "0" else load_native()
    if native is None and wish == "1":
        raise ConfigError(
            "KVATLAS_NATIVE=1, but the extension is not built for this interpreter: install a C compiler and the "
            "interpreter's headers and reinstall kvatlas, or unset KVATLAS_NATIVE"
        )
    return _pure if native is None else native


kernels = choose(os.environ.get("KVATLAS_NATIVE"))
