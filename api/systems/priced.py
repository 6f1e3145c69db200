"""Prices of another system's configurations by the cost model of the plan.

In: a plan with the path of its file, configurations. Out: the fastest configuration that fits the
devices' memory, or that needs the least; without prices, the first. Prices need the plan's model,
whose code may be untrusted or missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autoparallel.analysis.plan_model import load_plan_model
from autoparallel.cache.plan_cache import plan_cache
from autoparallel.options.progress import progress
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class PricedConfig:
    """Configuration with its price. ``reason`` says why there is none, "" otherwise."""

    configuration: Configuration
    step_seconds: float | None = None
    peak_memory_bytes: int | None = None
    fits: bool | None = None
    reason: str = ""


def price(
    plan: Plan, plan_path: Path, candidates: Sequence[Configuration], *, trust: bool
) -> PricedConfig:
    """Price the candidates and return the best."""
    try:
        with plan_cache() as cache, progress() as observe:
            model = load_plan_model(
                plan, str(plan_path), trust=trust, cache=cache.values, observe=observe
            )
            observe("prices", 0, 0)
            chosen, found = model.best_configuration(candidates)
    except AutoparallelError as error:
        return PricedConfig(candidates[0], reason=f"{error.what} ({error.code})")
    peak = found.prediction.peak_memory_bytes
    fits = peak <= plan.cluster.usable_memory_bytes
    return PricedConfig(chosen, found.prediction.step_seconds, peak, fits)
