"""The two sets of kernels, for tests that hold both to the same values."""

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

from kvatlas._native import _pure, load_native

NATIVE = load_native()
NOT_BUILT = "the native kernels are not built for this interpreter"

BACKENDS = [
    pytest.param(_pure, id="pure"),
    pytest.param(NATIVE, id="native", marks=pytest.mark.skipif(NATIVE is None, reason=NOT_BUILT)),
]


def can_build() -> bool:
    """Whether an installation on this machine must have built the native kernels: compiler and headers are there."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return os.environ.get("KVATLAS_NATIVE") != "0" and shutil.which("cc") is not None and header.is_file()
