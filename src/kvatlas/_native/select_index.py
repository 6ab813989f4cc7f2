"""Which core the fleet index runs on: the extension where it is built and kernels are native, else its Python twin."""

import importlib
from typing import cast

from kvatlas._native import _pure
from kvatlas._native._pure_index import IndexCore
from kvatlas._native.select import kernels

__all__ = ["IndexCore", "load_native_index", "new_index_core"]


def load_native_index() -> type[IndexCore] | None:
    """Return the extension's class; None when it is not built, does not load, or is older than these sources."""
    try:
        module = importlib.import_module("kvatlas._native.index_kernel")
    except ImportError:
        return None
    names = [name for name in dir(IndexCore) if not name.startswith("_")]
    native = getattr(module, "IndexCore", None)
    if native is None or not all(hasattr(native, name) for name in names):
        return None
    return cast("type[IndexCore]", native)


_core_class = None if kernels is _pure else load_native_index()


def new_index_core(seed: int, max_bytes: int = 0) -> IndexCore:
    """Return an empty core of the backend that runs; see `_pure_index.IndexCore`."""
    return (_core_class or IndexCore)(seed, max_bytes)
