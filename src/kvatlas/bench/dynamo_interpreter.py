"""The Python that has the peer of the index and ingest benchmarks."""

import shutil
from pathlib import Path

from kvatlas.errors import ConfigError

__all__ = ["DYNAMO_NEEDS", "require_dynamo"]

DYNAMO_NEEDS = "ai-dynamo-runtime 1.6.1"
"""What its interpreter must have installed."""


def require_dynamo(interpreter: str | Path) -> Path:
    """Return the interpreter if it can be started. Whether Dynamo is in it shows when the peer is first asked.

    Raises:
        ConfigError: there is no such program.
    """
    if shutil.which(str(interpreter)) is None:
        raise ConfigError(
            f"the interpreter {str(interpreter)!r} cannot be started: make a virtual environment, "
            f"`pip install {DYNAMO_NEEDS.replace(' ', '==')}` in it, and give its python with --interpreter"
        )
    return Path(interpreter)
