"""Cases, the planner's answers to them, and whether these are the best there are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from brute_force import Best, BruteForce
from brute_force_shares import Shared, best_shared
from random_cases import Case

from autoparallel.planner.errors import InfeasibleError
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.features import features_of
from autoparallel.planner.requests.request import (
    CHUNKED_SCHEDULES,
    DERIVED_SCHEDULES,
    SCHEDULES,
)
from autoparallel.planning.objectives import plan_for

SAME = 1e-9
"""Relative: two steps within this are equal."""


ONE_STAGE_PER_RANK = features_of(
    SCHEDULES, (), (*SCHEDULES, *CHUNKED_SCHEDULES, *DERIVED_SCHEDULES)
)
"""The schedules that brute force goes through."""


def found_plan(case: Case) -> Plan | None:
    """The planner's answer, None if it says that nothing fits."""
    changes = case.request.features.changes
    features = replace(ONE_STAGE_PER_RANK, changes=ONE_STAGE_PER_RANK.changes | changes)
    request = replace(case.request, features=features)
    try:
        return plan_for(case.graph, case.blocks, case.cluster, request)
    except InfeasibleError:
        return None


def with_limit(case: Case) -> Case:
    """The case with the memory that it says, as a share of what the free plan takes."""
    if case.memory_share is None:
        return case
    free = found_plan(case)
    assert free is not None
    return case.limited(int(case.memory_share * free.prediction.peak_memory_bytes))


def best_of_all(case: Case, *, below: float = math.inf) -> Best | Shared | None:
    """The fastest plan, of unequal shares of the batch too where devices differ."""
    force = BruteForce(case.graph, case.blocks, case.cluster, case.request)
    even = force.best(below)
    if not case.is_mixed:
        return even
    return best_shared(force, below if even is None else even.step_seconds) or even


@dataclass(frozen=True)
class Solved:
    """A case, the planner's answer, and the best plan no slower than that."""

    case: Case
    found: Plan | None
    best: Best | Shared | None

    @property
    def seconds(self) -> float:
        return math.inf if self.found is None else self.found.prediction.step_seconds


def assert_is_near(own: Solved, worst: float) -> None:
    """The plan takes no more than a share ``worst`` longer than the best one, and fits if any does;
    the best one takes no less than the plan's bound."""
    if own.found is None:
        assert own.best is None, own.best.summary
        return
    bound = own.found.solver.bound_seconds
    assert 0 < bound <= own.seconds * (1 + SAME)
    assert own.found.solver.gap == pytest.approx(1 - bound / own.seconds, abs=SAME)
    assert own.best is not None, "the plan is one of all"
    assert bound <= own.best.step_seconds * (1 + SAME), own.best.summary
    assert own.seconds <= own.best.step_seconds * (1 + worst), own.best.summary
    assert own.seconds >= own.best.step_seconds * (1 - SAME), "better than every plan"
