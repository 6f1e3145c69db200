"""Sizes of the random suites: few cases by default, many in the profile ``nightly``.

``pytest --hypothesis-profile=nightly`` chooses the other profile, for suites of seeds as well as
for those of hypothesis. By default the examples of hypothesis are the same in every session.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis.internal.conjecture import providers

DEFAULT, NIGHTLY = "few", "nightly"
NIGHTLY_CASES = 500

settings.register_profile(DEFAULT, max_examples=25, deadline=None, derandomize=True)
settings.register_profile(NIGHTLY, max_examples=NIGHTLY_CASES, deadline=None)

# Hypothesis would parse every module that is loaded for constants to draw, for seconds, and draw
# other examples where other modules are loaded.
providers._get_local_constants = providers.Constants


def sample_size(few: int, many: int) -> int:
    """Return the size of a sample: ``few`` by default, ``many`` in the nightly profile."""
    return many if settings.get_current_profile_name() == NIGHTLY else few


def seeds(few: int, many: int = NIGHTLY_CASES) -> range:
    """Return the seeds of a random suite: ``few`` by default, ``many`` in the nightly profile."""
    return range(sample_size(few, many))
