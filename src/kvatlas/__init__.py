"""kvatlas: an exact map of which KV-cache block lives on which LLM engine, and a router that uses it.

Public rooms: `kvatlas.hashing`, `kvatlas.events`, `kvatlas.prefix_cache`, `kvatlas.index`, `kvatlas.stream`.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
