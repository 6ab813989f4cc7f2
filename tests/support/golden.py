"""Where the recorded behaviour of real engines lies."""

import os
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parents[2]
VECTORS = PROJECT_ROOT / "tests" / "vectors"


def golden_dir() -> Path | None:
    """The folder of full recordings: `KVATLAS_GOLDEN`, else `../shared/golden` beside the project, else None."""
    named = os.environ.get("KVATLAS_GOLDEN")
    if named:
        folder = Path(named)
        if not folder.is_dir():
            raise FileNotFoundError(f"KVATLAS_GOLDEN names {folder}, which is not a folder")
        return folder
    beside = PROJECT_ROOT.parent / "shared" / "golden"
    return beside if beside.is_dir() else None


def golden_files(kind: str, names: tuple[str, ...]) -> list[Path]:
    """Paths of the named recordings of one kind (`core` or `streams`): full ones if present, else committed samples.

    Never empty: a test that found no data must fail, not pass for want of something to check.
    """
    folder = golden_dir()
    roots = [folder / kind] if folder else []
    roots.append(VECTORS / kind)
    found = []
    for name in names:
        for root in roots:
            path = root / f"{name}.jsonl"
            if path.is_file():
                found.append(path)
                break
    if not found:
        raise FileNotFoundError(f"none of {names} in {[str(root) for root in roots]}; set KVATLAS_GOLDEN")
    return found
