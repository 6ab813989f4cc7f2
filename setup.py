"""The extensions' build; everything else about the package stands in pyproject.toml.

The extensions are optional: without a compiler, headers or Cython the package installs and runs its Python twin. For a
wheel it is built against the stable ABI, so that one wheel serves every CPython from 3.11 on. An editable install
serves this interpreter alone and is built for it: lists of token ids are read four times as fast. `KVATLAS_ABI3=0|1`
overrides.
"""

import os
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/kvatlas/_native")
WANTS_STABLE_ABI = os.environ.get("KVATLAS_ABI3", "1" if "bdist_wheel" in sys.argv else "0") == "1"
STABLE_ABI = WANTS_STABLE_ABI and not sysconfig.get_config_var("Py_GIL_DISABLED")  # there is none without the GIL


# Sources that belong to the index alone, and those both extensions need; all others are the hash kernels'.
INDEX_SOURCES = {
    "apply",
    "batch",
    "books",
    "column",
    "doubt",
    "dump",
    "flat",
    "id_runs",
    "index",
    "memory",
    "recency",
    "relief",
    "uses",
    "walk",
    "worker_sets",
}
SHARED_SOURCES = {"block_key", "xxh3"}


def extension(name: str, sources: list[Path]) -> Extension:
    """One extension of the package's C files and a Cython shell of the same name."""
    return Extension(
        f"kvatlas._native.{name}",
        sources=[str(NATIVE / f"{name}.pyx"), *map(str, sources)],
        depends=sorted(map(str, [*NATIVE.rglob("*.h"), *NATIVE.glob("*.pxi")])),
        include_dirs=[str(NATIVE), str(NATIVE / "c")],
        define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE_ABI else [],
        py_limited_api=STABLE_ABI,
        extra_compile_args=["-std=c11", "-O3", "-g0", "-fvisibility=hidden"],
    )


def extensions() -> list[Extension]:
    """The hash kernels and the index's core, or nothing where Cython is missing."""
    try:
        from Cython.Build import cythonize  # noqa: PLC0415 (a build without isolation may lack it)
    except ImportError:
        return []
    sources = sorted((NATIVE / "c").glob("*.c"))
    kernel = extension("kernel", [path for path in sources if path.stem not in INDEX_SOURCES])
    index_kernel = extension("index_kernel", [path for path in sources if path.stem in INDEX_SOURCES | SHARED_SOURCES])
    built = list(cythonize([kernel, index_kernel], build_dir="build/cython"))
    for built_extension in built:
        built_extension.optional = True  # on what cythonize returns: it does not carry the mark over
    return built


setup(
    ext_modules=extensions(),
    options={
        "build_ext": {"parallel": 2},  # one extension each
        **({"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {}),
    },
)
