"""How faults are named for a run."""

import pytest

from kvatlas.chaos import DEFAULT_SCENARIOS, scenario
from kvatlas.errors import ConfigError
from kvatlas.simulator import Drop, ReplayFault


def test_names_specs_and_words_join() -> None:
    """A bare name has sensible values for the length of the run; a spec is taken as it is."""
    read = scenario("drop+replay:mode=slow+no_replay", 400.0)
    assert read.faults == (Drop(at_s=100.0, for_s=100.0, p=0.05), ReplayFault(mode="slow"))
    assert (read.has_replay, read.polls_work) == (False, False)
    assert scenario("drop", 400.0).polls_work
    assert scenario("none", 400.0).faults == ()


def test_every_default_is_read() -> None:
    """All rows of a run without --fault parse, the mixture has many faults."""
    assert len({scenario(text, 100.0).name for text in DEFAULT_SCENARIOS}) == len(DEFAULT_SCENARIOS)
    assert len(scenario("mixture", 100.0).faults) > 10


@pytest.mark.parametrize("text", ["dorp", "drop+", "drop:q=1", "drop:at={then}", "drop:at={"])
def test_what_is_none_of_these_is_refused(text: str) -> None:
    """The message says what is known."""
    with pytest.raises(ConfigError, match="known"):
        scenario(text, 100.0)
