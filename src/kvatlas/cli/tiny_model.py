"""A tokenizer folder that outlives the command: simulated engines started tomorrow have the one of today."""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tokenizers

from kvatlas import __version__
from kvatlas.rendering import TINY_CHAT_TEMPLATE, write_tiny_model

__all__ = ["kept_tiny_model"]

_VOCAB_SIZE = 1000
_SEED = 0
_FILES = ("tokenizer.json", "tokenizer_config.json")


@contextlib.contextmanager
def kept_tiny_model() -> Iterator[str]:
    """The folder of the tiny tokenizer in the user's cache directory, made when it is not there.

    Where that cannot be written to, a temporary folder that ends with the block.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = _cache_folder() / f"tiny-model-{_fingerprint()}"
            _complete(folder)
        except (OSError, RuntimeError):  # RuntimeError: there is no home directory
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvatlas-sim-")))
            write_tiny_model(folder, vocab_size=_VOCAB_SIZE, seed=_SEED)
        yield str(folder)


def _cache_folder() -> Path:
    """`kvatlas` in the directory the XDG base directory specification names; a relative one is to be ignored."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "kvatlas"


def _fingerprint() -> str:
    """Whatever decides the files' bytes decides the folder's name."""
    made_of = (_VOCAB_SIZE, _SEED, __version__, tokenizers.__version__, TINY_CHAT_TEMPLATE)
    return hashlib.sha256(repr(made_of).encode()).hexdigest()[:12]


def _complete(folder: Path) -> None:
    """Write what is missing. Each file appears whole: others may be reading, or writing the same bytes."""
    if all((folder / name).is_file() for name in _FILES):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="tiny-model-") as draft:
        write_tiny_model(draft, vocab_size=_VOCAB_SIZE, seed=_SEED)
        for name in _FILES:
            (Path(draft) / name).replace(folder / name)
