"""What every tier shares: how hard Hypothesis tries, and an environment no developer's shell leaks into."""

import os

import pytest
from hypothesis import HealthCheck, settings

# Machines that run tests are shared and slow at times: a wall-clock deadline would report the machine, not the code.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

STEERS_TESTS = {
    "KVATLAS_CHAOS_REQUESTS",
    "KVATLAS_CHAOS_SEEDS",
    "KVATLAS_DIFFERENTIAL_CONFIGURATIONS",
    "KVATLAS_GOLDEN",
    "KVATLAS_NATIVE",
    "KVATLAS_REAL_PYTHON",
    "KVATLAS_REQUIRE_REAL",
}


def pytest_configure(config: pytest.Config) -> None:
    """Drop KVATLAS_* settings of the shell that runs the tests, other than those that steer the tests themselves."""
    for name in [name for name in os.environ if name.startswith("KVATLAS_")]:
        if name not in STEERS_TESTS:
            del os.environ[name]
