"""The adapter for outside harnesses: plain operations in, (worker, rank) -> blocks out; and their own check passes."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.golden import PROJECT_ROOT

ADAPTER = PROJECT_ROOT / "benchmarks" / "index_adapter.py"
HARNESS = PROJECT_ROOT.parent / "shared" / "bench" / "index" / "dynamo_bench.py"


def loaded() -> ModuleType:
    """The adapter's module, as a harness imports it."""
    spec = importlib.util.spec_from_file_location("index_adapter", ADAPTER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BLOCKS = [(1000 + block, 7 * block + 1) for block in range(6)]
FIND = ("find", [local for _, local in BLOCKS], [block for block, _ in BLOCKS], None)


class TestOperations:
    def setup_method(self) -> None:
        self.index = loaded().Kvatlas()
        self.do(("store", 3, 0, None, BLOCKS[:4]), ("store", 3, 1, None, BLOCKS), ("store", 5, 0, None, BLOCKS[:2]))

    def do(self, *operations: tuple) -> None:
        for operation in operations:
            self.index.apply(self.index.prepare(operation))
        self.index.flush()

    def found(self) -> dict[tuple[int, int], int]:
        return self.index.scores(self.index.find(self.index.prepare(FIND)))

    def test_stored(self) -> None:
        """Ranks of one worker are apart; those that hold nothing are not named."""
        assert self.found() == {(3, 0): 4, (3, 1): 6, (5, 0): 2}

    def test_a_store_continues_its_parent(self) -> None:
        """A later run joins after its parent's hash."""
        self.do(("store", 3, 0, BLOCKS[3][0], BLOCKS[4:]))
        assert self.found()[3, 0] == 6

    def test_removed(self) -> None:
        """A block gone from the middle ends the prefix there."""
        self.do(("remove", 3, 1, [BLOCKS[2][0]]))
        assert self.found()[3, 1] == 2

    def test_cleared(self) -> None:
        """A clear empties one rank."""
        self.do(("clear", 3, 1))
        assert self.found() == {(3, 0): 4, (5, 0): 2}

    def test_a_worker_goes_with_its_ranks(self) -> None:
        """All ranks of a removed worker are forgotten, and it can come back."""
        self.index.remove_worker(3)
        assert self.found() == {(5, 0): 2}
        self.do(("store", 3, 0, None, BLOCKS[:1]))
        assert self.found() == {(3, 0): 1, (5, 0): 2}

    def test_no_dump(self) -> None:
        """The harness leaves a dump out when an index says it has none."""
        with pytest.raises(NotImplementedError):
            self.index.dump()

    def test_an_unknown_operation(self) -> None:
        """What the adapter does not know is named."""
        with pytest.raises(ValueError, match="got 'move'"):
            self.index.prepare(("move", 1, 2))


@pytest.mark.skipif(not HARNESS.is_file(), reason="the harness beside the project is not here")
def test_the_harness_own_check():
    """4,000 finds of the harness's churn: none wrong."""
    environment = {**os.environ, "PYTHONPATH": str(ADAPTER.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(HARNESS), "check", "--adapter", "index_adapter:Kvatlas"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=110)
    assert '"finds": 4000, "wrong": 0' in done.stdout
    assert not Path(HARNESS.parent / "__pycache__").exists()
