"""The tokenizer folder that outlives `kvatlas sim`."""

from pathlib import Path

import pytest

from kvatlas.cli.tiny_model import kept_tiny_model
from kvatlas.rendering import LocalRenderer


def test_folder_is_in_the_cache_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commands get the same folder, which loads as a tokenizer; nothing else is left behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with kept_tiny_model() as first:
        pass
    with kept_tiny_model() as second:
        assert LocalRenderer.load(second).tokenize("hello")
    assert first == second
    assert [path.name for path in (tmp_path / "kvatlas").iterdir()] == [Path(first).name]


def test_folder_that_lost_a_file_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cleaners of cache directories delete single files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with kept_tiny_model() as folder:
        (Path(folder) / "tokenizer.json").unlink()
    with kept_tiny_model() as again:
        assert again == folder
        assert (Path(folder) / "tokenizer.json").is_file()


def test_relative_cache_directory_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG specification says; the home directory's .cache is used."""
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    with kept_tiny_model() as folder:
        assert Path(folder).parent == tmp_path / ".cache" / "kvatlas"


def test_unwritable_cache_gives_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read-only homes still run simulated engines; the folder then ends with the command."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with kept_tiny_model() as folder:
        assert (Path(folder) / "tokenizer.json").is_file()
    assert not Path(folder).exists()
