"""Policies by name."""

from collections.abc import Callable

from kvatlas.errors import ConfigError
from kvatlas.routing.policies import (
    CostPolicy,
    LeastLoadedPolicy,
    LongestPrefixPolicy,
    RandomPolicy,
    RoundRobinPolicy,
)
from kvatlas.routing.ranking import Policy, PolicySettings

__all__ = ["DEFAULT_POLICY", "POLICY_NAMES", "make_policy"]

_POLICIES: dict[str, Callable[..., Policy]] = {
    CostPolicy.name: CostPolicy,
    LeastLoadedPolicy.name: LeastLoadedPolicy,
    LongestPrefixPolicy.name: LongestPrefixPolicy,
    RandomPolicy.name: RandomPolicy,
    RoundRobinPolicy.name: RoundRobinPolicy,
}

DEFAULT_POLICY = CostPolicy.name
POLICY_NAMES: tuple[str, ...] = tuple(sorted(_POLICIES))


def make_policy(name: str, *, seed: int = 0, settings: PolicySettings | None = None) -> Policy:
    """A fresh policy.

    Args:
        name: one of POLICY_NAMES.
        seed: for draws and for the order of first turns; the same seed and calls give the same picks.
        settings: knobs; the defaults when None.

    Raises:
        ConfigError: no such policy.
    """
    maker = _POLICIES.get(name)
    if maker is None:
        raise ConfigError(f"no policy is called {name!r}; choose one of {', '.join(POLICY_NAMES)}")
    return maker(seed=seed, settings=settings)
