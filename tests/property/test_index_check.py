"""The index against a naive model under churn: mid-chain eviction, re-stores, copies, orphans, purged workers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.bench.index_check import CheckResult, check_index
from kvatlas.events import BlockRemoved
from kvatlas.hashing import BlockKeyHasher
from kvatlas.index import PrefixIndex


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_answer_is_the_models(seed: int):
    """1,500 finds with 150 changes in between, for any seed: none wrong, by keys, by tokens, by match, for a few workers."""
    assert check_index(1_500, seed=seed) == CheckResult(1_500, 0)


class Forgetful(PrefixIndex):
    """An index with a fault in one operation."""

    fault = ""

    def ingest(self, worker_id: str, payload: bytes) -> object:
        """Drop batches that remove, when that is the fault."""
        if self.fault == "removals" and BlockRemoved.__name__.encode() in payload:
            return None
        return super().ingest(worker_id, payload)

    def purge(self, worker_id: str) -> None:
        """Do nothing, when that is the fault."""
        if self.fault != "purges":
            super().purge(worker_id)


@pytest.mark.parametrize("fault", ["removals", "purges"])
def test_a_faulty_index_is_seen(fault: str):
    """The check finds wrong answers where there are some, so that none means something."""
    index = Forgetful(BlockKeyHasher(1))
    index.fault = fault
    result = check_index(20_000, seed=1, index=index)
    assert result.wrong > 0
