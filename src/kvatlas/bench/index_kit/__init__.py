"""The index benchmark's common half: the work, how it is timed, and the peer's side of it.

What lives here runs in two interpreters, ours and one that has the peer but not this package. So it needs nothing but
the standard library, and its modules name each other relatively. What must not: anything of the rest of kvatlas.
"""

from .serve import serve
from .workload import (
    BLOCK_SIZE,
    PATTERNS,
    Prompt,
    Run,
    laddered,
    last_prompts,
    local_hashes,
    sessions,
    stores,
    token_ids,
)
from .works import IndexUnderTest, Works

__all__ = [
    "BLOCK_SIZE",
    "PATTERNS",
    "IndexUnderTest",
    "Prompt",
    "Run",
    "Works",
    "laddered",
    "last_prompts",
    "local_hashes",
    "serve",
    "sessions",
    "stores",
    "token_ids",
]
