"""Which paths of the public port reach an engine. No I/O.

Engines serve their clients and their operators on one port: beside /v1/ and /v2/ there are routes that empty the cache,
put the engine to sleep, run code on its workers or load adapters. Those are not for everybody who may send a prompt.
"""

from urllib.parse import unquote

__all__ = ["FORWARDED_PATHS", "FORWARDED_PREFIXES", "WITHHELD_PATHS", "is_forwarded"]

FORWARDED_PREFIXES = ("/v1/", "/v2/")
FORWARDED_PATHS = frozenset(
    (
        "/classify",
        "/detokenize",
        "/inference/v1/generate",
        "/invocations",
        "/load",
        "/ping",
        "/pooling",
        "/rerank",
        "/score",
        "/tokenize",
        "/version",
    )
)
"""Paths outside /v1/ and /v2/ that clients use."""
WITHHELD_PATHS = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
"""Paths inside /v1/ that change what an engine serves."""
_ODD_SEGMENTS = frozenset(("", ".", ".."))


def is_forwarded(path: str) -> bool:
    """Whether a request path (without its query) is for clients.

    Judged as an engine, or a proxy in front of it, may read the path: percent-encoding is undone, a slash at the end is
    nothing, and a path that somebody might normalise into another one (`//`, `/./`, `/../`, a backslash) is refused.
    Cost: about 0.5 us.
    """
    if "%" in path:
        path = unquote(path)
    plain = path.removesuffix("/")
    if "\\" in plain or not _ODD_SEGMENTS.isdisjoint(plain[1:].split("/")):
        return False
    return plain in FORWARDED_PATHS or (plain.startswith(FORWARDED_PREFIXES) and plain not in WITHHELD_PATHS)
