"""What an operator may set, and how it is read and checked.

Here: the shapes (msgspec Structs that refuse unknown fields), the defaults, the reader of files and of `--worker`
texts. Not here: anything that acts on them.
"""

from kvatlas.config.load import is_endpoint, load_serve_config, parse_worker
from kvatlas.config.model import NO_EVENTS, ServeConfig, WorkerConfig

__all__ = ["NO_EVENTS", "ServeConfig", "WorkerConfig", "is_endpoint", "load_serve_config", "parse_worker"]
